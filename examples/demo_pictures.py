"""The demo's pictures: loss curves, the timeline of one step, bandwidth over size."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

# Okabe and Ito's colours, which people tell apart whatever colours they see.
BLUE, SKY, ORANGE, GREEN, RED = "#0072B2", "#56B4E9", "#E69F00", "#009E73", "#D55E00"
GREY = "#CCCCCC"
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

Event = dict[str, Any]
Span = tuple[float, float]  # begin, end


def draw(output: Path, results: dict[str, Any]) -> None:
    mpl.use("Agg")
    with plt.rc_context(STYLE):
        for name, picture in {
            "loss": losses(results),
            "timeline": timeline(json.loads(Path(results["trace"]).read_text())["traceEvents"]),
            "bandwidth": bandwidth(results["bandwidth"]),
        }.items():
            picture.savefig(output / f"{name}.png")
            plt.close(picture)


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


# ---- one step of both ranks ----


def timeline(events: list[Event]) -> Figure:
    """What each rank's program did in one step, and where its buckets were meanwhile."""
    spans = one_step(events)
    begin, end = min(b for b, _ in spans.values()), max(e for _, e in spans.values())
    figure, axes = plt.subplots(len(spans), sharex=True, figsize=SIZE, squeeze=False)
    for axis, (rank, (first, last)) in zip(axes[:, 0], spans.items(), strict=True):
        mine = [
            e for e in events
            if e["pid"] == rank and e["ph"] == "X" and first <= e["ts"] and ends(e) <= last
        ]  # fmt: skip
        for event, colour in program_of(mine):
            bar(axis, 0, event["ts"], ends(event), begin, colour)
        reduced = operations_of(mine)
        for row, event in enumerate(reduced, 1):
            bar(axis, row, event["args"]["launched"], ends(event), begin, GREY)
            for phase in phases(mine, event, "running"):
                bar(axis, row, phase["ts"], ends(phase), begin, RED)
        names = [f"{e['name']}, {size_text(e['args']['bytes'])}" for e in reduced]
        axis.set_yticks(range(len(names) + 1), ["program", *names])
        axis.set(ylim=(len(names) + 0.6, -0.6), xlim=(0, (end - begin) / 1000))
        axis.set_title(f"rank {rank}", fontsize=11)
        axis.tick_params(left=False)
    axes[-1, 0].set_xlabel("milliseconds since the step began")
    figure.suptitle("One training step of both ranks, from the trace", x=0.01, ha="left")
    legend = {"forward": SKY, "backward": BLUE, "waiting for gradients": ORANGE,
              "optimizer": GREEN, "launched": GREY, "running": RED}  # fmt: skip
    figure.legend(handles=[Patch(color=c, label=n) for n, c in legend.items()],
                  loc="outside lower center", ncols=6, fontsize=9.5, columnspacing=1.2)  # fmt: skip
    return figure


def program_of(events: Iterable[Event]) -> list[tuple[Event, str]]:
    """The bars of the program's row, those on top last."""
    colours = {"forward": SKY, "backward": BLUE, "optimizer": GREEN}
    spans = [(e, colours[e["name"]]) for e in events if e["cat"] == "user"]
    return spans + [(e, ORANGE) for e in events if e["cat"] == "final_wait"]


def one_step(events: Iterable[Event]) -> dict[int, Span]:
    """From forward to optimizer on every rank, in a step of the second half of the training.

    It is the one at the lower quartile of lengths: other programs on the machine make steps longer,
    nothing makes them shorter.
    """
    begins: dict[int, list[float]] = {}
    stops: dict[int, list[float]] = {}
    for event in events:
        if event.get("cat") == "user" and event["name"] == "forward":
            begins.setdefault(event["pid"], []).append(event["ts"])
        elif event.get("cat") == "user" and event["name"] == "optimizer":
            stops.setdefault(event["pid"], []).append(ends(event))
    steps = [
        {r: (sorted(begins[r])[i], sorted(stops[r])[i]) for r in sorted(begins)}
        for i in range(len(begins[0]) // 2, len(begins[0]))
    ]
    steps.sort(key=lambda s: max(e for _, e in s.values()) - min(b for b, _ in s.values()))
    return steps[len(steps) // 4]


def operations_of(events: list[Event]) -> list[Event]:
    """The buckets of the step, then the operation that agrees on which gradients were used."""
    streams = {e["args"]["stream"] for e in events if e["cat"] == "step"}
    mine = [e for e in events if e["cat"] == "operation" and e["args"]["stream"] in streams]
    return sorted(mine, key=lambda e: e["args"]["sequence"])


def phases(events: Iterable[Event], operation: Event, name: str) -> list[Event]:
    key = ("stream", "sequence")
    wanted = [operation["args"][k] for k in key]
    return [
        e for e in events
        if e["cat"] == "phase" and e["name"] == name and [e["args"][k] for k in key] == wanted
    ]  # fmt: skip


def ends(event: Event) -> float:
    return float(event["ts"] + event["dur"])


def bar(axis: Axes, row: int, begin: float, end: float, zero: float, colour: str) -> None:
    axis.barh(row, (end - begin) / 1000, left=(begin - zero) / 1000, height=0.72, color=colour)


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
