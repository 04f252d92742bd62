"""A curve over an axis: one quantity that depends on another."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import floor, log10

from farandole._draw.scene import BLUE, INK, RULE, SHADE, SOFT, Line, Scene, Text

WIDTH, HEIGHT = 640.0, 320.0
LEFT, RIGHT, TOP, BOTTOM = 76.0, 24.0, 66.0, 48.0


def tick(length: float, least: int = 4) -> float:
    """1, 2 or 5 times a power of ten, so that there are `least` to about ten of them."""
    power = 10.0 ** floor(log10(length / least))
    return max(power * factor for factor in (1, 2, 5) if length / (power * factor) >= least)


def draw_curve(points: Sequence[tuple[float, float]], title: str, axis: str, about: str) -> Scene:
    """Through these points.

    Args:
        points: at least two, from left to right; no y is negative.
        axis: the name of x.
        about: a line of words below the title.
    """
    right, high = points[-1][0], max(y for _, y in points) or 1.0
    begin = points[0][0]
    across, up = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x_of(x: float) -> float:
        return LEFT + (x - begin) / (right - begin) * across

    def y_of(y: float) -> float:
        return HEIGHT - BOTTOM - y / high * up

    scene = Scene(WIDTH, HEIGHT, title, f"{title}, {about}")
    scene.add(Text(16, 28, title, 15, INK, bold=True), Text(16, 48, about, 12, SOFT))
    step = tick(right - begin)
    for i in range(int((right - begin) / step) + 1):
        x = x_of(begin + i * step)
        scene.add(Line(x, TOP, x, HEIGHT - BOTTOM, RULE if i == 0 else SHADE))
        scene.add(Text(x, HEIGHT - BOTTOM + 16, f"{begin + i * step:g}", 11, SOFT, "middle"))
    step = tick(high)
    for i in range(int(high / step + 1e-9) + 1):
        y = y_of(i * step)
        scene.add(Line(LEFT, y, WIDTH - RIGHT, y, RULE if i == 0 else SHADE))
        scene.add(Text(LEFT - 8, y + 4, f"{i * step:g}", 11, SOFT, "end"))
    scene.add(Text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, axis, 11, SOFT, "middle"))
    for (x, y), (x2, y2) in pairwise(points):
        scene.add(Line(x_of(x), y_of(y), x_of(x2), y_of(y2), BLUE, 2.0))
    return scene
