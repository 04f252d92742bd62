"""Time and bus bandwidth over size, everybody in one picture.

A line goes through medians; a bar beside it reaches from the least to the 99th percentile of calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import log2
from pathlib import Path
from typing import Any, NamedTuple

from farandole._bench.peers.table import PEERS
from farandole._bench.statistics import format_size


class Style(NamedTuple):
    """Told apart by colour (Okabe and Ito's, for all eyes), marker and dashes alike."""

    colour: str
    marker: str
    dashes: str
    width: float


STYLES = {
    ("farandole", "ours"): Style("#0072B2", "o", "-", 2.6),
    ("farandole", "caller"): Style("#56B4E9", "s", "-", 2.6),
    ("mpi", "caller"): Style("#D55E00", "^", "--", 1.4),
    ("mpich", "caller"): Style("#009E73", "v", "--", 1.4),
    ("mpich-mpir", "caller"): Style("#CC79A7", "D", "-.", 1.4),
    ("impi", "caller"): Style("#E69F00", "P", "--", 1.4),
    ("gloo", "caller"): Style("#555555", "X", ":", 1.4),
    ("copy", "caller"): Style("#BBBBBB", "", "-", 1.4),
    ("floor", "caller"): Style("#000000", "", "-", 1.0),
}
_INK = "#222222"
_LEGEND = "line: median\nbar beside it: from the least\nto the 99th percentile"


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Writes a png, svg or pdf, as the file's name ends. Needs matplotlib.

    Raises:
        ImportError: matplotlib is not here.
        ValueError: matplotlib knows no such kind of file.
    """
    from matplotlib import rc_context

    settings: Any = {"font.size": 10, "svg.hashsalt": "farandole", "svg.fonttype": "none"}
    with rc_context(settings):
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure_of(rows).savefig(path, dpi=150, metadata=metadata)


def figure_of(rows: Sequence[dict[str, Any]]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.5, 5.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    first = rows[0]
    what = f"{first['collective']}, {first['dtype']}, {first['ranks']} ranks on one host"
    figure.suptitle(what, x=0.01, ha="left", fontsize=13, color=_INK)
    _panel(left, rows, time_of, "Time of a call: lower is better", "time of a call, µs")
    _panel(right, rows, bandwidth_of, "Bus bandwidth: higher is better", "bus bandwidth, GB/s")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside right center", frameon=False, labelspacing=1.0,
        handlelength=3.2, title=_LEGEND, title_fontsize=9, alignment="left",
    )  # fmt: skip
    return figure


class Spread(NamedTuple):
    """The median, and between what nearly all calls lie."""

    low: float
    middle: float
    high: float


def time_of(row: dict[str, Any]) -> Spread:
    """In microseconds, from the least to the 99th percentile."""
    return Spread(row["min_us"], row["p50_us"], row["p99_us"])


def bandwidth_of(row: dict[str, Any]) -> Spread:
    """In GB/s, from that of the 99th percentile of times to that of the fastest call."""
    middle, times = row["busbw_gbs"], (row["p99_us"], row["min_us"])
    slow, fast = (middle * row["p50_us"] / time if time else middle for time in times)
    return Spread(slow, middle, fast)


def _panel(
    axes: Any,
    rows: Sequence[dict[str, Any]],
    value: Callable[[dict[str, Any]], Spread],
    title: str,
    unit: str,
) -> None:
    sizes = sorted({row["bytes"] for row in rows})
    series = {key: [r for r in rows if (r["peer"], r["memory"]) == key] for key in STYLES}
    series = {key: mine for key, mine in series.items() if mine}
    for aside, (key, mine) in zip(places_aside(sizes, len(series)), series.items(), strict=True):
        places, values = [r["bytes"] for r in mine], [value(r) for r in mine]
        _series(axes, STYLES[key], _label(*key), places, values, aside)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [format_size(size) for size in sizes], rotation=40, ha="right",
                    rotation_mode="anchor")  # fmt: skip
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(_plain())
    axes.set_title(title, loc="left", fontsize=10.5, color=_INK)
    axes.set_xlabel("size of one rank's data")
    axes.set_ylabel(unit)
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def places_aside(sizes: Sequence[int], series: int) -> list[float]:
    """By what sizes are multiplied where each series' bars stand, so that none hides another.

    They take up to 0.7 of the way to the next size: which size is meant stays clear. Lines stay
    where they belong, since moved aside a steep one looks like another.
    """
    gaps = [log2(b / a) for a, b in pairwise(size for size in sizes if size)]
    step = min([*gaps, 2.0]) * min(0.16, 0.7 / series)
    return [2 ** (step * (index - (series - 1) / 2)) for index in range(series)]


def _series(
    axes: Any, style: Style, label: str, sizes: Sequence[int], values: Sequence[Spread],
    aside: float,
) -> None:  # fmt: skip
    middles = [v.middle for v in values]
    front = style.width > 2
    axes.plot(
        sizes,
        middles,
        style.dashes,
        color=style.colour,
        marker=style.marker,
        markersize=5,
        markeredgecolor="white",
        markeredgewidth=0.5,
        linewidth=style.width,
        label=label,
        zorder=3 if front else 2,
    )
    axes.errorbar(
        [size * aside for size in sizes],
        middles,
        yerr=[
            [max(0.0, v.middle - v.low) for v in values],
            [max(0.0, v.high - v.middle) for v in values],
        ],
        fmt="none",
        ecolor=style.colour,
        elinewidth=1.2,
        capsize=2,
        zorder=4,
    )


def _plain() -> Callable[[float, int], str]:
    """1000 as 1000 and 0.01 as 0.01, not as powers."""
    return lambda value, _: f"{value:g}" if value >= 1e-4 else f"{value:.0e}"


def _label(peer: str, memory: str) -> str:
    of_memory = {"ours": "allocate()d memory", "caller": "caller's memory"}[memory]
    return f"farandole,\n{of_memory}" if peer == "farandole" else PEERS[peer].label
