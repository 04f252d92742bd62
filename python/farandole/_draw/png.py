"""A scene as PNG: matplotlib draws the same marks, two pixels for one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from farandole._draw.scene import GROUND, Box, Disc, Line, Mark, Scene, Text
from farandole._draw.svg import arrow_head

DOTS = 100  # pixels of a scene that matplotlib takes for an inch
POINTS = 72 / DOTS
ANCHORS = {"start": "left", "middle": "center", "end": "right"}


def write_png(scene: Scene, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(scene.width / DOTS, scene.height / DOTS), facecolor=GROUND)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(0, scene.width), ylim=(scene.height, 0))
    axes.axis("off")
    for order, mark in enumerate(scene.marks):
        _add(axes, mark, order)
    figure.savefig(path, dpi=2 * DOTS)


def _add(axes: Any, mark: Mark, order: int) -> None:
    from matplotlib.patches import Circle, FancyBboxPatch, Polygon

    if isinstance(mark, Text):
        axes.text(
            mark.x, mark.y, mark.text, size=mark.size * POINTS, color=mark.colour,
            weight="bold" if mark.bold else "normal", ha=ANCHORS[mark.anchor], va="baseline",
            zorder=order, parse_math=False,
        )  # fmt: skip
    elif isinstance(mark, Line):
        end = (mark.x2, mark.y2)
        if mark.arrow:
            head = arrow_head(mark)
            axes.add_patch(Polygon(head, color=mark.colour, lw=0, zorder=order))
            end = ((head[1][0] + head[2][0]) / 2, (head[1][1] + head[2][1]) / 2)
        style = (0, (4, 3)) if mark.dashed else "-"
        axes.plot([mark.x, end[0]], [mark.y, end[1]], color=mark.colour, ls=style,
                  lw=mark.width * POINTS, solid_capstyle="butt", zorder=order)  # fmt: skip
    elif isinstance(mark, Disc):
        disc = Circle((mark.x, mark.y), mark.radius, lw=mark.width * POINTS, zorder=order)
        disc.set(facecolor=mark.fill, edgecolor=mark.edge)
        axes.add_patch(disc)
    elif isinstance(mark, Box):
        shape = f"round,pad=0,rounding_size={mark.radius}" if mark.radius else "square,pad=0"
        corner = (mark.x, mark.y)
        axes.add_patch(
            FancyBboxPatch(
                corner, mark.width, mark.height, shape, facecolor=mark.fill, lw=0, zorder=order
            )
        )
