"""Ranks that wait for each other: warnings, and the error that ends a deadlock."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from test_deaths import meet

import farandole as fd
import harness
from farandole import _core
from harness import Outcome, World

Spawn = Callable[..., World]

SOON = {"FARANDOLE_WARN_AFTER": "0.4"}
LONG = 2.5  # seconds: several times what a verdict takes then


# ---- what ranks do ----


def by_name(name: str, count: int = 3) -> Any:
    x = np.ones(count, np.float32)
    names = _core.names_of(fd.world())
    return _core.wait_by_number(names.submit("all_reduce", name, [(x, x, x.shape)], result=x))


def receive_from_anybody() -> None:
    fd.world().start_from_any(np.empty(3), 7).wait()


def in_two_groups() -> None:
    groups = [fd.split(0), fd.split(0)]
    fd.all_reduce(np.ones(5), group=groups[fd.rank()], name=f"of group {fd.rank()}")


def in_a_ring_of_groups() -> None:
    """Three ranks, with a group for each pair. Each rank waits for the next one in their group."""
    pairs = {}
    for a in range(3):
        b = (a + 1) % 3
        pairs[a] = fd.split(0 if fd.rank() in (a, b) else None)
    fd.barrier(group=pairs[fd.rank()])


CIRCLES: dict[str, Callable[[], Any]] = {
    "a plain call and one by name": lambda: fd.barrier() if fd.rank() else by_name("loss"),
    "names": lambda: by_name(f"model {fd.rank()}"),
    "groups": in_two_groups,
    "a ring of groups": in_a_ring_of_groups,
    "receives": lambda: fd.recv(np.empty(3), 1 - fd.rank()),
    "receives from anybody": receive_from_anybody,
    "receives from anybody and a call": lambda: (
        receive_from_anybody() if fd.rank() else fd.barrier()
    ),
}


def run_circle(which: str) -> None:
    fd.init()
    fd.barrier()
    CIRCLES[which]()


def assert_deadlock(outcomes: list[Outcome], ranks: str) -> None:
    for o in outcomes:
        assert o.error == "Deadlock", o.trace
        assert o.verdict.startswith(f"ranks {ranks} wait for each other for ever: rank 0 waits in ")
        assert "rank 0 is at " in o.evidence
        assert "test_deadlocks.py, line " in o.evidence
        assert o.advice


@pytest.mark.parametrize("which", CIRCLES)
def test_a_circle_ends_as_a_deadlock_on_every_rank(spawn: Spawn, which: str) -> None:
    size = 3 if which == "a ring of groups" else 2
    world = spawn(size, env=SOON)
    world.start(run_circle, which)
    outcomes = world.outcomes()
    assert_deadlock(outcomes, f"0-{size - 1}")
    assert len({o.verdict for o in outcomes}) == 1, "also where they share no group"


@pytest.mark.parametrize(
    ("which", "hosts"),
    [("a plain call and one by name", "1,1"), ("names", "1,1"), ("groups", "1,1"),
     ("a ring of groups", "2,1"), ("receives", "1,1")],
)  # fmt: skip
def test_a_circle_over_hosts_ends_in_the_same_way(spawn: Spawn, which: str, hosts: str) -> None:
    size = 3 if hosts == "2,1" else 2
    world = spawn(size, env=SOON | harness.split(hosts))
    world.start(run_circle, which)
    outcomes = world.outcomes()
    assert_deadlock(outcomes, f"0-{size - 1}")
    assert len({o.verdict for o in outcomes}) == 1, "also where they share no group"
    for r, o in enumerate(outcomes):
        assert f"rank {r} is at " in o.evidence


def late_over_hosts() -> float:
    """As `late_in_another_thread`, but over hosts, where no rank counts as blocked before 3 s."""
    return late_in_another_thread(daemon=False, pause=5.0)


def test_a_thread_that_comes_late_is_waited_for_over_hosts(spawn: Spawn) -> None:
    world = spawn(2, env=SOON | harness.split("1,1"))
    world.start(late_over_hosts)
    assert [o.value for o in world.outcomes()] == [4.0, 4.0]


def test_a_deadlock_names_what_each_rank_waits_in(spawn: Spawn) -> None:
    world = spawn(2, env=SOON)
    world.start(run_circle, "a plain call and one by name")
    for o in world.outcomes():
        assert "rank 0 waits in all_reduce 'loss' of [3] x float32 for rank 1" in o.verdict
        assert "rank 1 waits in barrier #2 for rank 0" in o.verdict
    warnings = world.output(0) + world.output(1)  # the verdict may come before a rank's warning
    assert "this looks like a deadlock: rank 0 waits in all_reduce 'loss'" in warnings
    assert "test_deadlocks.py, line " in warnings, "the Python line of the other rank"


def two_of_three() -> str:
    """Ranks 0 and 1 deadlock in two groups of theirs, to which rank 2 does not belong."""
    fd.init()
    groups = [fd.split(0 if fd.rank() < 2 else None) for _ in range(2)]
    if fd.rank() < 2:
        with pytest.raises(fd.Deadlock):
            fd.barrier(group=groups[fd.rank()])
        harness.tell("over")
    else:
        assert harness.listen() == "go"
    fd.barrier()
    return "alive"


def test_a_deadlock_fails_only_the_groups_that_are_in_it(spawn: Spawn) -> None:
    world = spawn(3, env=SOON)
    world.start(two_of_three)
    assert world.hear_all([0, 1]) == ["over", "over"]
    world.say(2, "go")
    assert [o.value for o in world.outcomes()] == ["alive"] * 3


# ---- waits that are no deadlock ----


def late_in_another_thread(daemon: bool, pause: float = LONG) -> float:
    """Rank 0's first call waits for rank 1, which waits for another thread of rank 0."""
    fd.init()
    groups = [fd.split(0), fd.split(0)]
    late: list[float] = []

    def come_late() -> None:
        threading.Event().wait(pause / 2 if daemon else pause)
        late.append(float(fd.all_reduce(np.ones(3), group=groups[1])[0]))

    if fd.rank() == 1:
        late.append(float(fd.all_reduce(np.ones(3), group=groups[1])[0]))
        return late[0] + float(fd.all_reduce(np.ones(3), group=groups[0])[0])
    thread = threading.Thread(target=come_late, daemon=daemon)
    thread.start()
    first = float(fd.all_reduce(np.ones(3), group=groups[0])[0])
    thread.join()
    return first + late[0]


@pytest.mark.parametrize("daemon", [False, True])
def test_a_thread_that_comes_late_is_waited_for(spawn: Spawn, daemon: bool) -> None:
    world = spawn(2, env=SOON)
    world.start(late_in_another_thread, daemon)
    assert [o.value for o in world.outcomes()] == [4.0, 4.0]


def waits_with_a_deadline() -> str:
    """Each rank waits in a cycle, but with a timeout, so it is no deadlock."""
    fd.init()
    groups = [fd.split(0), fd.split(0)]
    here, there = groups[fd.rank()], groups[1 - fd.rank()]
    handle = fd.all_reduce(np.ones(3), group=here, async_op=True)
    with contextlib.suppress(TimeoutError):  # the first to give up then serves the other
        handle.wait(timeout=LONG)
    fd.all_reduce(np.ones(3), group=there)
    handle.wait()
    return "done"


def test_a_wait_that_gives_up_is_no_deadlock(spawn: Spawn) -> None:
    world = spawn(2, env=SOON)
    world.start(waits_with_a_deadline)
    assert [o.value for o in world.outcomes()] == ["done"] * 2


def one_is_elsewhere(how: str) -> str:
    """Rank 0 is in no call: it reads, sleeps or computes. Two threads of rank 1 wait for it, one in
    a named operation and one in a barrier."""
    fd.init()
    if fd.rank() == 1:
        time.sleep(0.5)  # rank 0 reports that it waits; soon that must no longer count
    fd.barrier()
    harness.tell("there")
    if fd.rank() == 0:
        if how == "reads":
            assert harness.listen() == "go"
        elif how == "sleeps":
            threading.Event().wait(LONG)
        else:
            end = threading.Event()
            threading.Timer(LONG, end.set).start()
            while not end.is_set():
                np.ones(100_000).sum()
    thread = threading.Thread(target=by_name, args=("x",))
    thread.start()
    fd.barrier()
    thread.join()
    return "done"


@pytest.mark.parametrize("how", ["reads", "sleeps", "computes"])
def test_a_rank_in_no_call_is_told_by_its_line(spawn: Spawn, how: str) -> None:
    # Even on a busy machine, rank 0 has reported that it is in its read before the warning comes.
    world = spawn(2, env={"FARANDOLE_WARN_AFTER": "1"} if how == "reads" else SOON)
    world.start(one_is_elsewhere, how)
    world.hear_all()
    harness.wait_until(lambda: "has waited" in world.output(1))
    if how == "reads":
        warning = world.output(1)
        assert f"rank 0 (pid {world.pids[0]}, sleeping), which is at " in warning
        assert "in one_is_elsewhere" in warning or "in listen" in warning
        world.say(0, "go")
    assert [o.value for o in world.outcomes()] == ["done"] * 2
    assert "like a deadlock" not in world.report()


# ---- leaving what is under way ----


def leaves_a_handle(by: str) -> None:
    fd.init()
    fd.barrier()
    by_name("v")
    if fd.rank() == 1:
        x = np.ones(5000, np.float32)
        if by == "name":
            _core.names_of(fd.world()).submit("all_reduce", "w", [(x, x, x.shape)], result=x)
        else:
            fd.all_reduce(x, async_op=True, name="w")
            for _ in range(1000):  # until it has begun
                fd.world().turn()
        fd.shutdown()
        harness.tell("left")
        return
    assert harness.listen() == "go"
    if by == "name":
        by_name("w", 5000)
    else:
        fd.all_reduce(np.ones(5000, np.float32), name="w")


@pytest.mark.parametrize("by", ["order", "name"])
def test_a_rank_that_left_an_operation_it_had_submitted(spawn: Spawn, by: str) -> None:
    world = spawn(2)
    world.start(leaves_a_handle, by)
    assert world.hear(1) == "left"
    world.say(0, "go")
    o = world.outcome(0)
    assert o.error == "EarlyExit", o.trace
    assert (o.rank, o.pid) == (1, world.pids[1])
    assert "left without waiting for all_reduce" in o.verdict
    assert "'w'" in o.verdict
    assert o.verdict.endswith(", which it had submitted")
    assert "rank 1 waits for it" not in o.evidence, "nobody waits for itself"


# ---- receiving from anybody ----


def receives_from_anybody(timeout: float | None) -> None:
    meet(pausing=1)
    if fd.rank() == 0:
        fd.world().start_from_any(np.empty(3), 7, timeout=timeout).wait()
    fd.barrier()


def test_a_death_ends_a_receive_from_anybody(spawn: Spawn) -> None:
    world = spawn(3)
    world.start(receives_from_anybody, None)
    world.hear_all()
    world.signal(1, signal.SIGKILL)
    verdicts = set()
    for o in world.outcomes([0, 2]):
        assert o.error == "PeerLost", o.trace
        assert (o.rank, o.signal) == (1, signal.SIGKILL)
        verdicts.add(o.verdict)
    assert len(verdicts) == 1


def test_a_stopped_rank_is_named_by_a_receive_from_anybody(spawn: Spawn) -> None:
    world = spawn(3, env={"FARANDOLE_WARN_AFTER": "2", "FARANDOLE_TIMEOUT": "5"})
    world.start(receives_from_anybody, None)
    world.hear_all()
    world.signal(1, signal.SIGSTOP)
    receiver, other = world.outcomes([0, 2])
    stopped = f"rank 1 (pid {world.pids[1]}, stopped)"
    assert (receiver.error, other.error) == ("PeerHung", "PeerHung"), receiver.trace
    assert stopped in world.output(0)
    assert receiver.verdict == other.verdict
    os.kill(world.pids[1], signal.SIGKILL)
