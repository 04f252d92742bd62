"""Ranks that die, stop, leave, are late or are interrupted: what the others get, and when."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import farandole as fd
import harness
from farandole import _core
from grid import combinations
from harness import Outcome, World

Spawn = Callable[..., World]


# ---- what ranks do ----


def meet(pausing: int | None = None) -> None:
    """Ranks meet and say so; one of them then does nothing until it is killed."""
    fd.init()
    fd.barrier()
    harness.tell("there")
    if fd.rank() == pausing:
        signal.pause()


def one_dies(
    victim: int, before: int, kind: str, count: int, ours: bool, waits: str = "pause"
) -> Any:
    """`before` good operations; then the victim does not come, and waits for its end."""
    fd.init()
    x = fd.allocate(count) if ours else np.ones(count, np.float32)
    for _ in range(before):
        fd.all_reduce(x)
    harness.tell("there")
    if fd.rank() == victim:
        if waits == "pause":
            signal.pause()
        while True:  # in Python, between operations, but driving nothing
            time.sleep(60)
    return repeat_error(lambda: getattr(fd, kind)(*([] if kind == "barrier" else [x])))


def repeat_error(call: Callable[[], Any]) -> None:
    """A failed group stays failed, with the same verdict."""
    with pytest.raises(fd.Error) as caught:
        call()
    first = caught.value
    with pytest.raises(type(first)) as again:
        fd.barrier()
    assert again.value.verdict == first.verdict
    with pytest.raises(type(first)):
        fd.world().check()
    raise first


def all_die_inside(how_many: int, count: int) -> None:
    """Runs operations one after the other, until a rank is killed."""
    fd.init()
    x = np.ones(count, np.float32)
    for i in range(how_many):
        if i == 5:
            harness.tell("busy")
        fd.all_reduce(x, out=x, op="max", name=f"gradient {i}")


def assert_all_lost(outcomes: list[Outcome], world: World, victim: int) -> None:
    name = f"rank {victim} (pid {world.pids[victim]})"
    verdicts = set()
    for o in outcomes:
        assert o.error == "PeerLost", o.trace
        assert (o.rank, o.pid, o.signal) == (victim, world.pids[victim], signal.SIGKILL)
        assert o.verdict.startswith(f"{name} was killed by SIGKILL during ")
        assert o.evidence
        assert o.advice
        verdicts.add(o.verdict)
    assert len(verdicts) == 1, "one verdict for all"


# ---- death ----


KINDS = [
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier", "reduce", "gather",
    "all_to_all",
]  # fmt: skip


@pytest.mark.parametrize(("size", "before", "kind"), combinations([2, 3, 5], [0, 3], KINDS))
def test_survivors_name_the_killed_rank(spawn: Spawn, size: int, before: int, kind: str) -> None:
    victim = before % size
    world = spawn(size)
    world.start(one_dies, victim, before, kind, 99_990, False)  # divides into blocks
    world.hear_all()
    world.signal(victim, signal.SIGKILL)
    survivors = [r for r in range(size) if r != victim]
    assert_all_lost(world.outcomes(survivors), world, victim)


def exchange_until_killed(count: int) -> None:
    fd.init()
    x = np.ones(count * fd.size(), np.float32)
    for i in range(10**9):
        if i == 5:
            harness.tell("busy")
        fd.all_to_all(x)


@pytest.mark.parametrize("count", [10, 300_000])
def test_death_inside_an_all_to_all(spawn: Spawn, count: int) -> None:
    world = spawn(3)
    world.start(exchange_until_killed, count)
    world.hear_all()
    world.signal(1, signal.SIGKILL)
    assert_all_lost(world.outcomes([0, 2]), world, 1)


def wait_for_a_message(count: int, timeout: float | None) -> None:
    """Rank 0 receives what rank 1 never sends; rank 2 waits for both."""
    meet(pausing=1)
    if fd.rank() == 0:
        repeat_error(lambda: fd.recv(np.empty(count), 1, tag=7, timeout=timeout))
    repeat_error(fd.barrier)


@pytest.mark.parametrize("count", [1, 500_000])
def test_death_of_a_sender(spawn: Spawn, count: int) -> None:
    world = spawn(3)
    world.start(wait_for_a_message, count, None)
    world.hear_all()
    world.signal(1, signal.SIGKILL)
    assert_all_lost(world.outcomes([0, 2]), world, 1)


def test_a_message_that_never_comes(spawn: Spawn) -> None:
    world = spawn(3)
    world.start(wait_for_a_message, 10, 0.3)
    world.hear_all()
    waiting, other = world.outcomes([0, 2])
    assert (waiting.error, other.error) == ("Stalled", "Stalled")
    assert waiting.verdict == other.verdict
    assert re.match(
        r"recv #1 from rank 1, tag 7 was not complete after [\d.]+ s; not submitted by rank 1",
        waiting.verdict,
    )
    assert waiting.verdict.endswith("not submitted by rank 1")
    assert waiting.rank == 1


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("count", [1, 4000, 1_000_000])
def test_death_on_every_path(spawn: Spawn, count: int, ours: bool) -> None:
    world = spawn(3)
    world.start(one_dies, 1, 1, "all_reduce", count, ours)
    world.hear_all()
    world.signal(1, signal.SIGKILL)
    assert_all_lost(world.outcomes([0, 2]), world, 1)


@pytest.mark.parametrize("count", [10, 1_000_000])
@pytest.mark.parametrize("size", [2, 3])
def test_death_in_the_midst_of_work(spawn: Spawn, size: int, count: int) -> None:
    world = spawn(size)
    world.start(all_die_inside, 10**9, count)
    world.hear_all()
    world.signal(size - 1, signal.SIGKILL)
    outcomes = world.outcomes(range(size - 1))
    assert_all_lost(outcomes, world, size - 1)
    assert outcomes[0].tensor.startswith("gradient ")


def meanwhile_dead(victim: int) -> None:
    """The victim dies while the others are not in any operation."""
    meet(pausing=victim)
    assert harness.listen() == "it is dead"
    fd.all_reduce(np.ones(3))


def test_death_between_operations_is_seen_by_the_next(spawn: Spawn) -> None:
    world = spawn(3)
    world.start(meanwhile_dead, 0)
    world.hear_all()
    world.signal(0, signal.SIGKILL)
    assert world.died(0)
    for r in (1, 2):
        world.say(r, "it is dead")
    assert_all_lost(world.outcomes([1, 2]), world, 0)


@pytest.mark.parametrize(("end", "how"), [("exit", "exited with code 7"), ("segv", "SIGSEGV")])
def test_other_ends_are_told_apart(spawn: Spawn, end: str, how: str) -> None:
    world = spawn(3)
    world.start(dies_by_itself, end)
    for o in world.outcomes([0, 2]):
        assert o.error == "PeerLost", o.trace
        assert o.rank == 1
        assert how in o.verdict
        assert o.signal == (signal.SIGSEGV if end == "segv" else None)


def dies_by_itself(end: str) -> None:
    fd.init()
    fd.barrier()
    if fd.rank() == 1:
        if end == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGSEGV)
    fd.all_reduce(np.ones(5))


def in_a_subgroup() -> list[str]:
    fd.init()
    pair = fd.split(0 if fd.rank() < 2 else 1)
    assert pair is not None
    harness.tell("there")
    if fd.rank() == 0:
        signal.pause()
    if fd.rank() == 1:
        with pytest.raises(fd.PeerLost) as lost:
            fd.all_reduce(np.ones(9), group=pair)
        assert lost.value.rank == 0, "world rank"
        return ["lost"]
    assert (fd.all_reduce(np.ones(9), group=pair) == 2).all(), "the other group lives"
    return ["alive"]


def test_a_death_fails_only_the_groups_that_need_the_dead(spawn: Spawn) -> None:
    world = spawn(4)
    world.start(in_a_subgroup)
    world.hear_all()
    world.signal(0, signal.SIGKILL)
    assert [o.value for o in world.outcomes([1, 2, 3])] == [["lost"], ["alive"], ["alive"]]


def async_death(how_many: int) -> list[str]:
    fd.init()
    if fd.rank() == 1:
        harness.tell("there")
        signal.pause()
    handles = [fd.all_reduce(np.ones(1000 * i), async_op=True) for i in range(1, how_many)]
    harness.tell("there")
    errors = []
    for handle in handles:
        with pytest.raises(fd.PeerLost) as lost:
            handle.wait()
        assert handle.done()
        errors.append(lost.value.verdict)
    return errors


def test_every_operation_in_flight_gets_the_verdict(spawn: Spawn) -> None:
    world = spawn(3)
    world.start(async_death, 20)
    world.hear_all()
    world.signal(1, signal.SIGKILL)
    outcomes = world.outcomes([0, 2])
    assert len({v for o in outcomes for v in o.value}) == 1


# ---- stopped, stuck, late ----

IMPATIENT = {"FARANDOLE_WARN_AFTER": "0.3", "FARANDOLE_TIMEOUT": "3"}


def stop_rank_2(world: World) -> list[Outcome]:
    """It is named in a warning, then in the error; the others' outcomes."""
    world.start(one_dies, 2, 2, "all_reduce", 5000, False)
    world.hear_all()
    world.signal(2, signal.SIGSTOP)
    outcomes = world.outcomes([0, 1])
    for o in outcomes:
        assert o.error == "PeerHung", o.trace
        assert o.rank == 2
        assert "is stopped" in o.evidence
    warning = f"rank 2 (pid {world.pids[2]}, stopped)"
    assert any(warning in world.output(r) for r in (0, 1)), "nobody warned"
    world.signal(2, signal.SIGKILL)
    return outcomes


def test_a_stopped_rank_is_named_in_a_warning_then_in_the_error(spawn: Spawn) -> None:
    world = spawn(3, env=IMPATIENT | {"FARANDOLE_TIMEOUT": "6"})  # a look before it, if crowded
    for o in stop_rank_2(world):
        assert o.fields["values"] == {"missing": [2]}


def late_but_in_time() -> float:
    meet()
    if fd.rank() == 2:
        assert harness.listen() == "go"
    return float(fd.all_reduce(np.ones(4000))[0])


def test_a_rank_that_is_continued_in_time_is_forgiven(spawn: Spawn) -> None:
    world = spawn(3, env={"FARANDOLE_WARN_AFTER": "0.1"})
    world.start(late_but_in_time)
    world.hear_all()
    world.signal(2, signal.SIGSTOP)
    harness.wait_until(lambda: "stopped)" in world.output(0) and "stopped)" in world.output(1))
    world.signal(2, signal.SIGCONT)
    world.say(2, "go")
    assert [o.value for o in world.outcomes()] == [3.0] * 3


def own_timeout() -> None:
    fd.init()
    if fd.rank() == 0:
        fd.all_reduce(np.ones(3), timeout=0.2, name="alone")
    else:
        harness.listen()
        fd.barrier()


def test_an_operation_may_have_its_own_timeout(spawn: Spawn) -> None:
    world = spawn(3)
    world.start(own_timeout)
    o = world.outcome(0)
    assert o.error == "Stalled", o.trace
    assert o.tensor == "alone"
    assert o.fields["values"] == {"missing": [1, 2]}
    # Where a rank is, it tells once it has looked: that may be later than this error.
    state = r"rank {r} \(pid \d+\) is \w+( and is at .*, line \d+, in \w+)?"
    assert re.fullmatch(f"{state.format(r=1)}; {state.format(r=2)}", o.evidence), o.evidence
    for r in (1, 2):
        world.say(r, "go")
        assert world.outcome(r).error == "Stalled", "the group has failed for all"


def idle_waiting() -> float:
    meet()
    if fd.rank() == 0:
        assert harness.listen() == "go"
        fd.barrier()
        return 0.0
    before, began = time.process_time(), time.monotonic()
    fd.barrier()
    return (time.process_time() - before) / (time.monotonic() - began)


def test_a_waiting_rank_leaves_the_processor_alone(spawn: Spawn) -> None:
    world = spawn(3)
    world.start(idle_waiting)
    world.hear_all()
    threading.Event().wait(1.0)  # what is measured: a second of waiting
    world.say(0, "go")
    for o in world.outcomes([1, 2]):
        print(f"{o.value * 1e3:.1f} ms of processor time for a second of waiting")
        assert o.error is None
        assert o.value < 0.05


def wake_ups() -> int:
    status = Path("/proc/thread-self/status").read_text()
    return int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])


def sleeping_together(seconds: float, times: int) -> float:
    """How often a rank wakes in a second of waiting for rank 0, where nothing else woke it."""
    fd.init()
    rates = []
    for _ in range(times):
        fd.barrier()
        time.sleep(0.5)
        if fd.rank() == 0:
            time.sleep(seconds)
        before, began = wake_ups(), time.monotonic()
        fd.barrier()
        rates.append((wake_ups() - before) / (time.monotonic() - began))
    return 0.0 if fd.rank() == 0 else min(rates)


def test_ranks_that_wait_do_not_wake_each_other(spawn: Spawn) -> None:
    """Each looks around ten times a second; what one finds nothing in is nothing for the others."""
    found = spawn(4, env=harness.split("2,2")).run(sleeping_together, 1.5, 3)
    print(f"{found} wake-ups in a second")
    assert max(found) <= 25


# ---- leaving early, aborting, failing ----


def leaves_early(how: str) -> None:
    fd.init()
    fd.all_reduce(np.ones(10))
    if fd.rank() == 1:
        if how == "shutdown":
            fd.shutdown()
            with pytest.raises(fd.NotInitialized):
                fd.barrier()
            return
        raise SystemExit(0)
    fd.all_reduce(np.ones(10), name="one more")


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_leaves_early_is_named(spawn: Spawn, size: int) -> None:
    world = spawn(size)
    world.start(leaves_early, "shutdown")
    for o in world.outcomes([r for r in range(size) if r != 1]):
        assert o.error == "EarlyExit", o.trace
        assert (o.rank, o.pid, o.tensor) == (1, world.pids[1], "one more")


def shuts_down_busy() -> None:
    fd.init()
    fd.barrier()
    if fd.rank() == 0:
        handle = fd.all_reduce(np.ones(100_000), async_op=True)
        fd.shutdown()
        harness.tell("left")
        handle.wait()
    harness.listen()
    fd.all_reduce(np.ones(100_000))


def test_operations_in_flight_end_with_shutdown(spawn: Spawn) -> None:
    world = spawn(2)
    world.start(shuts_down_busy)
    assert world.hear(0) == "left"
    here = world.outcome(0)
    world.say(1, "go")
    for o in (here, world.outcome(1)):
        assert o.error == "EarlyExit", o.trace
        assert o.rank == 0


def aborts() -> None:
    fd.init()
    fd.barrier()
    if fd.rank() == 1:
        fd.world().abort("loss is nan")
    fd.all_reduce(np.ones(3))


def test_abort_reaches_everybody(spawn: Spawn) -> None:
    world = spawn(3)
    world.start(aborts)
    for o in world.outcomes():
        assert o.error == "Aborted", o.trace
        assert o.rank == 1
        assert o.verdict == "rank 1 aborted: loss is nan"


# ---- Ctrl-C ----


INTERRUPTED = ["all_reduce", "handle", "barrier", "split", "reducer"]


def interrupted(kind: str) -> None:
    fd.init(timeout=20)
    fd.barrier()
    if fd.rank() == 1 or kind in INTERRUPTED:
        harness.tell("there")
    if fd.rank() == 0:  # is waited for
        harness.listen()
        fd.barrier()
    elif kind == "all_reduce":
        fd.all_reduce(np.ones(100_000))
    elif kind == "handle":
        fd.all_reduce(np.ones(100_000), async_op=True).wait()
    elif kind == "handle with timeout":
        fd.all_reduce(np.ones(100_000), async_op=True).wait(timeout=20)
    elif kind == "barrier":
        fd.barrier()
    elif kind == "split":
        fd.split(0)
    else:
        _core.Reducer(fd.world(), [("w", 5, "float32")], "mean", 1.0, 1.0, 0, 0)


@pytest.mark.parametrize("kind", INTERRUPTED)
def test_an_interrupt_ends_every_kind_of_wait(spawn: Spawn, kind: str) -> None:
    world = spawn(3)
    world.start(interrupted, kind)
    world.hear_all()
    harness.wait_until(lambda: sleeps(world.pids[1]) and sleeps(world.pids[2]))
    world.signal(1, signal.SIGINT)
    here = world.outcome(1)
    assert here.error == "KeyboardInterrupt", here.trace
    world.say(0, "go")
    there = world.outcome(2)
    for o in (there, world.outcome(0)):
        assert o.error == "RemoteError", o.trace
        assert o.rank == 1
        assert "KeyboardInterrupt" in o.verdict


def gives_up(_number: int, _frame: object) -> None:
    raise TimeoutError("enough")


def waits_with_an_alarm() -> None:
    fd.init(timeout=20)
    fd.barrier()
    if fd.rank() == 0:
        harness.listen()
    else:
        signal.signal(signal.SIGALRM, gives_up)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
    fd.barrier()


def test_what_a_signals_handler_raised_is_named(spawn: Spawn) -> None:
    world = spawn(2)
    world.start(waits_with_an_alarm)
    assert world.outcome(1).error == "TimeoutError"
    world.say(0, "go")
    there = world.outcome(0)
    assert there.error == "RemoteError", there.trace
    assert there.verdict == "rank 1 was interrupted (TimeoutError)"


ENDED_BY_CTRL_C = """
import farandole as fd, numpy as np, signal
fd.init()
fd.barrier()
if fd.rank() == 0:
    print("waits", flush=True)
    fd.barrier()
signal.pause()
"""


def test_an_interrupt_of_all_ranks_is_an_interrupt_on_each(tmp_path: Path) -> None:
    """The report of the first to end must not come before the signal on the one that waits."""
    job = subprocess.Popen(
        [*harness.launcher(2), sys.executable, "-c", ENDED_BY_CTRL_C],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert job.stdout is not None
        assert job.stdout.readline() == "[0] waits\n"
        job.send_signal(signal.SIGINT)
        _, errors = job.communicate(timeout=harness.LIMIT)
    finally:
        job.kill()
        job.wait()
    for rank in range(2):
        assert f"[{rank}] KeyboardInterrupt" in errors
    assert "lost sys.stderr" not in errors
    assert job.returncode == 130


def sleeps(pid: int) -> bool:
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:  # noqa: PTH123
        return file.read().rpartition(")")[2].split()[0] == "S"


def waits_to_start() -> None:
    harness.tell("starting")
    fd.init()


@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupt_ends_init(spawn: Spawn, rank: int) -> None:
    world = spawn(3)
    world.start(waits_to_start, ranks=[rank])
    world.hear(rank)
    harness.wait_until(lambda: sleeps(world.pids[rank]))
    world.signal(rank, signal.SIGINT)
    o = world.outcome(rank)
    assert o.error == "KeyboardInterrupt", o.trace


# ---- an exception that nobody catches ----

FAILING = """
import farandole as fd, numpy as np, sys
fd.init()
if fd.rank() == 1:
    raise ValueError("bad sample 4711\\nand more")
try:
    fd.all_reduce(np.ones(3))
except fd.RemoteError as error:
    print(error.rank, error.pid > 0, error.verdict, "|", error.evidence)
"""


def test_an_uncaught_exception_is_told_to_the_others(tmp_path: Any) -> None:
    script = tmp_path / "train.py"
    script.write_text(FAILING)
    ranks = harness.start_program(script, 3)
    outputs = [rank.communicate(timeout=60) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 1, 0], outputs
    for r in (0, 2):
        assert outputs[r][0] == (
            f"1 True rank 1 ended with ValueError: bad sample 4711 | {script}, line 5\n"
        )
