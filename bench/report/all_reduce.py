"""All-reduce of float32 beside all peers, on two ranks and crowded."""

from __future__ import annotations

from collections.abc import Callable

import bars
from document import table
from measuring import MPIS, Bench, Row, only, ratio_cell, run, select, time_of, versions

from farandole._bench.peers.table import PEERS
from farandole._bench.statistics import format_size

_MEMORY = {"ours": "ours", "caller": "caller's"}
_CROWDED = (4, 1 << 10, 16 << 10, 256 << 10, 1 << 20, 16 << 20)


def measure_two(bench: Bench) -> list[Row]:
    sizes = [4, 16 << 10, 1 << 20] if bench.quick else list(bars.ALL_REDUCE)
    question = bench.question("all_reduce", sizes)
    return run(bench, [question], [*MPIS, "gloo"])


def measure_crowded(bench: Bench) -> list[Row]:
    sizes = [4, 1 << 20] if bench.quick else list(_CROWDED)
    question = bench.question("all_reduce", sizes, ranks=4, block_seconds=0.06)
    return run(bench, [question], [*MPIS, "gloo"])


def render_two(rows: list[Row]) -> str:
    return _render(rows, lambda size, memory: bars.ALL_REDUCE[size][memory == "caller"])


def render_crowded(rows: list[Row]) -> str:
    return _render(rows, bars.crowded)


def _render(rows: list[Row], limit: Callable[[int, str], float | None]) -> str:
    peers = [name for name in PEERS if any(r["peer"] == name for r in rows) and name != "farandole"]
    columns = ["Size", "memory", "path", "farandole", *(PEERS[p].label for p in peers)]
    columns += ["farandole / best MPI", "bar"]
    cells = []
    for row in select(rows, peer="farandole"):
        best = row["ratios"].get("best_mpi")
        times = [time_of(only(rows, peer=peer, bytes=row["bytes"])) for peer in peers]
        judged = ["-", ""]
        if best:
            bar = limit(row["bytes"], row["memory"])
            judged = [ratio_cell(best), bars.verdict(best, bar)]
        cells.append(
            [
                format_size(row["bytes"]),
                _MEMORY[row["memory"]],
                row["algorithm"],
                time_of(row),
                *times,
                *judged,
            ]
        )
    slower = [
        f"{format_size(row['bytes'])} in {_MEMORY[row['memory']]} memory"
        for row in select(rows, peer="farandole")
        if "gloo" in row["ratios"] and row["ratios"]["gloo"]["ratio"] > bars.GLOO
    ]
    gloo = (
        f"Slower than gloo: {', '.join(slower)}: **NO**." if slower else "Never slower than gloo."
    )
    if "gloo" not in peers:
        gloo = ""
    return f"p50 in µs; {versions(rows)}.\n\n{table(columns, cells)}\n\n{gloo}"
