"""Faults in the middle of ranks' work: a call of a fake library that fails on rank 1, or devices
that are late."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
from fake_device import Rank

import farandole as fd
import harness
from harness import World

UNAVAILABLE, MEMORY = 46, 2


def device_of_this_rank() -> int:
    """Ranks take the fake driver's devices in turn."""
    return fd.rank() % int(os.environ.get("FAKE_CUDA_DEVICES", "1"))


def let_fail(rank: Rank, call: str, nth: int, code: int = UNAVAILABLE) -> None:
    """On both ranks: rank 1's nth such call from now on fails."""
    on_rank_1(lambda: rank.machine.fail(call, nth, code))


def on_rank_1(plant: Callable[[], None]) -> None:
    """On both ranks: rank 1 plants a fault, once rank 0 has completed all earlier work."""
    time.sleep(0.02)  # so is rank 1's device, and nothing is asked of the driver for its sake
    fd.barrier()
    if fd.rank() == 0:
        harness.tell("past the barrier")
    else:
        harness.listen()
        plant()


def verdict_of(train: Callable[[int], None]) -> tuple[str, int | None]:
    """The verdict of training steps, one of which fails on a device, and the rank that it names."""

    def steps() -> None:
        for step in range(3):
            train(step)

    with pytest.raises(fd.DeviceError) as caught:
        steps()
    with contextlib.suppress(fd.Error):
        fd.shutdown()
    return caught.value.verdict, caught.value.rank


def how_it_went_wrong(world: World, case: Callable[..., Any], *arguments: Any) -> list[Any]:
    """The results of both ranks, for a case that calls on_rank_1()."""
    world.start(case, *arguments)
    world.hear(0)
    world.say(1, "go")
    outcomes = world.outcomes()
    assert [o.error for o in outcomes] == [None, None], world.report()
    return [o.value for o in outcomes]


def failed_on_rank_1(answers: list[Any], tried: str) -> None:
    """Checks, for both ranks: the verdict and its kind, the rank that each error names, leaks."""
    of_rank_0, of_rank_1 = answers
    assert of_rank_0[0] == of_rank_1[0], "one verdict for all"
    verdict, kind = of_rank_0[0]
    assert verdict.startswith(f"rank 1: cannot {tried}")
    assert kind == "DeviceError"
    assert {*of_rank_0[1], *of_rank_1[1]} == {1}
    assert of_rank_0[2] == of_rank_1[2] == ["", ""], "all that was taken is given back"


def is_rank_1s(one: Any, other: Any) -> None:
    """One verdict for both, which names rank 1; and nothing is left. Each says the verdict, the
    rank, and what the fake driver says."""
    assert one[:2] == other[:2]
    assert one[0].startswith("rank 1: cannot ")
    assert one[1] == 1
    assert one[2] == other[2] == ["", ""]


def barriers() -> None:
    while True:
        fd.barrier()


# The result of waits_with(): verdict, kind of error, ranks that it blames, what is left.
Found = tuple[str, str, list[int], list[str]]


def waits_with(
    rank: Rank,
    path: str,
    count: int = 50_000,
    timeout: float | None = None,
    late: tuple[int, ...] = (1,),
    how: str = "stopped",
) -> Found:
    """A collective of all is launched, and does not run on the late ranks: their devices are
    stopped, or lost when they are told to go on, or their owners' streams are busy. What programs
    wait for on the other ranks ends nevertheless."""
    x, _ = rank.pair(count, "float32")
    y = rank.array(count, "float32")
    for _ in range(2):
        fd.all_reduce(x, out=y)
    y.get()
    fd.barrier()
    control = rank.machine.control
    is_late = fd.rank() in late
    is_lost = is_late and how == "lost"
    if is_late and how == "busy":
        go_on = rank.machine.keep_busy(rank.device)
    else:
        control.hold(is_late)
        go_on = lambda: control.hold(False)  # noqa: E731
    fd.all_reduce(x, out=y, timeout=timeout, name="gradient")
    assert fd.world().last_path == path
    harness.tell("launched")
    if not is_late:
        y.get()  # whatever it is
    else:
        harness.listen()
        if is_lost:
            control.lose(700)
    with pytest.raises(fd.Error) as caught:
        barriers()
    go_on()
    with contextlib.suppress(fd.Error):
        fd.shutdown()
    gc.collect()
    error = caught.value
    blamed = error.values.get("missing", [] if error.rank is None else [error.rank])
    if is_lost:
        control.forget()
    left = ["", ""] if is_lost else list(rank.machine.leave())
    return error.verdict, caught.type.__name__, blamed, left


def all_hear(world: World, killed: int | None = None) -> tuple[str, str, list[int]]:
    """The verdict, kind and blame on which all surviving ranks agree; nothing is left."""
    outcomes = [world.outcome(r) for r in range(len(world)) if r != killed]
    assert [o.error for o in outcomes] == [None] * len(outcomes), world.report()
    (*facts, left), *others = (o.value for o in outcomes)
    assert left == ["", ""]
    assert others == [(*facts, left)] * len(others)
    return tuple(facts)


def assert_rank_1_was_killed(world: World) -> None:
    """As ranks 0 and 2 return it: verdict, rank, and that nothing of a device is left."""
    survivors = [o.value for o in world.outcomes([0, 2])]
    assert survivors[0] == survivors[1]
    verdict, lost, left = survivors[0]
    assert "was killed by SIGKILL" in verdict
    assert lost == 1
    assert left == ["", ""]
