"""Time and bus bandwidth over size, everybody in one picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
}
_INK = "#222222"


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Writes a png, svg or pdf, as the file's name ends. Needs matplotlib.

    Raises:
        ImportError: matplotlib is not here.
        ValueError: matplotlib knows no such kind of file.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    settings: Any = {"font.size": 10, "svg.hashsalt": "farandole", "svg.fonttype": "none"}
    with rc_context(settings):
        figure = Figure(figsize=(12.5, 5.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        first = rows[0]
        what = f"{first['collective']}, {first['dtype']}, {first['ranks']} ranks on one host"
        figure.suptitle(what, x=0.01, ha="left", fontsize=13, color=_INK)
        _panel(left, rows, "p50_us", "median time of a call, µs: lower is better")
        _panel(right, rows, "busbw_gbs", "bus bandwidth, GB/s: higher is better")
        handles, labels = left.get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside right center", frameon=False, labelspacing=1.0,
            handlelength=3.2,
        )  # fmt: skip
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, dpi=150, metadata=metadata)


def _panel(axes: Any, rows: Sequence[dict[str, Any]], value: str, title: str) -> None:
    for key, style in STYLES.items():
        mine = [r for r in rows if (r["peer"], r["memory"]) == key]
        if not mine:
            continue
        axes.plot(
            [row["bytes"] for row in mine],
            [row[value] for row in mine],
            style.dashes,
            color=style.colour,
            marker=style.marker,
            markersize=5,
            markeredgecolor="white",
            markeredgewidth=0.5,
            linewidth=style.width,
            label=_label(*key),
            zorder=3 if key[0] == "farandole" else 2,
        )
    sizes = sorted({row["bytes"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [format_size(size) for size in sizes], rotation=40, ha="right")
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(_plain())
    axes.set_title(title, loc="left", fontsize=10.5, color=_INK)
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _plain() -> Callable[[float, int], str]:
    """1000 as 1000 and 0.01 as 0.01, not as powers."""
    return lambda value, _: f"{value:g}" if value >= 1e-4 else f"{value:.0e}"


def _label(peer: str, memory: str) -> str:
    of_memory = {"ours": "allocate()d memory", "caller": "caller's memory"}[memory]
    return f"farandole,\n{of_memory}" if peer == "farandole" else PEERS[peer].label
