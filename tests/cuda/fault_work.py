"""A call of the fake driver's that fails on rank 1 in the middle of what two ranks do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fake_device import Rank

import farandole as fd
import harness
from harness import World

UNAVAILABLE, MEMORY = 46, 2


def let_fail(rank: Rank, call: str, nth: int, code: int = UNAVAILABLE) -> None:
    """On both ranks: rank 1's nth such call from now on fails. Rank 0 is past what was before."""
    fd.barrier()
    if fd.rank() == 0:
        harness.tell("past the barrier")
    else:
        harness.listen()
        rank.machine.fail(call, nth, code)


def how_it_went_wrong(world: World, case: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What both ranks say, of a case that calls let_fail()."""
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
