"""Waits between ranks: the time in which an operation stood as one rank was not there yet."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from farandole._trace.figures import together
from farandole._trace.parts import Operation, Part, Span


@dataclass(frozen=True)
class Awaited:
    """A time in which a rank's share of an operation waited for another rank alone."""

    begin: float
    end: float
    rank: int  # the one that was waited for

    def within(self, span: Span) -> Awaited | None:
        """The part of it that lies in the span, if there is one."""
        begin, end = max(self.begin, span[0]), min(self.end, span[1])
        return Awaited(begin, end, self.rank) if begin < end else None


Waits = dict[Operation, list[Awaited]]  # by a rank's share of an operation


def awaited(parts: Iterable[Part]) -> Waits:
    """The waits of every share of an operation that several ranks took part in."""
    return {mine: _joined(_waits(mine, shares)) for shares in together(parts) for mine in shares}


def _waits(mine: Operation, shares: Sequence[Operation]) -> Iterator[Awaited]:
    """Until the last rank has submitted it, and then until its turn has come on the last one.

    Between the two lies the queue: an earlier operation moves its data, which is nobody's fault.
    """
    submits, begins = max(shares, key=lambda o: o.launched), max(shares, key=lambda o: o.begin)
    submitted = max(mine.launched, min(submits.launched, mine.end))
    if submitted > mine.launched:
        yield Awaited(mine.launched, submitted, submits.rank)
    turn, begun = max(mine.begin, submitted), min(begins.begin, mine.end)
    if begun > turn:
        yield Awaited(turn, begun, begins.rank)


def stood_still(part: Part, waits: Waits, window: Span) -> list[Awaited]:
    """When this rank's program was blocked because of another rank, within the window.

    An operation that is queued blocks nobody: what counts is the one whose turn it is.
    """
    spans = [span for spans in part.waits.values() for span in spans]
    blocked = [span for span in spans if span[0] < window[1] and span[1] > window[0]]
    found = set()
    for mine in part.operations:
        for wait in waits.get(mine, ()):
            turn = wait.within((max(mine.begin, window[0]), min(mine.end, window[1])))
            found |= {turn.within(span) for span in blocked} if turn else set()
    return _joined(wait for wait in found if wait)


def _joined(waits: Iterable[Awaited]) -> list[Awaited]:
    """Joins the waits for one rank that touch or overlap."""
    by_rank: dict[int, list[Awaited]] = defaultdict(list)
    for wait in sorted(waits, key=lambda w: w.begin):
        mine = by_rank[wait.rank]
        if mine and wait.begin <= mine[-1].end:
            mine[-1] = Awaited(mine[-1].begin, max(mine[-1].end, wait.end), wait.rank)
        else:
            mine.append(wait)
    return sorted((w for mine in by_rank.values() for w in mine), key=lambda w: w.begin)
