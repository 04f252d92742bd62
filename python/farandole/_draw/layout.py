"""Where a schedule's ranks and turns lie in its picture: numbers only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from farandole._draw.leaving_out import Run, Shown
from farandole._draw.scene import text_width
from farandole._draw.turns import Course

LEFT, RIGHT, TOP = 82.0, 24.0, 88.0
WORDS = 11.0  # size of the words at the folds
GAP = 46.0  # between turns, where some are left out
LINE = 18.0  # of the words above


@dataclass(frozen=True)
class Layout:
    """How much room there is: the more turns, the less is written at a fold."""

    shown: Shown
    begins: dict[int, float]  # where each turn's arrows begin
    right: float  # where the last turn ends
    ys: dict[int, float]  # of each rank
    no_turns: list[tuple[float, Run]]  # where gaps begin, and what is left out there
    no_ranks: list[tuple[float, Run]]  # the middle of gaps
    top: float
    arrow: float  # room for the arrows of a turn
    row: float
    operands: bool
    results: bool

    def begin(self, turn: int) -> float:
        return self.begins[turn]

    def end(self, turn: int) -> float:
        return self.begin(turn) + self.arrow if turn else LEFT

    def y(self, rank: int) -> float:
        return self.ys[rank]

    @property
    def bottom(self) -> float:
        return max(self.ys.values())


def layout_for(course: Course, size: int, shown: Shown) -> Layout:
    """Between two turns is room for words, if anything was folded in the first."""
    turns, ranks = len(shown.turns), len(shown.ranks)
    operands = turns <= 7 and ranks <= 16
    results = operands or (turns <= 16 and ranks <= 16)
    longest = f"{size - 1}–{size - 1}" + f" ⊕ {size - 1}–{size - 1}" * operands  # noqa: RUF001
    words = 26 + text_width(longest, WORDS) if results else 14.0
    arrow = 62.0 if operands or shown.no_ranks else 46.0 if results else _narrow(turns)
    begins, no_turns, right = _columns(course, shown, arrow, words)
    row = 44.0 if ranks <= 8 else 34.0 if ranks <= 16 else 22.0
    top = TOP + LINE * len(shown.words())
    ys, no_ranks = _rows(shown, top + 22, row)
    return Layout(
        shown, begins, right, ys, no_turns, no_ranks, top, arrow, row, operands, results
    )  # fmt: skip


def _narrow(turns: int) -> float:
    return max(14.0, min(34.0, 1600 / max(1, turns)))


def _columns(
    course: Course, shown: Shown, arrow: float, words: float
) -> tuple[dict[int, float], list[tuple[float, Run]], float]:
    folding = {event.turn for event in course.events}
    begins, gaps, x = {}, [], LEFT + 14
    for turn in shown.turns:
        if gap := _gap_before(turn, shown.no_turns):
            gaps.append((x, gap))
            x += GAP
        begins[turn] = x
        x = x + arrow + (words if turn in folding else min(words, 18.0))
    return begins, gaps, x


def _rows(
    shown: Shown, first: float, row: float
) -> tuple[dict[int, float], list[tuple[float, Run]]]:
    ys, gaps, y = {}, [], first
    for rank in shown.ranks:
        if gap := _gap_before(rank, shown.no_ranks):
            gaps.append((y, gap))
            y += row
        ys[rank] = y
        y += row
    return ys, gaps


def _gap_before(number: int, gaps: Sequence[Run]) -> Run | None:
    return next((gap for gap in gaps if gap[1] + 1 == number), None)
