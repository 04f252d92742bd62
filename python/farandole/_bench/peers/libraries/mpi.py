"""Every MPI, through mpi4py; which one, the launcher's environment says (MPI4PY_LIBMPI)."""

from __future__ import annotations

import re
from functools import partial
from typing import Any, NamedTuple

from farandole._bench import placement
from farandole._bench.layouts import COLLECTIVES, ROOT, Buffers
from farandole._bench.peers.libraries import Member, Unable, launched

HALVES = ("float16", "bfloat16")  # of which the standard knows neither


class World(NamedTuple):
    """MPI's, and mpi4py's module for it."""

    mpi: Any
    rank: int
    ranks: int
    version: str


def world() -> World:
    rank, ranks = launched()
    placement.pin(rank, ranks)
    from mpi4py import MPI

    known = MPI.COMM_WORLD.Get_size()
    if known != ranks:
        raise RuntimeError(f"its launcher started {ranks} ranks, MPI knows {known}")
    found = re.search(r"\d+(\.\d+)+", MPI.Get_library_version())
    return World(MPI, rank, ranks, found[0] if found else "")


def join() -> Member:
    mpi, rank, ranks, version = world()

    def make(ask: dict[str, Any]) -> Buffers:
        if ask["dtype"] in HALVES and COLLECTIVES[ask["collective"]].folds:
            raise Unable(f"the MPI standard has no arithmetic on {ask['dtype']}")
        return _MpiCase(mpi, ask, rank, ranks)

    return Member(rank, ranks, version, make)


class _MpiCase(Buffers):
    def __init__(self, mpi: Any, ask: dict[str, Any], rank: int, ranks: int) -> None:
        super().__init__(COLLECTIVES[ask["collective"]], ask["bytes"], ask["dtype"], rank, ranks)
        source, result = self.input, self.output
        if ask["dtype"] in HALVES:  # moved as any two bytes
            source, result = (None if a is None else a.view("uint16") for a in (source, result))
        known = {"in place": mpi.IN_PLACE, "input": source, "output": result}
        known |= {"sum": mpi.SUM, "root": ROOT}
        method, *arguments = _CALLS[ask["collective"]]
        call = getattr(mpi.COMM_WORLD, method)
        self.call = partial(call, *(known[name] for name in arguments))


_CALLS = {  # method and what it takes
    "all_reduce": ("Allreduce", "in place", "output"),
    "broadcast": ("Bcast", "output", "root"),
    "all_gather": ("Allgather", "input", "output"),
    "reduce_scatter": ("Reduce_scatter_block", "input", "output"),
    "reduce": ("Reduce", "input", "output", "sum", "root"),
    "gather": ("Gather", "input", "output", "root"),
    "scatter": ("Scatter", "input", "output", "root"),
    "all_to_all": ("Alltoall", "input", "output"),
}
