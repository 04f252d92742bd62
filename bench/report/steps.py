"""Training steps, starting, waiting: what other programs of bench/ measure."""

from __future__ import annotations

import bars
from document import table
from measuring import Bench, Row, only, select

_LABELS = {
    "farandole": "farandole",
    "farandole_flat": "farandole, `overlap=False`",
    "ddp": "DDP, gloo",
    "ddp_lean": "DDP, gloo, lean",
    "ddp_hook": "DDP, our hook",
    "ddp_hook_lean": "DDP, our hook, lean",
    "ddp_backend": "DDP, our backend",
    "ddp_backend_lean": "DDP, our backend, lean",
}


def measure_training(bench: Bench) -> list[Row]:
    quick = ["--blocks", "3", "--models", "cnn"] if bench.quick else ["--blocks", "30"]
    return bench.script(["bench/training_step.py", *quick], "training")


def render_training(rows: list[Row]) -> str:
    cells = []
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = select(rows, model=model)
        alone, lean = only(mine, variant="none"), only(mine, variant="ddp_lean")
        cells += [_training_cells(row, alone, lean) for row in mine if row is not alone]
    columns = ["Model", "variant", "step ms", "alone, ms", "overhead", "of lean DDP's", "bars"]
    return table(columns, cells)


def _training_cells(row: Row, alone: Row | None, lean: Row | None) -> list[str]:
    ratio = {"ratio": row["overhead"], "low": row["overhead_low"], "high": row["overhead_high"]}
    share = row["overhead"] / lean["overhead"] if lean and lean["overhead"] > 0 else None
    judged = []
    if row["variant"] == "farandole":
        judged.append(bars.verdict(ratio, bars.OVERHEAD.get(row["model"])))
        if share is not None and row["model"] in bars.OF_LEAN_DDP:
            exact = {"ratio": share, "low": share, "high": share}
            judged.append("DDP's " + bars.verdict(exact, bars.OF_LEAN_DDP[row["model"]]))
        flat = row.get("over", {}).get("farandole_flat")
        if flat:
            beside = dict(zip(("ratio", "low", "high"), flat, strict=True))
            judged.append("over no overlap " + bars.verdict(beside, bars.OVERLAP))
    within = f"({100 * ratio['low']:.1f} to {100 * ratio['high']:.1f})"
    return [
        row["model"],
        _LABELS.get(row["variant"], row["variant"]),
        f"{row['p50_ms']:.1f}",
        f"{alone['p50_ms']:.1f}" if alone else "-",
        f"{100 * ratio['ratio']:+.1f} % {within}",
        f"{share:.2f}" if share is not None and row is not lean else "-",
        "; ".join(judge for judge in judged if judge),
    ]


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
