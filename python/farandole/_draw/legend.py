"""The legend of a schedule's picture, of the marks that occur in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from farandole._draw.layout import WORDS
from farandole._draw.scene import (
    GREEN,
    GROUND,
    INK,
    SCALE,
    SOFT,
    Box,
    Disc,
    Line,
    Mark,
    Text,
    mix,
    on_scale,
    text_width,
)
from farandole._draw.turns import Course

WHOLE = "#455A64"  # messages that carry all of the data, or pieces that are not neighbours
STORED = 0.45  # how far the colour of a message that is only stored goes towards the ground
Sample = Callable[[float, float], Iterable[Mark]]


def fold_mark(x: float, y: float, finish: bool, large: bool) -> Iterator[Mark]:
    fill, edge, plus = (GREEN, GREEN, GROUND) if finish else (GROUND, INK, INK)
    yield Disc(x, y, 6.5 if large else 3.5, fill, edge)
    if large:
        yield Line(x - 4, y, x + 4, y, plus, 1.4)
        yield Line(x, y - 4, x, y + 4, plus, 1.4)


def legend(course: Course, large: bool, stubs: bool, y: float, width: float) -> Iterator[Mark]:
    """Items follow each other and go on in a new line if they must."""
    x = 16.0
    for length, marks in _items(course, large, stubs):
        if x > 16 and x + length > width - 16:
            x, y = 16.0, y + 24
        yield from marks(x, y)
        x += length + 20


def _items(course: Course, large: bool, stubs: bool) -> Iterator[tuple[float, Sample]]:
    def arrow(colour: str) -> Sample:
        return lambda x, y: [Line(x, y, x + 26, y, colour, 1.8, arrow=True)]

    whole = any(m.place is None for m in course.messages)
    colour = WHOLE if whole else SCALE[0]
    if course.folds:
        yield _item("fold: lower ⊕ upper ranks", lambda x, y: fold_mark(x + 16, y, False, large))
        if any(event.finish for event in course.events):
            yield _item("fold that completes", lambda x, y: fold_mark(x + 16, y, True, large))
        yield _item("to be folded", arrow(colour))
        if not all(m.folded for m in course.messages):
            yield _item("to be stored", arrow(mix(colour, GROUND, STORED)))
    if any(m.place is not None for m in course.messages):
        what = "data of first … last rank" if course.by_owner else "first … last elements"
        yield _item(f"carries: {what}", _strip)
        if whole:
            yield _item("all, or several pieces", arrow(WHOLE))
    if stubs:
        yield _item("to, and from, a rank left out", _stubs)


def _item(words: str, sample: Sample) -> tuple[float, Sample]:
    """Its width, and its marks at a place: the sample in 34 pixels, then the words."""

    def marks(x: float, y: float) -> Iterator[Mark]:
        yield from sample(x, y)
        yield Text(x + 36, y + 4, words, WORDS, SOFT)

    return 36 + text_width(words, WORDS), marks


def _strip(x: float, y: float) -> Iterator[Mark]:
    for place in range(8):
        yield Box(x + 3.6 * place, y - 5, 3.8, 10, on_scale(place / 7))


def _stubs(x: float, y: float) -> Iterator[Mark]:
    yield Line(x, y - 4, x + 13, y + 4, SOFT, 1.4, arrow=True)
    yield Line(x + 18, y - 4, x + 31, y + 4, SOFT, 1.4, arrow=True)
