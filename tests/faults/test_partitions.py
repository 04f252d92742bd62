"""Hosts that lose contact with each other, though all their ranks live: the error on each rank.

Connections are cut without privileges: a filter on a socket drops all packets that arrive, also
acknowledgements. So neither end receives anything any more.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import stat
import struct
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import farandole as fd
import harness
from harness import Outcome, World, split

Spawn = Callable[..., World]
_ATTACH_FILTER, _DETACH_FILTER = 26, 27  # SO_ATTACH_FILTER, SO_DETACH_FILTER


def tcp_sockets() -> Iterator[socket.socket]:
    """Copies of this process' TCP sockets: closing them closes nothing."""
    for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208
        try:
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
        except OSError:  # the descriptor of the folder itself
            continue
        with socket.socket(fileno=os.dup(number)) as found:
            if found.family == socket.AF_INET and found.type == socket.SOCK_STREAM:
                yield found


def local_ports() -> list[int]:
    return [each.getsockname()[1] for each in tcp_sockets()]


def cut_off(ports: set[int]) -> None:
    """Drops all that arrives on connections to these ports of peers."""
    nothing = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # return 0
    program = struct.pack("HL", 1, ctypes.addressof(nothing))
    for each in tcp_sockets():
        try:
            port = each.getpeername()[1]
        except OSError:  # it listens
            continue
        if port in ports:
            each.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)


def hear_again() -> None:
    for each in tcp_sockets():
        with contextlib.suppress(OSError):  # it has no filter
            each.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)


def loses_sight(sides: list[list[int]]) -> None:
    """Ranks of one side of `sides` receive nothing any more from ranks of the other."""
    fd.init()
    fd.all_reduce(np.ones(300_000, np.float32))
    fd.all_reduce(np.ones(3))
    harness.tell(local_ports())
    ports = harness.listen()
    for mine, others in (sides, sides[::-1]):
        if fd.rank() in mine:
            cut_off({port for other in others for port in ports[other]})
    while True:
        fd.all_reduce(np.ones(3))


def cut(spawn: Spawn, parts: str, size: int, sides: list[list[int]]) -> list[Outcome]:
    world = spawn(size, env=split(parts))
    world.start(loses_sight, sides)
    ports = world.hear_all()
    for rank in range(size):
        world.say(rank, ports)
    outcomes = world.outcomes()
    for o in outcomes:
        assert o.error == "PeerLost", o.trace
        assert "cut off rather than dead" in o.text
    return outcomes


def test_each_side_of_a_partition_has_one_verdict_that_names_the_other(spawn: Spawn) -> None:
    outcomes = cut(spawn, "2,2", 4, [[0, 1], [2, 3]])
    for side, other in (([0, 1], [2, 3]), ([2, 3], [0, 1])):
        assert len({outcomes[rank].text for rank in side}) == 1
        assert outcomes[side[0]].rank in other


def test_ranks_that_still_hear_each_other_by_way_of_a_third_have_one_verdict(spawn: Spawn) -> None:
    outcomes = cut(spawn, "1,1,1", 3, [[0], [1]])
    assert len({o.text for o in outcomes}) == 1, [o.text for o in outcomes]
    assert outcomes[0].rank in (0, 1)


def waits_for_rank_0() -> None:
    fd.init()
    fd.all_reduce(np.ones(3))
    harness.tell("there")
    if fd.rank() == 0:
        harness.listen()
    fd.all_reduce(np.ones(3), timeout=3.0)


@pytest.mark.parametrize("parts", ["1,2", "2,1"])
def test_a_stopped_rank_0_judges_nobody(spawn: Spawn, parts: str) -> None:
    world = spawn(3, env=split(parts))
    world.start(waits_for_rank_0)
    world.hear_all()
    world.signal(0, signal.SIGSTOP)
    outcomes = world.outcomes([1, 2])
    for o in outcomes:  # a rank that shares its host sees that it is stopped
        assert o.error == ("Stalled" if parts == "1,2" else "PeerHung"), o.trace
        assert o.rank == 0
    assert outcomes[0].text == outcomes[1].text
    world.signal(0, signal.SIGCONT)
    world.say(0, "go on")
    late = world.outcome(0)
    assert late.text == outcomes[0].text, late.trace  # it receives the verdict of the others
