"""Pictures: a scene of simple marks, made from a schedule or a trace, written as SVG or PNG.

    scene.py     the marks, the palette
    svg.py       a scene as SVG: text, no dependency
    png.py       a scene as PNG, by matplotlib
    turns.py     a schedule run turn by turn, and what every message carries
    leaving_out.py  the turns and ranks of a large one that are drawn
    layout.py    where they lie
    messages.py  arrows and folds
    legend.py    what these mean
    schedule.py  the picture of a schedule: who sends what to whom, and which folds happen
    steps.py     the part of a trace that is shown, and the rank that was late in it
    curve.py     a curve over an axis
    bars.py      rows of bars over a time axis
    timeline.py  a training step out of a trace as a picture: what overlaps what

SVG needs nothing but the standard library (schedules need numpy); PNG needs matplotlib.
"""

from __future__ import annotations

from pathlib import Path

from farandole._draw.scene import Scene
from farandole._words import CommandError


class DrawError(CommandError):
    """Why a picture cannot be drawn or written."""


def check_name(path: Path) -> None:
    """Refuses a file that `save` could not write, before any work is done.

    Raises:
        DrawError: the name ends in neither .svg nor .png, or matplotlib is missing for a PNG.
    """
    if path.suffix not in (".svg", ".png"):
        raise DrawError(f"a picture's name ends in .svg or .png, not '{path.name}'")
    if path.suffix == ".png":
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            instead = path.with_suffix(".svg").name
            raise DrawError(
                f"PNG needs matplotlib (pip install matplotlib); {instead} needs nothing"
            ) from None


def save(scene: Scene, path: Path) -> None:
    """Writes a scene to a file whose name ends in .svg or .png.

    Raises:
        DrawError: of `check_name`, or the file cannot be written.
    """
    check_name(path)
    try:
        if path.suffix == ".svg":
            from farandole._draw.svg import to_svg

            path.write_text(to_svg(scene), encoding="utf-8")
        else:
            from farandole._draw.png import write_png

            write_png(scene, path)
    except OSError as error:
        raise DrawError(f"{path} cannot be written: {error.strerror}") from error
