"""farandole through an MPI's point-to-point messages, beside the same MPI's own Allreduce.

Two ranks of one host, which its mpiexec has started; FARANDOLE_TRANSPORT=mpi keeps farandole from
its own shared memory.
"""

from __future__ import annotations

from dataclasses import replace

import bars
from document import table
from measuring import MPIS, Bench, Row, only, over, ratio_cell, run, select, time_of, versions

from farandole._bench.peers.finding import Found
from farandole._bench.peers.table import PEERS
from farandole._bench.statistics import format_size

_MPIS = tuple(name for name in MPIS if name != "mpich-mpir")
_OURS = " farandole"  # after the name of the MPI that it goes through


def measure(bench: Bench) -> list[Row]:
    sizes = [4, bars.MIB] if bench.quick else [4, bars.KIB, 64 * bars.KIB, bars.MIB, 16 * bars.MIB]
    ours = [_through(found) for found in bench.found(_MPIS)]
    return run(bench, [bench.question("all_reduce", sizes)], _MPIS, (), ours)


def _through(found: Found) -> Found:
    """farandole's ranks, started by that MPI."""
    peer = replace(found.peer, name=found.peer.name + _OURS, library="ours")
    environment = {**found.environment, "FARANDOLE_TRANSPORT": "mpi"}
    return replace(found, peer=peer, environment=environment)


def render(rows: list[Row]) -> str:
    cells = []
    for theirs in (row for name in _MPIS for row in select(rows, peer=name)):
        ours = only(rows, peer=theirs["peer"] + _OURS, bytes=theirs["bytes"])
        if ours is None:
            continue
        ratio = over(ours, theirs)
        cells.append(
            [
                PEERS[theirs["peer"]].label,
                format_size(theirs["bytes"]),
                time_of(theirs),
                time_of(ours),
                ours["algorithm"],
                ratio_cell(ratio),
                bars.verdict(ratio, bars.OVER_MPI.get(theirs["bytes"])),
            ]
        )
    columns = ["MPI", "Size", "its Allreduce", "farandole through it", "algorithm", "ratio", "bar"]
    named = versions(row for row in rows if row["peer"] in _MPIS)
    return f"p50 in µs; {named}.\n\n{table(columns, cells)}"
