"""Over TCP connections ranks that die, stop or fork are named as over shared memory."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from test_deaths import IMPATIENT, all_die_inside, assert_all_lost, one_dies, stop_rank_2

import farandole as fd
import harness
from grid import combinations
from harness import World

Spawn = Callable[..., World]
TCP: dict[str, str | None] = {"FARANDOLE_TRANSPORT": "tcp"}


@pytest.mark.parametrize(
    ("size", "before", "kind"), combinations([2, 3, 4], [0, 3], ["all_reduce", "all_to_all"])
)
def test_survivors_name_the_killed_rank(spawn: Spawn, size: int, before: int, kind: str) -> None:
    victim = before % size
    world = spawn(size, env=TCP)
    world.start(one_dies, victim, before, kind, 99_996, False)
    world.hear_all()
    world.signal(victim, signal.SIGKILL)
    survivors = [r for r in range(size) if r != victim]
    assert_all_lost(world.outcomes(survivors), world, victim)


@pytest.mark.parametrize(("size", "count"), combinations([2, 3], [3, 40_000, 2_000_000]))
def test_a_rank_killed_while_data_move_is_named(spawn: Spawn, size: int, count: int) -> None:
    world = spawn(size, env=TCP)
    world.start(all_die_inside, 10**9, count)
    world.hear_all()
    world.signal(1, signal.SIGKILL)
    assert_all_lost(world.outcomes([r for r in range(size) if r != 1]), world, 1)


def runs_out_of_files(poor: int) -> None:
    fd.init()
    fd.all_reduce(np.ones(3))
    if fd.rank() == poor:
        limit = len([*Path("/proc/self/fd").iterdir()]) + 5
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        with contextlib.suppress(OSError):
            while True:
                os.open(os.devnull, os.O_RDONLY)
    for n in range(1, 10):
        fd.all_gather(np.ones(1 << 2 * n))
        fd.split(0)


@pytest.mark.parametrize("poor", [0, 1])
def test_a_rank_without_descriptors_is_named_at_once(spawn: Spawn, poor: int) -> None:
    """Rank 0 dials, rank 1 accepts."""
    world = spawn(2, env=harness.split("1,1"))
    world.start(runs_out_of_files, poor)
    outcomes = world.outcomes()
    assert {o.error for o in outcomes} == {"ResourceError"}, outcomes[0].trace
    assert {o.rank for o in outcomes} == {poor}
    assert len({o.verdict for o in outcomes}) == 1
    assert "this process may open" in outcomes[0].verdict


def test_a_stopped_rank_is_named_in_a_warning_then_in_the_error(spawn: Spawn) -> None:
    stop_rank_2(spawn(3, env=IMPATIENT | TCP))


def test_a_rank_stopped_while_data_move_is_named(spawn: Spawn) -> None:
    world = spawn(2, env=IMPATIENT | TCP)
    world.start(all_die_inside, 10**9, 2_000_000)
    world.hear_all()
    world.signal(1, signal.SIGSTOP)
    lost = world.outcome(0)
    assert lost.error == "PeerHung", lost.trace
    assert lost.rank == 1
    world.signal(1, signal.SIGKILL)


def use_in_child() -> None:
    fd.init()
    x = np.ones(100_003)
    assert fd.all_reduce(x)[0] == fd.size()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            fd.all_reduce(x)
        except fd.ForkedEngine:
            links = [f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd")]  # noqa: PTH208
            tcp = [link for link in links if is_tcp(link)]
            code = 2 if tcp else 0
        os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert fd.all_reduce(x)[0] == fd.size()


def is_tcp(link: str) -> bool:
    try:
        inode = os.readlink(link)[8:-1]  # noqa: PTH115
    except OSError:
        return False
    with open("/proc/net/tcp") as table:  # noqa: PTH123
        return any(row.split()[9] == inode for row in list(table)[1:])


def test_a_forked_child_has_none_of_the_connections(spawn: Spawn) -> None:
    spawn(2, env=TCP).run(use_in_child)


def turns_while_parked() -> int:
    """How often this rank has polled while it waited for rank 1."""
    fd.init()
    x = np.ones(300_007)
    fd.all_reduce(x)
    before = fd.world().counters()["turns"]
    harness.tell("there")
    if fd.rank() == 1:
        assert harness.listen() == "go"
    fd.all_reduce(x)
    return int(fd.world().counters()["turns"] - before)


def test_a_rank_that_waits_parks(spawn: Spawn) -> None:
    world = spawn(2, env=TCP)
    world.start(turns_while_parked)
    world.hear_all()
    time.sleep(2)
    world.say(1, "go")
    turns = [o.value for o in world.outcomes()]
    assert turns[0] < 100_000, "who spins takes a million a second"
