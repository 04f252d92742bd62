"""The other collectives beside all MPIs, from 64 KiB."""

from __future__ import annotations

import bars
from document import table
from measuring import MPIS, Bench, Row, only, ratio_cell, run, select, time_of, versions

from farandole._bench.layouts import COMMON
from farandole._bench.peers.table import PEERS
from farandole._bench.statistics import format_size


def measure(bench: Bench) -> list[Row]:
    sizes = [1 << 20] if bench.quick else [64 << 10, 1 << 20, 16 << 20]
    names = [name for name in COMMON if name != "all_reduce"]
    questions = [bench.question(name, sizes, block_seconds=0.02) for name in names]
    return run(bench, questions, MPIS)


def render(rows: list[Row]) -> str:
    cells = []
    for row in select(rows, peer="farandole"):
        best = row["ratios"].get("best_mpi")
        if best is None:
            continue
        theirs = only(rows, peer=best["peer"], bytes=row["bytes"], collective=row["collective"])
        cells.append(
            [
                row["collective"],
                format_size(row["bytes"]),
                row["memory"],
                row["algorithm"],
                time_of(row),
                f"{PEERS[best['peer']].label}: {time_of(theirs)}",
                ratio_cell(best),
                bars.verdict(best, bars.OTHERS),
            ]
        )
    lacking = [name for name in COMMON if not select(rows, peer="farandole", collective=name)]
    lacking = [name for name in lacking if name != "all_reduce"]
    note = f"\n\nNot measured: {', '.join(lacking)}." if lacking else ""
    columns = ["", "Size", "memory", "path", "p50 µs", "best MPI, µs", "ratio", "bar"]
    return f"{versions(rows)}.\n\n{table(columns, cells)}{note}"
