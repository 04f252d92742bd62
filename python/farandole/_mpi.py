"""mpi4py's side of MPI: whose communicator it is, how MPI ends, and what the core needs to know of
an MPI that it was not built with. mpi4py is imported when a world is over MPI, not before.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from farandole import _core
from farandole._core import InvalidArgument, RendezvousError
from farandole._meeting import name_of
from farandole._words import type_of

_GIVE_WAY = 1.0  # seconds

# By MPI's level: what the core calls the threads that may call it.
_THREADS = {
    "MPI_THREAD_SINGLE": "funneled", "MPI_THREAD_FUNNELED": "funneled",
    "MPI_THREAD_SERIALIZED": "serialized", "MPI_THREAD_MULTIPLE": "multiple",
}  # fmt: skip
# MPI's names of the dtypes that it folds itself. Not every MPI has halves and booleans.
_DTYPES = {
    "float32": "FLOAT", "float64": "DOUBLE",
    **{f"{sign}int{bits}": f"{sign.upper()}INT{bits}_T" for sign in ("", "u")
       for bits in (8, 16, 32, 64)},
}  # fmt: skip
_OPS = {"sum": "SUM", "mean": "SUM", "min": "MIN", "max": "MAX", "product": "PROD"}
_GO_ON = {
    "funneled": "only while the main thread waits",
    "serialized": "only while a thread waits",
    "multiple": "also while no thread waits",
}

_found: dict[str, Any] = {}  # the module, the core's binding, whether MPI is ours to end


@dataclass(frozen=True)
class Ranks:
    """The ranks of a communicator, which become those of a world."""

    given: Any  # the program's communicator
    rank: int
    size: int


def module() -> Any:
    """mpi4py.MPI, once there are ranks of it."""
    return _found["module"]


def is_forced() -> bool:
    """Whether FARANDOLE_TRANSPORT says that all data go over MPI."""
    return os.environ.get("FARANDOLE_TRANSPORT") == "mpi"


def ranks_of(comm: Any) -> Ranks:
    """The ranks of an mpi4py communicator.

    Raises:
        InvalidArgument: it is none, or this process is not in it.
        RendezvousError: MPI does not run.
    """
    mpi = sys.modules.get("mpi4py.MPI")  # a program that has a communicator has imported it
    if mpi is None or not isinstance(comm, mpi.Comm):
        raise InvalidArgument(
            f"comm is {type_of(comm)}; it is a communicator of mpi4py, such as "
            "MPI.COMM_WORLD (some ranks of a job by number: ranks=)"
        )
    if not mpi.Is_initialized() or mpi.Is_finalized():
        state = "has been finalized" if mpi.Is_initialized() else "is not initialized"
        raise RendezvousError(f"init(comm=…): MPI {state}")
    if comm == mpi.COMM_NULL:
        raise InvalidArgument("comm is MPI.COMM_NULL: this process is in no such communicator")
    if not isinstance(comm, mpi.Intracomm):
        raise InvalidArgument(f"comm is {type_of(comm)}, and not an Intracomm of mpi4py")
    _found["module"] = mpi
    return Ranks(comm, comm.Get_rank(), comm.Get_size())


def all_ranks() -> Ranks:
    """The ranks of MPI_COMM_WORLD, where all data are to go over MPI."""
    try:
        with _ours_to_end():
            mpi = importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:  # the latter where it finds no MPI
        raise RendezvousError(
            f"FARANDOLE_TRANSPORT=mpi takes mpi4py, which cannot be imported: {error}; "
            "pip install mpi4py, and run it over the MPI whose mpiexec starts the ranks"
        ) from error
    return ranks_of(mpi.COMM_WORLD)


@contextmanager
def _ours_to_end() -> Iterator[None]:
    """mpi4py initializes MPI when it is imported first, and ends it before the program's exit code
    is known. Where the program has left both to us, exit() ends it (end_at_exit)."""
    rc = importlib.import_module("mpi4py").rc
    ours = "mpi4py.MPI" not in sys.modules and rc.initialize and rc.finalize is None
    if ours:
        rc.finalize = False
    yield
    if ours:
        _found["is ours to end"] = True


# ---- what the core needs to know ----


def threads() -> dict[str, Any]:
    """The threads of this process that may call MPI, as the other ranks learn it."""
    mpi = _found["module"]
    return {"threads": _THREADS[_level()], "of MPI": bool(mpi.Is_thread_main())}


def _level() -> str:
    """How MPI was initialized. What it promises to a program of one thread is what it promises to
    one thread of a program: others of this process never call it."""
    mpi = _found["module"]
    names = {
        mpi.THREAD_SINGLE: "MPI_THREAD_SINGLE",
        mpi.THREAD_FUNNELED: "MPI_THREAD_FUNNELED",
        mpi.THREAD_SERIALIZED: "MPI_THREAD_SERIALIZED",
        mpi.THREAD_MULTIPLE: "MPI_THREAD_MULTIPLE",
    }
    return names[mpi.Query_thread()]


def why_not(table: list[dict[str, Any]]) -> str | None:
    """Why data cannot go over MPI, if so, by what ranks say of their `threads()`."""
    for words in table:
        if words["threads"] == "funneled" and not words["of MPI"]:
            return (
                f"{name_of(words)} called init() on "
                "another thread than the one that initialized MPI, which alone may call it; "
                "initialize MPI with MPI_THREAD_MULTIPLE (mpi4py's default)"
            )
    return None


def binding() -> _core.MpiBinding:
    """The core's binding to MPI. From now on the end of MPI is watched for."""
    if "binding" not in _found:
        mpi = _found["module"]
        _found["binding"] = _core.MpiBinding(
            module=mpi.__file__,
            handle_bytes=mpi._sizeof(mpi.Comm),
            status_bytes=mpi._sizeof(mpi.Status),
            byte=handle_of(mpi.BYTE),
            comm_self=handle_of(mpi.COMM_SELF),
            comm_world=handle_of(mpi.COMM_WORLD),
            errors_return=handle_of(mpi.ERRORS_RETURN),
            in_place=int(mpi.IN_PLACE) & (2**64 - 1),
            dtypes={
                ours: handle_of(getattr(mpi, theirs))
                for ours, theirs in _DTYPES.items()
                if getattr(mpi, theirs) != mpi.DATATYPE_NULL
            },
            ops={ours: handle_of(getattr(mpi, theirs)) for ours, theirs in _OPS.items()},
        )
    bound: _core.MpiBinding = _found["binding"]
    return bound


def handle_of(of: Any) -> int:
    """The handle of one of mpi4py's objects, as a number."""
    return int(_found["module"]._handleof(of)) & (2**64 - 1)


def end_at_exit(joined: bool) -> bool:
    """Whether MPI is ours to end, as exit() will do: by MPI_Abort if this process is `joined` to a
    world, or that has failed, and its exit code is not 0."""
    ours: bool = _found.pop("is ours to end", False)
    if ours:
        _core.end_mpi_at_exit(binding(), joined)
    return ours


def give_way() -> None:
    """At the end, lets the rank that is the cause call MPI_Abort first: mpiexec is to have its exit
    code. Then this one does, with its own (or mpi4py does, if it runs the program)."""
    if is_bound() and _core.is_mpi_abandoned_by_another():
        time.sleep(_GIVE_WAY)


def is_bound() -> bool:
    """Whether this process has joined, or tried to join, the ranks of a communicator."""
    return "binding" in _found


# ---- for people ----


def describe() -> dict[str, Any]:
    """The facts that `farandole info` shows of the communicator that init() would take."""
    ranks = all_ranks()
    end_at_exit(joined=False)
    mpi = _found["module"]
    mine = threads()
    why = why_not(
        [mine | {"rank": ranks.rank, "pid": os.getpid(), "host": mpi.Get_processor_name()}]
    )
    return {
        "started by": "communicator MPI_COMM_WORLD (FARANDOLE_TRANSPORT=mpi)",
        "rank": ranks.rank,
        "size": ranks.size,
        "library": mpi.Get_library_version().partition("\n")[0].strip(),
        "threads": _level(),
        "data over MPI": f"no: {why}" if why else "yes",
        "operations go on": _GO_ON[mine["threads"]],
    }
