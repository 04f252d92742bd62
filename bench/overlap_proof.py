"""Whether communication hides behind backward: python bench/overlap_proof.py

Every bucket of gradients is given a latency in the transport that occupies no core (5 ms), so that
communication costs time and nothing else. Two ranks then train one model in four ways that take
turns: nothing exchanged (compute alone), gradients reduced with nothing computed (communication
alone), both with everything launched at the end of backward, and both with overlap. Without overlap
a step is the sum of the two; whatever it is shorter with overlap was hidden.

Needs torch and a build with -DFARANDOLE_FAULT_POINTS=ON; --png needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import farandole as fd
from farandole import _launch
from farandole._bench import placement
from farandole._bench.statistics import median, median_interval
from farandole._trace import parts
from farandole.cli._terminal import print_table

_LAYERS, _WIDTH, _BATCH = 30, 512, 96  # backward of a layer takes two milliseconds
_BUCKETS = 10
_BUCKET_BYTES = _LAYERS // _BUCKETS * _WIDTH * _WIDTH * 4
_LIMITS = {"bucket_bytes": _BUCKET_BYTES, "first_bucket_bytes": _BUCKET_BYTES}
_STEPS = 3  # in a block; the one before them is not timed
SPANS = ("forward", "backward", "optimizer")

Step = Callable[[], None]


# -- one rank -------------------------------------------------------------------------------------


def _model() -> tuple[Any, Any]:
    import torch
    from torch import nn

    torch.manual_seed(7)
    layers: list[nn.Module] = []
    for _ in range(_LAYERS):
        layers += [nn.Linear(_WIDTH, _WIDTH, bias=False), nn.Tanh()]
    module = nn.Sequential(*layers)
    return module, torch.optim.SGD(module.parameters(), lr=1e-3)


def _training(overlap: bool | None) -> Step:
    """A training step; overlap None exchanges nothing."""
    import torch

    module, optimizer = _model()
    if overlap is not None:
        from farandole.torch import DistributedOptimizer

        optimizer = DistributedOptimizer(
            optimizer, module.named_parameters(), overlap=overlap, **_LIMITS
        )
    inputs = torch.randn(_BATCH, _WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        with fd.trace_span("forward"):
            loss = module(inputs).square().mean()
        with fd.trace_span("backward"):
            loss.backward()
        with fd.trace_span("optimizer"):
            optimizer.step()

    return step


def _communication() -> Step:
    """The same gradients reduced, with nothing to compute."""
    import torch

    from farandole.torch import DistributedOptimizer

    module, plain = _model()
    optimizer: Any = DistributedOptimizer(plain, module.named_parameters(), **_LIMITS)

    def step() -> None:
        optimizer.zero_grad()
        for p in module.parameters():
            p.grad = torch.ones_like(p)
        optimizer.synchronize()

    return step


def _rank(blocks: int) -> int:
    placement.pin(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    import torch

    torch.set_num_threads(1)
    fd.init()
    steps = {
        "compute": _training(None),
        "communication": _communication(),
        "flat": _training(overlap=False),
        "overlap": _training(overlap=True),
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for block in range(-1, blocks):  # the first one makes buckets, and plans them in ready order
        for name, step in steps.items():
            fd.barrier()
            mine = []
            for turn in range(-1, _STEPS):
                start = time.perf_counter()
                with fd.trace_span(name):
                    step()
                if turn >= 0:
                    mine.append(1e3 * (time.perf_counter() - start))
            if block >= 0:
                times[name].append(median(mine))
    if fd.rank() == 0:
        Path(os.environ["OVERLAP_PROOF_RESULT"]).write_text(json.dumps(times))
    fd.shutdown()
    return 0


# -- what comes of it -----------------------------------------------------------------------------


def judge(times: dict[str, list[float]]) -> dict[str, Any]:
    """Medians in milliseconds, and how much of the communication was hidden, block by block."""
    compute, communication, flat, overlap = (
        times[name] for name in ("compute", "communication", "flat", "overlap")
    )
    rows = list(zip(compute, communication, flat, overlap, strict=True))
    hidden = median_interval([(f - o) / c for _, c, f, o in rows])
    of_sum = median_interval([o / (a + c) for a, c, _, o in rows])
    return {
        "benchmark": "overlap_proof",
        "compute_ms": median(compute),
        "communication_ms": median(communication),
        "no_overlap_ms": median(flat),
        "overlap_ms": median(overlap),
        "hidden": [hidden.median, hidden.low, hidden.high],
        "of_sum": [of_sum.median, of_sum.low, of_sum.high],
        "confidence": of_sum.confidence,
        "blocks": len(rows),
    }


def _show(found: dict[str, Any], delay_ms: float) -> None:
    added = found["compute_ms"] + found["communication_ms"]
    rows = [
        ["compute alone", f"{found['compute_ms']:.1f}"],
        [f"communication alone, {_BUCKETS} buckets", f"{found['communication_ms']:.1f}"],
        ["their sum", f"{added:.1f}"],
        ["step, overlap=False", f"{found['no_overlap_ms']:.1f}"],
        ["step, overlap", f"{found['overlap_ms']:.1f}"],
    ]
    print_table(f"2 ranks, {delay_ms:g} ms of latency per bucket", ["", "ms"], rows)
    for text, key in (
        ("a step with overlap over compute plus communication", "of_sum"),
        ("of the communication was hidden behind backward", "hidden"),
    ):
        middle, low, high = (100 * share for share in found[key])
        print(f"{middle:.0f} % ({low:.0f} to {high:.0f}): {text}")


# -- the picture ----------------------------------------------------------------------------------

# Okabe and Ito's colours, which people tell apart whatever colours they see.
_COLOURS = {
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "waiting for gradients": "#E69F00",
    "optimizer": "#009E73",
    "a bucket on its way": "#D55E00",
}


def draw(trace: Path, found: dict[str, Any], delay_ms: float, png: Path) -> None:
    """A typical step of rank 0 without and with overlap, below each other in the same time."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    part = parts.load(trace).parts[0]
    with plt.rc_context({"font.size": 11, "figure.constrained_layout.use": True}):
        figure, axes = plt.subplots(2, sharex=True, figsize=(8.6, 4.4))
        for axis, way in zip(axes, ("flat", "overlap"), strict=True):
            whole = _typical(
                part.spans[way], found["no_overlap_ms" if way == "flat" else way + "_ms"]
            )
            _timeline(axis, part, whole)
            length = (whole[1] - whole[0]) / 1e3
            name = "with overlap" if way == "overlap" else "overlap=False"
            axis.set_title(f"{name}: {length:.0f} ms", loc="left", fontsize=11)
        compute, communication = found["compute_ms"], found["communication_ms"]
        for axis in axes:
            axis.axvline(compute + communication, color="black", ls=":", lw=1)
        axes[-1].annotate(
            "compute +\ncommunication", (compute + communication, 0.5), ha="right", va="center",
            xytext=(-4, 0), textcoords="offset points", fontsize=9.5,
        )  # fmt: skip
        axes[-1].set_xlabel("milliseconds since the step began")
        axes[-1].set_xlim(0, 1.06 * max(found["no_overlap_ms"], compute + communication))
        figure.suptitle(
            f"Compute alone takes {compute:.0f} ms, communication alone {communication:.0f} ms "
            f"({_BUCKETS} buckets, {delay_ms:g} ms of latency each)",
            x=0.01, ha="left", fontsize=12,
        )  # fmt: skip
        figure.legend(
            handles=[Patch(color=c, label=n) for n, c in _COLOURS.items()],
            loc="outside lower center", ncols=5, fontsize=9.5, columnspacing=1.2, frameon=False,
        )  # fmt: skip
        png.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(png, dpi=110)


def _typical(steps: list[parts.Span], ms: float) -> parts.Span:
    return min(steps, key=lambda span: abs((span[1] - span[0]) / 1e3 - ms))


def _timeline(axis: Any, part: parts.Part, whole: parts.Span) -> None:
    def inside(spans: list[parts.Span]) -> list[parts.Span]:
        return [(b, e) for b, e in spans if whole[0] <= b and e <= whole[1]]

    def bars(row: float, spans: list[parts.Span], colour: str, edge: str = "none") -> None:
        boxes = [((b - whole[0]) / 1e3, (e - b) / 1e3) for b, e in spans]
        axis.broken_barh(boxes, (row - 0.36, 0.72), facecolors=colour, edgecolors=edge, lw=0.8)

    for name in SPANS:
        bars(0, inside(part.spans[name]), _COLOURS[name])
    waits = [span for spans in part.final_waits.values() for span in spans]
    bars(0, inside(waits), _COLOURS["waiting for gradients"])
    buckets = [(o.begin, o.end) for o in part.operations if o.name.startswith("bucket")]
    bars(1, inside(buckets), _COLOURS["a bucket on its way"], "white")
    axis.set_yticks([0, 1], ["program", "buckets"])
    axis.set_ylim(1.5, -0.5)
    axis.tick_params(left=False)
    axis.spines[["top", "right"]].set_visible(False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--delay", type=float, default=5, metavar="MS", help="per bucket (5)")
    parser.add_argument("--blocks", type=int, default=15, help="per way (15)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers as JSON")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw a step of either way")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        return _rank(arguments.blocks)
    if not arguments.delay > 0 or arguments.blocks < 1:
        parser.error("numbers must be positive")
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "times.json")
        trace = Path(folder, "trace")
        os.environ |= {
            "OMP_NUM_THREADS": "1",
            "OVERLAP_PROOF_RESULT": str(result),
            "FARANDOLE_TRACE": str(trace),
            "FARANDOLE_FAULT": f"rank=any,at=bucket,do=delay:{arguments.delay / 1e3}",
        }
        command = [sys.executable, *sys.argv]
        code = _launch.launch(_launch.Job(command=command, ranks=2, prefix=False))
        if code != 0:
            return code
        found = judge(json.loads(result.read_text())) | {"delay_ms": arguments.delay}
        _show(found, arguments.delay)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(found) + "\n")
        if arguments.png is not None:
            draw(trace, found, arguments.delay, arguments.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
