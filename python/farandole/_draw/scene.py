"""A picture as a list of marks in pixels, x to the right, y downwards."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

# Okabe and Ito's colours, which people tell apart whatever colours they see. A picture stands on
# its own light ground, so that it reads the same on light and dark pages.
BLUE, SKY, ORANGE, GREEN, RED, PURPLE = (
    "#0072B2", "#56B4E9", "#E69F00", "#009E73", "#D55E00", "#B5568F",
)  # fmt: skip
GROUND, INK, SOFT, RULE, SHADE = "#FFFFFF", "#263238", "#607079", "#C5CED3", "#F3F6F8"

Anchor = Literal["start", "middle", "end"]


@dataclass(frozen=True)
class Line:
    """From (x, y) to (x2, y2), with a head at the second end if it is an arrow."""

    x: float
    y: float
    x2: float
    y2: float
    colour: str = INK
    width: float = 1.0
    arrow: bool = False
    dashed: bool = False


@dataclass(frozen=True)
class Disc:
    """A circle around (x, y)."""

    x: float
    y: float
    radius: float
    fill: str = GROUND
    edge: str = INK
    width: float = 1.2


@dataclass(frozen=True)
class Box:
    """A rectangle whose upper left corner is (x, y)."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    radius: float = 0.0


@dataclass(frozen=True)
class Text:
    """One line of text, whose baseline goes through (x, y)."""

    x: float
    y: float
    text: str
    size: float = 12.0
    colour: str = INK
    anchor: Anchor = "start"
    bold: bool = False


Mark: TypeAlias = Line | Disc | Box | Text


@dataclass
class Scene:
    """Marks, the first ones below the later ones. `about` is for those who cannot see them."""

    width: float
    height: float
    title: str
    about: str
    marks: list[Mark] = field(default_factory=list)

    def add(self, *marks: Mark) -> None:
        self.marks.extend(marks)


def text_width(text: str, size: float) -> float:
    """About how wide a text is: a little more than in the fonts that pictures ask for."""
    return 0.57 * size * len(text)


SCALE = (BLUE, SKY, GREEN, ORANGE, RED, PURPLE)  # from the first element of some data to its last


def on_scale(position: float) -> str:
    """The colour at a position between 0 and 1 of `SCALE`."""
    place = min(max(position, 0.0), 1.0) * (len(SCALE) - 1)
    index = min(int(place), len(SCALE) - 2)
    return mix(SCALE[index], SCALE[index + 1], place - index)


def mix(first: str, second: str, share: float) -> str:
    """The colour that lies `share` of the way from the first to the second."""
    ends = [[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in (first, second)]
    mixed = (round(a + (b - a) * share) for a, b in zip(*ends, strict=True))
    return "#" + "".join(f"{value:02X}" for value in mixed)
