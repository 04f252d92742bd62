"""Ranks that die or stop at named points inside an operation, in a build that has such points."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import farandole as fd
import harness
from core_testing import testing
from farandole import _core
from farandole._world import world as world_group
from harness import World

# The first of these tests builds the core a second time.
pytestmark = pytest.mark.timeout(1200)

Spawn = Callable[..., World]
BLOCK = testing.limits()["block of cico"]  # elements: some blocks

POINTS = {  # operations that pass the point
    "stream.post": [("all_reduce", 10, False), ("all_reduce", 1000, False), ("barrier", 0, False),
                    ("all_reduce", 10 * BLOCK, False), ("all_gather", 10 * BLOCK, False)],
    "mapped.write": [("all_reduce", 1000, True), ("all_reduce", 10 * BLOCK, True),
                     ("gather", 10 * BLOCK, True)],
    "put.write": [("all_reduce", 3 * BLOCK, True)],
    "cma.write": [("all_reduce", 10 * BLOCK, False), ("all_reduce", 40_000, False)],
    "cma.fetch": [("broadcast", 10 * BLOCK, False), ("all_gather", 40_000, False),
                   ("reduce_scatter", 10 * BLOCK, False)],
    "cico.publish": [("all_reduce", 10 * BLOCK, False), ("broadcast", 10 * BLOCK, False)],
    "cico.fold": [("all_reduce", 10 * BLOCK, False), ("reduce_scatter", 10 * BLOCK, False)],
    "cico.gather": [("all_reduce", 10 * BLOCK, False)],
}  # fmt: skip
CASES = [
    (point, visit, *operation)
    for point, operations in POINTS.items()
    for operation in operations
    for visit in (1, 3)
]


def variables(point: str, fault: str) -> dict[str, str]:
    """Environment in which a rank fails at the point. Callers' memory is staged only without CMA,
    and the ranks of one host run a schedule only if a setting asks for it."""
    values = {"FARANDOLE_FAULT": fault, "FARANDOLE_CMA": "0" if point.startswith("cico") else "1"}
    if point in ("put.write", "lane.move"):
        values |= {"FARANDOLE_ALGORITHM": "ring", "FARANDOLE_LEVEL": "fast"}
    return values


def operate(kind: str, count: int, ours: bool) -> None:
    """Runs three operations, in one of which the fault occurs. Survivors meet at the barrier."""
    fd.init()
    x = fd.allocate(count) if ours else np.ones(count, np.float32)
    out = x if kind != "gather" else fd.allocate(count * fd.size()) if fd.rank() == 0 else None
    for i in range(3):
        inputs: dict[str, Any] = {} if kind == "barrier" else {"x": x}
        if ours:  # the window path needs all memory to be ours
            inputs["out"] = out
        getattr(fd, kind)(**inputs, name=f"operation {i}")
    fd.barrier()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("point", "visit", "kind", "count", "ours"), CASES)
def test_death_at_every_point(
    spawn_faulty: Spawn, size: int, point: str, visit: int, kind: str, count: int, ours: bool
) -> None:
    fault = f"rank=1,at={point}#{visit},do=sigkill"
    world = spawn_faulty(size, env=variables(point, fault))
    world.start(operate, kind, count, ours)
    assert world.died(1), world.report()
    outcomes = world.outcomes([r for r in range(size) if r != 1])
    verdicts = set()
    for o in outcomes:
        assert o.error == "PeerLost", o.trace
        assert (o.rank, o.pid, o.signal) == (1, world.pids[1], signal.SIGKILL)
        verdicts.add(o.verdict)
    assert len(verdicts) == 1


def memory_is_left(count: int, ours: bool) -> tuple[str, bool]:
    fd.init()
    x = fd.allocate(count) if ours else np.empty(count, np.float32)
    x[:] = 1
    error = ""
    try:
        fd.all_reduce(x, out=x)
    except fd.Error as caught:
        error = f"{type(caught).__name__} {caught.rank}"
    # The memory is this rank's own again: no other rank may write to it now.
    x[:] = 7
    harness.tell("out")
    assert harness.listen() == "look"
    return error, bool((x == 7).all())


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("point", ["mapped.write", "cma.write", "put.write"])
def test_a_rank_stopped_inside_others_memory_never_writes_there_again(
    spawn_faulty: Spawn, size: int, point: str
) -> None:
    env = variables(point, f"rank=1,at={point}#1,do=sigstop") | {"FARANDOLE_TIMEOUT": "2"}
    world = spawn_faulty(size, env=env)
    survivors = [r for r in range(size) if r != 1]
    world.start(memory_is_left, 50_000, point != "cma.write")
    world.hear_all(survivors)
    # It stopped inside their memory, so the survivors have killed it: SIGCONT cannot revive it.
    assert world.died(1), world.report()
    assert any("killing it" in world.output(r) for r in survivors)
    for r in survivors:
        world.say(r, "look")
        o = world.outcome(r)
        assert o.error is None, o.trace
        error, untouched = o.value
        assert error == "PeerHung 1"
        assert untouched, "the memory changed after the call had returned"


STOPS = [  # points while data move, and an operation that passes each
    ("one_shot.show", "all_reduce", 6_000, False), ("mapped.write", "all_reduce", 50_000, True),
    ("cma.write", "all_reduce", 50_000, False), ("cma.fetch", "all_gather", 40_000, False),
    ("cico.publish", "broadcast", 10 * BLOCK, False),
    ("cico.fold", "all_reduce", 10 * BLOCK, False),
    ("cico.gather", "all_reduce", 10 * BLOCK, False),
    ("lane.move", "all_reduce", 50_000, False), ("put.write", "all_reduce", 3 * BLOCK, True),
]  # fmt: skip


def stop_while_data_move(
    spawn_faulty: Spawn, size: int, point: str, kind: str, count: int, ours: bool, timeout: str
) -> tuple[World, int, list[int]]:
    """A world in an operation in which one rank stops, that rank, and the others."""
    victim = 0 if kind == "broadcast" else size // 2
    env = variables(point, f"rank={victim},at={point}#1,do=sigstop")
    env |= {"FARANDOLE_WARN_AFTER": "0.6", "FARANDOLE_TIMEOUT": timeout}
    world = spawn_faulty(size, env=env)
    world.start(operate, kind, count, ours)
    return world, victim, [r for r in range(size) if r != victim]


STOPPED = pytest.mark.parametrize(
    ("size", "point", "kind", "count", "ours"),
    [(5, *stop) for stop in STOPS] + [(2, *stop) for stop in STOPS[::3]],
)


@STOPPED
def test_a_rank_that_stops_while_data_move_is_named(
    spawn_faulty: Spawn, size: int, point: str, kind: str, count: int, ours: bool
) -> None:
    world, victim, survivors = stop_while_data_move(
        spawn_faulty, size, point, kind, count, ours, timeout="3"
    )
    name = f"rank {victim} (pid {world.pids[victim]})"
    for o in world.outcomes(survivors):
        assert (o.error, o.rank) == ("PeerHung", victim), o.trace
        assert o.verdict.startswith(f"rank {victim} is stopped: ")
        assert o.evidence == f"{name} is stopped"
    with contextlib.suppress(ProcessLookupError):  # inside others' memory, it was killed
        world.signal(victim, signal.SIGKILL)


@STOPPED
def test_a_warning_names_the_rank_that_stops_while_data_move(
    spawn_faulty: Spawn, size: int, point: str, kind: str, count: int, ours: bool
) -> None:
    world, victim, survivors = stop_while_data_move(
        spawn_faulty, size, point, kind, count, ours, timeout="0"
    )
    warned: list[str] = []

    def hear() -> list[str]:
        warned[:] = [text for text in map(world.output, survivors) if "are stopped:" in text]
        return warned

    harness.wait_until(hear, "a warning")
    for text in warned:
        assert f"are stopped: rank {victim} (pid {world.pids[victim]}, stopped)\n" in text, text
    world.signal(victim, signal.SIGKILL)
    assert {o.error for o in world.outcomes(survivors)} == {"PeerLost"}


def disagree() -> str:
    fd.init()
    error = ""
    try:
        fd.all_reduce(np.ones(3 + fd.rank()), name="gradient")
    except fd.Error as caught:
        error = f"{type(caught).__name__}: {getattr(caught, 'field', '')}"
    if fd.rank() == 0:
        fd.world().abort("gave up")
        harness.tell("gone")
    return error


@pytest.mark.parametrize("hosts", ["1,1", None])
def test_a_slow_rank_hears_of_the_difference_though_a_fast_one_has_given_up(
    spawn_faulty: Spawn, hosts: str | None
) -> None:
    env = {"FARANDOLE_FAULT": "rank=1,at=stream.compare#1,do=sigstop"}
    world = spawn_faulty(2, env=env | (harness.split(hosts) if hosts else {}))
    world.start(disagree)
    world.hear_all([0])
    harness.wait_until(lambda: harness.process_state(world.pids[1]) == "T", "rank 1 to stop")
    world.signal(1, signal.SIGCONT)
    assert [o.value for o in world.outcomes()] == ["Mismatch: count"] * 2


def update_until_death(count: int) -> tuple[str, int | None, bool]:
    """Ten updates that each subtract 1 from every element. Returns the error, the rank that it
    names, and whether every element has its old or its new value."""
    fd.init()
    update = _core.ShardedUpdate(
        world_group(), [("w", count, "float32")], "sgd", 0,
        bucket_bytes=1 << 30, first_bucket_bytes=1 << 30,
    )  # fmt: skip
    gradient = np.ones(count, np.float32)
    values = np.frombuffer(update.values(0), np.float32)[:count]
    for done in range(10):
        update.take(0, gradient.ctypes.data)
        try:
            update.begin("update", b"\1", [_core.HyperParameters(rate=1.0)], [0])
            update.wait()
        except fd.Error as error:
            whole = np.isin(values, (-done, -done - 1)).all()
            return type(error).__name__, error.rank, bool(whole)
    return "no error", None, False


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("visit", [1, 3, 12])
def test_after_a_death_in_an_update_every_element_is_old_or_new(
    spawn_faulty: Spawn, size: int, visit: int
) -> None:
    fault = f"rank=1,at=mapped.write#{visit},do=sigkill"
    world = spawn_faulty(size, env={"FARANDOLE_FAULT": fault})
    world.start(update_until_death, 10 * BLOCK + 7)
    assert world.died(1), world.report()
    for o in world.outcomes([r for r in range(size) if r != 1]):
        assert o.value == ("PeerLost", 1, True), o.trace


def slow_but_well() -> float:
    fd.init()
    return float(fd.all_reduce(np.ones(10 * BLOCK))[-1])


@pytest.mark.parametrize(
    "point", ["stream.post", "cma.write", "cico.publish", "cico.fold", "cico.gather"]
)
def test_a_pause_at_any_point_changes_nothing(spawn_faulty: Spawn, point: str) -> None:
    world = spawn_faulty(3, env=variables(point, f"rank=2,at={point}#1,do=sleep:0.3"))
    began = time.monotonic()
    world.start(slow_but_well)
    assert [o.value for o in world.outcomes()] == [3.0] * 3
    # However busy the machine is, it cannot have taken less.
    assert time.monotonic() - began >= 0.3, "the operation did not come by the point"


@pytest.mark.parametrize("fault", ["rank=1", "at=stream.post,do=sigkill", "rank=1,at=x#0,do=exit"])
def test_a_fault_that_cannot_be_read_is_refused(spawn_faulty: Spawn, fault: str) -> None:
    world = spawn_faulty(1, env={"FARANDOLE_FAULT": fault})
    world.start(slow_but_well)
    o = world.outcome(0)
    assert o.error == "InvalidArgument"
    assert fault in o.verdict


def test_other_builds_refuse_the_variable(spawn: Spawn) -> None:
    world = spawn(1, env={"FARANDOLE_FAULT": "rank=0,at=stream.post,do=sigkill"})
    world.start(slow_but_well)
    o = world.outcome(0)
    assert o.error == "InvalidArgument"
    assert "FARANDOLE_FAULT_POINTS" in o.advice


def random_program(seed: int) -> Any:
    fd.init()
    harness.tell("there")
    random = np.random.default_rng(seed)
    for _ in range(200):
        count = int(2 ** random.uniform(0, 19))
        x = fd.allocate(count) if random.random() < 0.5 else np.ones(count, np.float32)
        kind = ["all_reduce", "all_gather", "reduce_scatter", "broadcast"][random.integers(4)]
        getattr(fd, kind)(x)
    return None


@pytest.mark.parametrize("repetition", range(10))
def test_death_at_random(spawn: Spawn, repetition: int) -> None:
    seed = int(np.random.SeedSequence().entropy) % 2**32  # type: ignore[arg-type]
    print(f"seed {seed}, repetition {repetition}")
    random = np.random.default_rng(seed)
    size, victim, delay = 3, int(random.integers(3)), random.uniform(0, 0.2)
    world = spawn(size)
    world.start(random_program, seed)
    world.hear_all()
    threading.Event().wait(delay)  # a random moment, not synchronisation
    world.signal(victim, signal.SIGKILL)
    for r in range(size):
        if r == victim:
            continue
        o = world.outcome(r)
        if o.error is None:
            continue  # it had finished
        assert o.error == "PeerLost", o.trace
        assert o.rank == victim


LATENCY = 0.2  # seconds


def how_long(name: str) -> float:
    fd.init()
    fd.barrier()
    start = time.monotonic()
    assert fd.all_reduce(np.ones(3, np.float32), name=name).tolist() == [2, 2, 2]
    return time.monotonic() - start


def test_a_latency_holds_up_operations_of_that_name(spawn_faulty: Spawn) -> None:
    fault = f"rank=any,at=bucket,do=delay:{LATENCY}"
    with spawn_faulty(2, env={"FARANDOLE_FAULT": fault}) as world:
        assert min(world.run(how_long, "bucket 3")) >= LATENCY
