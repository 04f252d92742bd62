"""A scene as SVG: one element for a mark, no script, no style sheet, no outside font."""

from __future__ import annotations

from collections.abc import Iterator
from math import hypot
from xml.sax.saxutils import escape

from farandole._draw.scene import GROUND, RULE, Box, Disc, Line, Mark, Scene, Text

FONTS = "DejaVu Sans,Verdana,Helvetica,Arial,sans-serif"


def to_svg(scene: Scene) -> str:
    """The whole file's text."""
    width, height = _number(scene.width), _number(scene.height)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="{FONTS}" role="img">',
            f"<title>{escape(scene.title)}</title>",
            f"<desc>{escape(scene.about)}</desc>",
            f'<rect x=".5" y=".5" width="{_number(scene.width - 1)}" '
            f'height="{_number(scene.height - 1)}" rx="6" fill="{GROUND}" stroke="{RULE}"/>',
            *(text for mark in scene.marks for text in _mark(mark)),
            "</svg>\n",
        ]
    )


def _mark(mark: Mark) -> Iterator[str]:
    if isinstance(mark, Line):
        yield from _line(mark)
    elif isinstance(mark, Disc):
        yield (
            f'<circle cx="{_number(mark.x)}" cy="{_number(mark.y)}" r="{_number(mark.radius)}" '
            f'fill="{mark.fill}" stroke="{mark.edge}" stroke-width="{_number(mark.width)}"/>'
        )
    elif isinstance(mark, Box):
        corner = f' rx="{_number(mark.radius)}"' if mark.radius else ""
        yield (
            f'<rect x="{_number(mark.x)}" y="{_number(mark.y)}" width="{_number(mark.width)}" '
            f'height="{_number(mark.height)}"{corner} fill="{mark.fill}"/>'
        )
    else:
        yield _text(mark)


def _line(line: Line) -> Iterator[str]:
    x2, y2 = line.x2, line.y2
    if line.arrow:
        corners = arrow_head(line)
        points = " ".join(f"{_number(x)},{_number(y)}" for x, y in corners)
        yield f'<polygon points="{points}" fill="{line.colour}"/>'
        x2, y2 = ((corners[1][i] + corners[2][i]) / 2 for i in (0, 1))
    dashes = ' stroke-dasharray="4 3"' if line.dashed else ""
    yield (
        f'<path d="M{_number(line.x)} {_number(line.y)}L{_number(x2)} {_number(y2)}" '
        f'stroke="{line.colour}" stroke-width="{_number(line.width)}"{dashes}/>'
    )


def arrow_head(line: Line) -> list[tuple[float, float]]:
    """The tip and the two other corners."""
    length = hypot(line.x2 - line.x, line.y2 - line.y)
    along, size = ((line.x2 - line.x) / length, (line.y2 - line.y) / length), 4.5 + 1.6 * line.width
    back = (line.x2 - size * along[0], line.y2 - size * along[1])
    wide = 0.42 * size
    return [
        (line.x2, line.y2),
        (back[0] - wide * along[1], back[1] + wide * along[0]),
        (back[0] + wide * along[1], back[1] - wide * along[0]),
    ]


def _text(text: Text) -> str:
    anchor = "" if text.anchor == "start" else f' text-anchor="{text.anchor}"'
    weight = ' font-weight="bold"' if text.bold else ""
    return (
        f'<text x="{_number(text.x)}" y="{_number(text.y)}" font-size="{_number(text.size)}" '
        f'fill="{text.colour}"{anchor}{weight}>{escape(text.text)}</text>'
    )


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
