"""Connections between hosts that are reset, go silent or become slow, though all ranks live."""

from __future__ import annotations

import ctypes
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np
import pytest
from test_partitions import cut_off, hear_again, local_ports, tcp_sockets

import farandole as fd
import harness
from harness import World, launch, split

Spawn = Callable[..., World]
_LIBC = ctypes.CDLL(None, use_errno=True)


def reset(found: socket.socket) -> None:
    """Resets the connection, as a router that has lost its state would."""
    found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    nowhere = struct.pack("H14x", socket.AF_UNSPEC)
    assert _LIBC.connect(found.fileno(), nowhere, len(nowhere)) == 0


def ends_of(found: socket.socket) -> tuple[int, int] | None:
    """Local and remote port; None for a socket that listens."""
    try:
        return found.getsockname()[1], found.getpeername()[1]
    except OSError:
        return None


def connections() -> set[tuple[int, int]]:
    return {ends for each in tcp_sockets() if (ends := ends_of(each)) is not None}


def reset_all(but: Collection[tuple[int, int]] = ()) -> None:
    to_go = connections() - set(but)
    assert to_go
    for each in tcp_sockets():
        if ends_of(each) in to_go:
            reset(each)


# ---- control connections ----


def goes_on(who: int, turns: int) -> list[float]:
    """Resets the control connections of rank `who`. Data run over connections of their own."""
    fd.init()
    control = connections()
    sums = []
    for _ in range(turns):
        if fd.rank() == who:
            reset_all(but=connections() - control)
        time.sleep(0.3)
        control = connections()
        sums.append(float(fd.all_reduce(np.ones(3))[0]))
        fd.shutdown()
        fd.init()
        control = connections()
    return sums


@pytest.mark.parametrize(("parts", "who"), [("1,1", 0), ("1,1", 1), ("2,1", 1), ("2,1", 2)])
def test_ranks_go_on_where_control_connections_were_reset(
    spawn: Spawn, parts: str, who: int
) -> None:
    size = {"1,1": 2, "2,1": 3}[parts]
    world = spawn(size, env=split(parts))
    for sums in world.run(goes_on, who, 3):
        assert sums == [size] * 3
    assert any("has been made again; no message is missing" in world.output(r) for r in range(size))


def leaves_after_resets() -> None:
    fd.init()
    for _ in range(5):
        if fd.rank() == 1:
            reset_all()
        time.sleep(0.1)
    if fd.rank() == 2:
        fd.shutdown()
    else:
        fd.all_reduce(np.ones(3))


def test_a_verdict_comes_over_connections_that_were_made_again(spawn: Spawn) -> None:
    world = spawn(3, env=split("1,1,1"))
    world.start(leaves_after_resets)
    outcomes = world.outcomes([0, 1])
    for o in outcomes:
        assert o.error == "EarlyExit", o.trace
        assert o.rank == 2
    assert len({o.verdict for o in outcomes}) == 1


def dies_after_a_reset(who: int) -> None:
    fd.init()
    if fd.rank() == who:
        reset_all()
    time.sleep(0.4)
    harness.tell("there")
    while True:
        fd.all_reduce(np.ones(3))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_after_a_reset_is_dead(spawn: Spawn, victim: int) -> None:
    world = spawn(2, env=split("1,1"))
    world.start(dies_after_a_reset, victim)
    world.hear_all()
    world.signal(victim, signal.SIGKILL)
    lost = world.outcome(1 - victim)
    assert lost.error == "PeerLost", lost.trace
    assert lost.rank == victim
    assert " died during " in lost.verdict


def reduces_for_ever() -> None:
    while True:
        fd.all_reduce(np.ones(3))


def stands_still_while_the_other_gives_up() -> None:
    fd.init()
    fd.all_reduce(np.ones(3))
    harness.tell("there")
    if fd.rank() == 1:
        harness.listen()
        reset_all()
    with pytest.raises(fd.LinkError) as caught:
        reduces_for_ever()
    assert "could not be made again" in caught.value.verdict, caught.value.verdict
    harness.tell("told")
    harness.listen()  # the other one is told by itself, and not by the end of this one


def test_a_rank_that_another_has_given_up_does_not_wait_for_it(spawn: Spawn) -> None:
    world = spawn(2, env=split("1,1"))
    world.start(stands_still_while_the_other_gives_up)
    world.hear_all()
    world.signal(0, signal.SIGSTOP)
    world.say(1, "reset")
    assert world.hear(1) == "told"
    world.signal(0, signal.SIGCONT)
    assert world.hear(0) == "told"
    for rank in range(2):
        world.say(rank, "both are told")
    world.outcomes()


def leaves_as_its_connection_is_reset() -> None:
    fd.init()
    fd.all_reduce(np.ones(3))
    if fd.rank() == 1:
        reset_all()
        fd.shutdown()
        return
    with pytest.raises(fd.EarlyExit):
        fd.all_reduce(np.ones(3))


def test_a_rank_that_leaves_while_a_connection_is_made_again_has_left(spawn: Spawn) -> None:
    spawn(2, env=split("1,1")).run(leaves_as_its_connection_is_reset)


# ---- connections of data ----


def data_are_reset(who: int) -> None:
    fd.init()
    control = connections()
    fd.all_reduce(np.ones(300_000, np.float32))
    fd.barrier()
    began = time.monotonic()
    if fd.rank() == who:
        reset_all(but=control)
    try:
        while True:
            fd.all_reduce(np.ones(300_000, np.float32))
    except fd.LinkError as error:
        harness.tell((time.monotonic() - began, error.verdict))


@pytest.mark.parametrize(("parts", "size"), [("1,1", 2), ("2,1", 3)])
def test_a_reset_of_data_is_one_error_of_the_link_on_all_ranks(
    spawn: Spawn, parts: str, size: int
) -> None:
    world = spawn(size, env=split(parts))
    world.start(data_are_reset, size - 1)
    told = world.hear_all()
    assert len({verdict for _, verdict in told}) == 1, told
    assert "the TCP connection between ranks " in told[0][1]
    assert f"and {size - 1} is broken" in told[0][1]
    assert max(seconds for seconds, _ in told) < 3, "half a second is enough; machines are busy"
    world.outcomes()


# ---- silence ----


def one_side_goes_deaf(deaf: int) -> None:
    fd.init()
    fd.all_reduce(np.ones(300_000, np.float32))
    harness.tell(local_ports())
    ports = harness.listen()
    began = time.monotonic()
    if fd.rank() == deaf:
        cut_off(set(ports[1 - deaf]))
    try:
        while True:
            fd.all_reduce(np.ones(3))
    except fd.PeerLost as error:
        harness.tell((time.monotonic() - began, error.rank, error.verdict))


@pytest.mark.parametrize("deaf", [0, 1])
def test_both_sides_are_told_where_one_hears_nothing(spawn: Spawn, deaf: int) -> None:
    world = spawn(2, env=split("1,1"))
    world.start(one_side_goes_deaf, deaf)
    ports = world.hear_all()
    for rank in range(2):
        world.say(rank, ports)
    for rank, (seconds, lost, verdict) in enumerate(world.hear_all()):
        assert lost == 1 - rank
        assert "cut off rather than dead" in verdict
        assert seconds < 6, "2 s are enough; machines are busy"
    world.outcomes()


def hears_nothing_for(seconds: float) -> float:
    fd.init()
    fd.all_reduce(np.ones(3))
    harness.tell(local_ports())
    ports = harness.listen()
    cut_off(set(ports[1 - fd.rank()]))
    time.sleep(seconds)
    hear_again()
    return float(fd.all_reduce(np.ones(3))[0])


def test_how_long_a_host_may_be_silent_is_a_setting(spawn: Spawn) -> None:
    world = spawn(2, env=split("1,1") | {"FARANDOLE_LINK_TIMEOUT": "1e10"})
    world.start(hears_nothing_for, 2.5)
    ports = world.hear_all()
    for rank in range(2):
        world.say(rank, ports)
    assert [o.value for o in world.outcomes()] == [2, 2]


SLOW = """
import time
import numpy as np
import farandole as fd
fd.init()
x = np.full(400_000, fd.rank() + 1, np.float32)
fd.all_reduce(np.ones(3))
if fd.rank() == 0:
    open({mark!r}, "w").close()
for turn in range(6):
    assert fd.all_reduce(x)[-1] == 10.0, turn
print("right")
"""


def test_a_link_that_becomes_slow_with_a_deep_queue_loses_nobody(
    spaces: list[str], tmp_path: Path
) -> None:
    """Heartbeats and their acknowledgements wait 4 s and more behind a megabyte of data."""
    a, b = spaces
    mark = tmp_path / "begun"
    words = [sys.executable, "-c", SLOW.format(mark=str(mark))]
    slow = ["tc", "qdisc", "add", "dev", a, "root", "tbf", "rate", "4mbit", "burst", "16kb"]
    wait = f"until [ -e {mark} ]; do sleep 0.02; done; exec ip netns exec {a} " + " ".join(slow)
    with subprocess.Popen(["sh", "-c", wait + " limit 2mb"]) as slowing:
        result = launch(4, words, "-H", f"{a}:2,{b}:2", "--launcher=netns")
        assert slowing.wait() == 0
    assert result.stdout.count("right") == 4
