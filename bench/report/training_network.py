"""Training over a link of 1 Gbit/s, beside DDP over gloo, and how much of it overlap hides."""

from __future__ import annotations

from document import table
from measuring import Bench, Row, only, ratio_cell, select
from steps import LABELS

from namespaces import cable

_VARIANTS = ("farandole_flat", "farandole", "ddp", "ddp_lean")


def measure(bench: Bench) -> list[Row]:
    quick = ["--blocks", "3", "--models", "cnn"] if bench.quick else ["--blocks", "7"]
    with cable("1gbit") as ends:
        hosts = ",".join(f"{end}:1" for end in ends)
        where = ["-H", hosts, "--launcher", "netns", "--variants", ",".join(_VARIANTS)]
        return bench.script(["bench/training_step.py", *where, *quick], "training_gigabit")


def render(rows: list[Row]) -> str:
    cells = []
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = select(rows, model=model)
        alone, flat = only(mine, variant="none"), only(mine, variant="farandole_flat")
        assert alone is not None
        assert flat is not None
        for name in _VARIANTS:
            row = only(mine, variant=name)
            if row is not None:
                cells.append(_cells(row, alone, flat))
    columns = ["Model", "variant", "step ms", "alone, ms", "over lean DDP", "hidden by overlap"]
    return table(columns, cells)


def _cells(row: Row, alone: Row, flat: Row) -> list[str]:
    ours = row["variant"] == "farandole"
    hidden = 1 - (row["p50_ms"] - alone["p50_ms"]) / (flat["p50_ms"] - alone["p50_ms"])
    less_one = row["over"].get("ddp_lean")
    lean = None
    if less_one and row["variant"] != "ddp_lean":
        lean = dict(zip(("ratio", "low", "high"), (share + 1 for share in less_one), strict=True))
    return [
        f"{row['model']}, {4e-6 * row['parameters']:.1f} MB of gradients",
        LABELS[row["variant"]],
        f"{row['p50_ms']:.1f}",
        f"{alone['p50_ms']:.1f}",
        ratio_cell(lean) if lean else "-",
        f"{100 * hidden:.0f} %" if ours else "-",
    ]
