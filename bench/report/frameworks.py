"""Training with Keras, and what an operation costs in programs of TensorFlow and of JAX."""

from __future__ import annotations

import sys

import bars
from document import table
from measuring import Bench, Row, only, select

_LOOPS = {"fit": "`fit`", "tape": "GradientTape"}


def measure_keras(bench: Bench) -> list[Row]:
    quick = ["--blocks", "2", "--models", "cnn"] if bench.quick else []
    rows = []
    for loop in _LOOPS:
        rows += bench.script(["bench/keras_fit", "--loop", loop, *quick], f"keras-{loop}")
    return rows


def render_keras(rows: list[Row]) -> str:
    cells = []
    for model, loop in dict.fromkeys((row["model"], row["loop"]) for row in rows):
        mine = select(rows, model=model, loop=loop)
        for row in mine:
            first = row["variant"] == "none"
            cells.append(
                [
                    f"{model}, {_LOOPS[loop]}" if first else "",
                    row["label"],
                    f"{row['p50_ms']:.1f}",
                    "" if first else _overhead(row),
                    _hidden(row),
                ]
            )
    columns = ["Model", "way", "step ms", "overhead", "bar"]
    return table(columns, cells)


def _overhead(row: Row) -> str:
    middle, low, high = (100 * row[k] for k in ("overhead", "overhead_low", "overhead_high"))
    within = f"({low:+.1f} to {high:+.1f})"
    return f"no difference {within}" if low <= 0 <= high else f"{middle:+.1f} % {within}"


def _hidden(row: Row) -> str:
    """Overlap must cost nothing where there is no core to spare."""
    flat = row["over"].get("farandole_flat")
    if row["variant"] != "farandole" or flat is None:
        return ""
    beside = dict(zip(("ratio", "low", "high"), flat, strict=True))
    return "over no overlap " + bars.verdict(beside, bars.OVERLAP)


def _started(program: str, ranks: int) -> list[str]:
    launcher = ["-m", "farandole", "run", "--no-prefix", "-np", str(ranks), "--"]
    return [*launcher, sys.executable, program]


def measure_tensorflow(bench: Bench) -> list[Row]:
    quick = ["--rounds", "3" if bench.quick else "20"]
    rows = []
    for ranks in (1, 2):
        words = [*_started("bench/tensorflow_ops.py", ranks), *quick]
        rows += bench.script(words, f"tensorflow-{ranks}")
    return rows


def render_tensorflow(rows: list[Row]) -> str:
    cells = []
    for way in dict.fromkeys(row["way"] for row in rows if row["above_us"] != 0):
        mine = [only(rows, way=way, ranks=ranks) for ranks in (1, 2)]
        judged = ""
        if way == "allreduce" and mine[0]:
            above = mine[0]["above_us"]
            exact = {"ratio": above, "low": above, "high": above}
            judged = f"1 rank {bars.verdict(exact, bars.GRAPH_OP_US)}"
        cells.append([way, *(f"{row['above_us']:.1f}" if row else "" for row in mine), judged])
    return table(["Way", "1 rank, µs", "2 ranks, µs", "bar"], cells)


def measure_jax(bench: Bench) -> list[Row]:
    return bench.script(_started("bench/jax_ops.py", 2), "jax")


def render_jax(rows: list[Row]) -> str:
    return table(["", "µs"], [[row["what"], f"{row['us']:.1f}"] for row in rows])
