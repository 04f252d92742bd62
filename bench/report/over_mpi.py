"""farandole through an MPI's point-to-point messages, beside the same MPI's own Allreduce.

Two ranks of one host, which its mpiexec has started; FARANDOLE_TRANSPORT=mpi keeps farandole from
its own shared memory. The floor is an all-reduce by the same MPI's bare messages: the same bytes,
and the fold.
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
_OURS, _FLOOR = " farandole", " floor"  # after the name of the MPI that they go through


def measure(bench: Bench) -> list[Row]:
    sizes = [4, bars.MIB] if bench.quick else [4, bars.KIB, 64 * bars.KIB, bars.MIB, 16 * bars.MIB]
    here = bench.found(_MPIS)
    through = [*map(_ours, here), *map(_floor, here)]
    return run(bench, [bench.question("all_reduce", sizes)], _MPIS, (), through)


def _ours(found: Found) -> Found:
    """farandole's ranks, started by that MPI."""
    peer = replace(found.peer, name=found.peer.name + _OURS, library="ours")
    environment = {**found.environment, "FARANDOLE_TRANSPORT": "mpi"}
    return replace(found, peer=peer, environment=environment)


def _floor(found: Found) -> Found:
    return replace(
        found, peer=replace(found.peer, name=found.peer.name + _FLOOR, library="mpi_floor")
    )


def render(rows: list[Row]) -> str:
    cells = []
    for theirs in (row for name in _MPIS for row in select(rows, peer=name)):
        ours = only(rows, peer=theirs["peer"] + _OURS, bytes=theirs["bytes"])
        floor = only(rows, peer=theirs["peer"] + _FLOOR, bytes=theirs["bytes"])
        if ours is None or floor is None:
            continue
        cells.append(
            [
                PEERS[theirs["peer"]].label,
                format_size(theirs["bytes"]),
                time_of(theirs),
                time_of(floor),
                time_of(ours),
                ratio_cell(over(ours, theirs)),
                ratio_cell(over(ours, floor)),
                _judge(ours, theirs, floor),
            ]
        )
    columns = ["MPI", "Size", "its Allreduce", "floor: its messages", "farandole through it"]
    columns += ["farandole / Allreduce", "farandole / floor", "bar"]
    named = versions(row for row in rows if row["peer"] in _MPIS)
    return f"p50 in µs; {named}.\n\n{table(columns, cells)}"


def _judge(ours: Row, theirs: Row, floor: Row) -> str:
    """As between hosts: where its messages leave no room, they are what counts."""
    limit = bars.OVER_MPI.get(theirs["bytes"])
    large = theirs["bytes"] == 16 * bars.MIB
    if large and over(floor, theirs)["ratio"] > bars.MPI_FLOOR_IS_NEAR:
        return f"of the floor {bars.verdict(over(ours, floor), bars.NETWORK_FLOOR)}"
    return bars.verdict(over(ours, theirs), limit)
