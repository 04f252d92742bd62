"""One call from Python after the other, nothing rewritten between them."""

from __future__ import annotations

from document import table
from measuring import MPIS, Bench, Row, only, ratio_cell, run, select, time_of, versions

from farandole._bench.peers.table import PEERS
from farandole._bench.statistics import format_size


def measure(bench: Bench) -> list[Row]:
    sizes = [4] if bench.quick else [4, 64, 1 << 10, 4 << 10]
    return run(bench, [bench.question("all_reduce", sizes, hot=True)], MPIS)


def render(rows: list[Row]) -> str:
    peers = [name for name in MPIS if any(row["peer"] == name for row in rows)]
    cells = []
    for row in select(rows, peer="farandole"):
        best = row["ratios"].get("best_mpi")
        times = [time_of(only(rows, peer=peer, bytes=row["bytes"])) for peer in peers]
        cells.append(
            [
                format_size(row["bytes"]),
                row["memory"],
                time_of(row),
                *times,
                ratio_cell(best) if best else "-",
            ]
        )
    columns = ["Size", "memory", "farandole", *(PEERS[p].label for p in peers)]
    return f"p50 in µs; {versions(rows)}.\n\n" + table([*columns, "farandole / best MPI"], cells)
