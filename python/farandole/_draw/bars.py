"""Rows of bars over one time axis, rank below rank: marks only, whatever the bars mean."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from farandole._draw.curve import tick
from farandole._draw.scene import GROUND, INK, RULE, SHADE, SOFT, Box, Line, Mark, Text, text_width

WIDTH, LEFT, RIGHT = 940.0, 176.0, 24.0
ROW, BAR, GAP = 19.0, 13.0, 14.0
LETTERS = 22  # of a row's name, beside that of the rank
SMALL = 10.0  # size of words inside bars


@dataclass(frozen=True)
class Bar:
    begin: float
    end: float
    colour: str
    words: tuple[str, ...] = ()  # the first one that fits is written inside


@dataclass(frozen=True)
class Row:
    name: str
    bars: list[Bar]


@dataclass(frozen=True)
class Axis:
    """Where a time lies between the two borders; times in microseconds."""

    begin: float
    end: float

    @property
    def scale(self) -> float:
        return (WIDTH - LEFT - RIGHT) / (self.end - self.begin)

    def shows(self, bar: Bar) -> bool:
        """Bars that bear words are worth a pixel, or left out."""
        inside = min(bar.end, self.end) - max(bar.begin, self.begin)
        return not bar.words or inside * self.scale >= 1

    def marks(self, top: float, bottom: float) -> Iterator[Mark]:
        length = self.end - self.begin
        unit, size = ("ms", 1e3) if length < 1e6 else ("s", 1e6)
        step = tick(length / size)
        for index in range(int(length / size / step) + 1):
            x = LEFT + index * step * size * self.scale
            yield Line(x, top - 8, x, bottom, SHADE if index else RULE, 1.2)
            yield Text(x, bottom + 14, f"{index * step:g}", 11, SOFT, "middle")
        middle = (LEFT + WIDTH - RIGHT) / 2
        yield Text(middle, bottom + 32, f"{unit} since the step began", 11, SOFT, "middle")


def rank_name(rank: int, y: float, marked: bool) -> Iterator[Mark]:
    """A marked one stands out as bars with words do."""
    name = f"rank {rank}"
    if marked:
        yield Box(11, y - 1, text_width(name, 12) + 10, BAR + 2, INK, 3)
    yield Text(16, y + 11, name, 12, GROUND if marked else INK, bold=True)


def row_marks(row: Row, axis: Axis, y: float) -> Iterator[Mark]:
    name = row.name if len(row.name) <= LETTERS else row.name[: LETTERS - 1] + "…"
    yield Text(LEFT - 10, y + 11, name, 11, SOFT if row.name != "program" else INK, "end")
    for bar in row.bars:
        yield from _bar_marks(bar, axis, y)


def _bar_marks(bar: Bar, axis: Axis, y: float) -> Iterator[Mark]:
    begin, end = max(bar.begin, axis.begin), min(bar.end, axis.end)
    x, wide = LEFT + (begin - axis.begin) * axis.scale, (end - begin) * axis.scale
    if not axis.shows(bar):
        return
    yield Box(x, y, max(1.0, wide), BAR, bar.colour)
    for words in bar.words:
        if text_width(words, SMALL) + 4 <= wide:
            yield Text(x + wide / 2, y + 10, words, SMALL, GROUND, "middle")
            return


def legend(items: Mapping[str, str], y: float) -> Iterator[Mark]:
    """Names and their colours, from left to right, in as many lines as they need."""
    x = 16.0
    for name, colour in items.items():
        wide = 20 + text_width(name, 11)
        if x + wide > WIDTH - 16:
            x, y = 16.0, y + 18
        yield Box(x, y - 9, 14, 10, colour)
        yield Text(x + 20, y, name, 11, SOFT)
        x += wide + 12


def lowest(marks: Iterable[Mark]) -> float:
    return max(mark.y for mark in marks)
