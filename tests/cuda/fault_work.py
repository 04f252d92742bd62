"""A call of a fake library's that fails on rank 1 in the middle of what two ranks do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from fake_device import Rank

import farandole as fd
import harness
from harness import World

UNAVAILABLE, MEMORY = 46, 2


def let_fail(rank: Rank, call: str, nth: int, code: int = UNAVAILABLE) -> None:
    """On both ranks: rank 1's nth such call from now on fails."""
    on_rank_1(lambda: rank.machine.fail(call, nth, code))


def on_rank_1(plant: Callable[[], None]) -> None:
    """On both ranks: rank 1 plants a fault, when rank 0 is past what was before."""
    fd.barrier()
    if fd.rank() == 0:
        harness.tell("past the barrier")
    else:
        harness.listen()
        plant()


def verdict_of(train: Callable[[int], None]) -> tuple[str, int | None]:
    """Of training steps, by number, one of which fails on a device; and the rank that it names."""

    def steps() -> None:
        for step in range(3):
            train(step)

    with pytest.raises(fd.DeviceError) as caught:
        steps()
    with contextlib.suppress(fd.Error):
        fd.shutdown()
    return caught.value.verdict, caught.value.rank


def how_it_went_wrong(world: World, case: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What both ranks say, of a case that calls on_rank_1()."""
    world.start(case, *arguments)
    world.hear(0)
    world.say(1, "go")
    outcomes = world.outcomes()
    assert [o.error for o in outcomes] == [None, None], world.report()
    return [o.value for o in outcomes]


def is_rank_1s(one: Any, other: Any) -> None:
    """One verdict for both, which names rank 1; and nothing is left. Each says the verdict, the
    rank, and what the fake driver says."""
    assert one[:2] == other[:2]
    assert one[0].startswith("rank 1: cannot ")
    assert one[1] == 1
    assert one[2] == other[2] == ["", ""]
