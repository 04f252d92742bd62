"""The demo's pictures: loss curves, bandwidth over size, and the timeline of one step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from farandole import _draw, _trace
from farandole._draw.timeline import draw_step

# Okabe and Ito's colours, which people tell apart whatever colours they see.
BLUE, SKY, ORANGE, RED = "#0072B2", "#56B4E9", "#E69F00", "#D55E00"
STYLE: dict[Any, Any] = {
    "figure.dpi": 110,
    "figure.constrained_layout.use": True,
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "legend.frameon": False,
}
SIZE = (8.6, 4.8)


def draw(output: Path, results: dict[str, Any]) -> None:
    mpl.use("Agg")
    with plt.rc_context(STYLE):
        for name, picture in {
            "loss": losses(results),
            "bandwidth": bandwidth(results["bandwidth"]),
        }.items():
            picture.savefig(output / f"{name}.png")
            plt.close(picture)
    _draw.save(draw_step(_trace.load(Path(results["trace"]).parent)), output / "timeline.svg")


# ---- loss curves ----


def losses(results: dict[str, Any]) -> Figure:
    one, two, apart = (results[name]["losses"] for name in ("one", "two", "apart"))
    figure, (above, below) = plt.subplots(2, sharex=True, figsize=SIZE, height_ratios=(3, 2))
    above.semilogy(one, color=SKY, lw=4, label="1 rank", zorder=2)
    above.semilogy(two, color="black", lw=1, ls=(0, (4, 2)), label="2 ranks", zorder=3)
    above.semilogy(apart, color=RED, lw=1, label="2 ranks, communication off", zorder=1)
    above.set(title="Two ranks learn what one does: the same batches of 64 digits", ylabel="loss")
    above.legend(loc="lower left")
    steps = range(len(one))
    for curve, colour in ((apart, RED), (two, "black")):
        gap = [abs(a - b) / a for a, b in zip(one, curve, strict=True)]
        below.plot(*zip(*[(x, y) for x, y in zip(steps, gap, strict=True) if y], strict=True),
                   color=colour, lw=1)  # fmt: skip
    below.axhline(1e-4, color=BLUE, ls=":", lw=1.5)
    below.annotate("limit: 1e-4", (len(one), 1e-4), color=BLUE, ha="right", xytext=(0, 4),
                   textcoords="offset points")  # fmt: skip
    below.set(yscale="log", xlabel="training step", ylabel="relative difference\nto 1 rank")
    below.set(xlim=(0, len(one)), ylim=(1e-8, 30))
    below.set_yticks([1e-8, 1e-6, 1e-4, 1e-2, 1])
    below.minorticks_off()
    return figure


# ---- bandwidth ----


def bandwidth(rows: list[dict[str, Any]]) -> Figure:
    figure, axis = plt.subplots(figsize=SIZE)
    looks = {"ours": (BLUE, "o", "in memory that both ranks map (farandole.allocate)"),
             "caller": (ORANGE, "s", "in the caller's own memory (numpy)")}  # fmt: skip
    for memory, (colour, marker, label) in looks.items():
        mine = sorted((r for r in rows if r["memory"] == memory), key=lambda r: r["bytes"])
        axis.loglog([r["bytes"] for r in mine], [r["busbw_gbs"] for r in mine],
                    color=colour, marker=marker, label=label)  # fmt: skip
    sizes = sorted({r["bytes"] for r in rows})
    axis.set_xticks(sizes, [size_text(b) for b in sizes])
    axis.minorticks_off()
    axis.grid(axis="y", color="#DDDDDD", lw=0.8)
    axis.set(title="All-reduce of float32 between 2 ranks of one host, every result verified",
             xlabel="size of the array", ylabel="bus bandwidth, GB/s")  # fmt: skip
    axis.yaxis.set_major_formatter(lambda v, _: f"{v:g}")
    axis.legend(loc="upper left")
    return figure


def size_text(count: int) -> str:
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= factor:
            return f"{count // factor} {unit}"
    return f"{count} B"
