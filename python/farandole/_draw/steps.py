"""The part of a trace that a picture of a training step shows, and the rank that was late in it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from farandole._trace.figures import union
from farandole._trace.parts import Part, Span
from farandole._trace.waiting import Awaited

WORTH_A_WORD = 0.02  # of the step


def typical_step(parts: Sequence[Part], count: int) -> int:
    """The lower quartile of the second half: other programs only make steps longer."""
    later = range(count // 2, count)
    return sorted(later, key=lambda step: length(window_of(parts, step)))[len(later) // 4]


def length(span: Span) -> float:
    return span[1] - span[0]


def window_of(parts: Sequence[Part], step: int) -> Span:
    """From the first rank's `forward` to the last one's `optimizer`, as far as they are named so.

    What a reducer calls a step is shorter: first gradient ready to all gradients reduced.
    """
    begins, ends = [], []
    for part in parts:
        begin, end = part.steps[step]
        later = part.steps[step + 1][0] if step + 1 < len(part.steps) else float("inf")
        forward, optimizer = (part.spans.get(name, []) for name in ("forward", "optimizer"))
        first = bisect_right(forward, begin, key=lambda span: span[0]) - 1
        last = bisect_left(optimizer, end, key=lambda span: span[1])
        begins.append(forward[first][0] if first >= 0 else begin)
        named = last < len(optimizer) and optimizer[last][1] <= later
        ends.append(optimizer[last][1] if named else end)
    return min(begins), max(ends)


def within(span: Span, window: Span) -> bool:
    return span[1] > window[0] and span[0] < window[1]


@dataclass(frozen=True)
class Late:
    """The rank that programs stood still for longest, and how long one did."""

    rank: int
    cost: float
    share: float  # of the step


def latest(still: Mapping[int, list[Awaited]], window: Span) -> Late | None:
    """The rank that others waited for most; None where that is not worth a word."""
    cost: dict[int, float] = {}
    for waits in still.values():
        for rank in {wait.rank for wait in waits}:
            mine = union((wait.begin, wait.end) for wait in waits if wait.rank == rank)
            cost[rank] = max(cost.get(rank, 0.0), mine)
    for rank, most in sorted(cost.items(), key=lambda item: -item[1])[:1]:
        if most >= WORTH_A_WORD * length(window):
            return Late(rank, most, most / length(window))
    return None
