"""Training steps, operations by name, starting, waiting: what other programs of bench/ measure."""

from __future__ import annotations

import bars
from document import table
from measuring import Bench, Row, only, select

LABELS = {
    "in_step": "nothing exchanged, in step",
    "farandole": "farandole",
    "farandole_flat": "farandole, `overlap=False`",
    "farandole_sharded": "farandole, sharded update",
    "ddp_none": "DDP, nothing exchanged, lean",
    "ddp": "DDP, gloo",
    "ddp_lean": "DDP, gloo, lean",
    "ddp_hook": "DDP, our hook",
    "ddp_hook_lean": "DDP, our hook, lean",
    "ddp_backend": "DDP, our backend",
    "ddp_backend_lean": "DDP, our backend, lean",
}

_OURS_UNDER_DDP = ("ddp_hook_lean", "ddp_backend_lean")
_LEAN_DDP = ("ddp_lean", "ddp_hook_lean", "ddp_backend_lean")

NAMED_WAYS = ("farandole by name", "gloo one by one")


def measure_training(bench: Bench) -> list[Row]:
    quick = ["--blocks", "3", "--models", "cnn"] if bench.quick else ["--blocks", "15"]
    return bench.script(["bench/training_step.py", *quick], "training")


def render_training(rows: list[Row]) -> str:
    cells = []
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = select(rows, model=model)
        alone, lean = only(mine, variant="none"), only(mine, variant="ddp_lean")
        cells += [_training_cells(row, alone, lean) for row in mine if row is not alone]
    columns = [
        "Model",
        "variant",
        "step ms",
        "alone, ms",
        "overhead",
        "over in step",
        "over DDP alone",
        "of lean DDP's",
        "MB",
        "bars",
    ]
    return table(columns, cells)


def _beside(row: Row, other: str, label: str, limit: float) -> str:
    """Whether a step takes at most `limit` longer, of 1, than another variant's."""
    measured = row.get("over", {}).get(other)
    if not measured:
        return ""
    interval = dict(zip(("ratio", "low", "high"), measured, strict=True))
    return f"{label} {bars.verdict(interval, limit)}"


def _training_cells(row: Row, alone: Row | None, lean: Row | None) -> list[str]:
    ratio = {"ratio": row["overhead"], "low": row["overhead_low"], "high": row["overhead_high"]}
    share = row["overhead"] / lean["overhead"] if lean and lean["overhead"] > 0 else None
    judged = []
    if row["variant"] == "farandole":
        judged.append(bars.verdict(ratio, bars.OVERHEAD.get(row["model"])))
        if share is not None and row["model"] in bars.OF_LEAN_DDP:
            exact = {"ratio": share, "low": share, "high": share}
            judged.append("DDP's " + bars.verdict(exact, bars.OF_LEAN_DDP[row["model"]]))
        judged.append(_beside(row, "farandole_flat", "over no overlap", bars.OVERLAP))
    if row["variant"] in _OURS_UNDER_DDP:
        judged.append(_beside(row, "farandole", "over our optimizer", bars.UNDER_DDP))
        judged.append(_beside(row, "ddp_lean", "over gloo", 0.0))
    within = f"({100 * ratio['low']:.1f} to {100 * ratio['high']:.1f})"
    return [
        row["model"],
        LABELS.get(row["variant"], row["variant"]),
        f"{row['p50_ms']:.1f}",
        f"{alone['p50_ms']:.1f}" if alone else "-",
        f"{100 * ratio['ratio']:+.1f} % {within}",
        _over(row, "in_step"),
        _over(row, "ddp_none") if row["variant"] in _LEAN_DDP else "-",
        f"{share:.2f}" if share is not None and row is not lean else "-",
        f"{row['memory_mb']:.0f}",
        "; ".join(judge for judge in judged if judge),
    ]


def _over(row: Row, other: str) -> str:
    """The overhead that remains over ranks that only wait for each other (*in_step*), or that run
    DDP, lean, and exchange nothing (*ddp_none*)."""
    over = row.get("over", {}).get(other)
    if over is None or row["variant"] == other:
        return "-"
    middle, low, high = (100 * share for share in over)
    return f"{middle:+.1f} % ({low:.1f} to {high:.1f})"


def measure_named(bench: Bench) -> list[Row]:
    quick = ["--steps", "8"] if bench.quick else []
    return bench.script(["bench/named_operations.py", *quick], "named")


def render_named(rows: list[Row]) -> str:
    cells = []
    for load in dict.fromkeys(row["load"] for row in rows):
        ours, gloo = (only(select(rows, load=load), way=way) for way in NAMED_WAYS)
        exact = {"ratio": ours["p50_ms"], "low": ours["min_ms"], "high": ours["p50_ms"]}
        share = ours["p50_ms"] / gloo["p50_ms"]
        beside = {"ratio": share, "low": share, "high": share}
        judged = [bars.verdict(exact, bars.NAMED_MS.get(load)), bars.verdict(beside, bars.NAMED)]
        times = [f"{row[key]:.1f}" for row in (ours, gloo) for key in ("p50_ms", "min_ms")]
        cells.append([load, *times, f"{1 / share:.0f} x", "; ".join(filter(None, judged))])
    columns = ["A step", "by name, ms", "least", "gloo one by one, ms", "least", "", "bars"]
    return table(columns, cells)


def measure_start(bench: Bench) -> list[Row]:
    return bench.script(["bench/start_time.py", "--runs", "3" if bench.quick else "15"], "start")


def render_start(rows: list[Row]) -> str:
    cells = []
    for row in rows:
        seconds = row["first_median_s"]
        exact = {"ratio": seconds, "low": row["first_min_s"], "high": seconds}
        bar = bars.verdict(exact, bars.START_SECONDS) if row["peer"] == "farandole" else ""
        cells.append([row["peer"], f"{row['first_min_s']:.3f}", f"{seconds:.3f}", bar])
    return table(["", "least s", "median s", "bar, s"], cells)


def measure_waiting(bench: Bench) -> list[Row]:
    return bench.script(["bench/idle_cost.py", "--rounds", "2" if bench.quick else "5"], "waiting")


def render_waiting(rows: list[Row]) -> str:
    cells = []
    for row in rows:
        part = row["cpu_ms"] / 1e3 / row["waited_s"]
        most = row["cpu_max_ms"] / 1e3 / row["waited_s"]
        judged = bars.verdict({"ratio": part, "low": part, "high": most}, bars.IDLE)
        cells.append([row["wait"], f"{row['cpu_ms']:.2f}", f"{row['cpu_max_ms']:.2f}", judged])
    return table(["Wait", "median ms", "most ms", "bar, of the time waited"], cells)
