"""mpi4py's side of MPI: whose communicator it is, how its ranks meet, and what the core needs to
know of an MPI that it was not built with. mpi4py is imported when a world is over MPI, not before.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from farandole import _core
from farandole._core import Error, InvalidArgument, RendezvousError
from farandole._store import Met, line, name_of
from farandole._words import type_of

Words = dict[str, Any]
Check = Callable[[list[Words]], str | None]

_TOLD, _ANSWERED, _LATER = (
    1,
    2,
    3,
)  # tags of words, in our communicator; the core has one of its own
_GRACE = 4.0  # seconds that rank 0 may need after its deadline to say what is wrong
_GIVE_WAY = 1.0  # seconds
_LOOK = 0.001

# By MPI's level: what the core calls the threads that may call it.
_THREADS = {
    "MPI_THREAD_SINGLE": "funneled", "MPI_THREAD_FUNNELED": "funneled",
    "MPI_THREAD_SERIALIZED": "serialized", "MPI_THREAD_MULTIPLE": "multiple",
}  # fmt: skip
# What MPI calls what it folds itself: halves and booleans it has not, or not everywhere.
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

_found: dict[str, Any] = {}  # the module, the key of our duplicate, the core's binding


@dataclass(frozen=True)
class Ranks:
    """Those of a communicator, which become the ranks of a world."""

    given: Any  # the program's communicator
    rank: int
    size: int


def is_forced() -> bool:
    """Whether FARANDOLE_TRANSPORT says that all data go over MPI."""
    return os.environ.get("FARANDOLE_TRANSPORT") == "mpi"


def ranks_of(comm: Any) -> Ranks:
    """Those of an mpi4py communicator.

    Raises:
        InvalidArgument: it is none, or this process is not in it.
        RendezvousError: MPI does not run.
    """
    mpi = sys.modules.get("mpi4py.MPI")  # who has one of its communicators has imported it
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
    """Those of MPI_COMM_WORLD, where all data are to go over MPI."""
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


# ---- how its ranks meet ----


@contextmanager
def meeting(ranks: Ranks | None) -> Iterator[None]:
    """Where this rank fails alone, others will not come to MPI_Finalize, or not with it: then this
    process does not wait there. Another meeting takes another duplicate of the communicator."""
    try:
        yield
    except BaseException as error:
        if ranks is not None:
            _binding()
            why = error.verdict if isinstance(error, Error) else repr(error)
            _core.abandon_mpi(f"its ranks did not meet: {why}")
            if "key" in _found and ranks.given.Get_attr(_found["key"]) is not None:
                ranks.given.Delete_attr(_found["key"])
        raise


class _Line:
    """The line that stays while ranks connect to each other (_store/line.py). A rank that fails
    calls nothing of MPI any more but for these words."""

    def __init__(self, ours: Any, table: list[Words], rank: int, until: float) -> None:
        self._ours = ours
        self._names = [name_of(words) for words in table]
        self._rank = rank
        self._until = until
        self._others = range(1, len(table)) if rank == 0 else [0]
        self._awaited = set(self._others)  # that have not said yet that they are connected
        self._over = False

    def look(self) -> None:
        while not self._over and (words := _next(self._ours, None, _LATER, 0)) is not None:
            self._awaited.discard(words["rank"])
            if why := words["failed"]:
                if self._rank == 0:
                    why = line.failed(self._names[words["rank"]], why)
                    self._tell(why)
                self._over = True
                raise RendezvousError(why)

    def fail(self, why: str) -> None:
        if self._over:
            return
        self._tell(line.failed(self._names[0], why) if self._rank == 0 else why)
        self._over = True

    def end(self) -> None:
        if self._rank != 0:
            self._tell("")
        while self._awaited:
            self.look()
            if self._awaited and time.monotonic() >= self._until:
                why = line.is_silent(sorted(self._awaited))
                self.fail(why)
                raise RendezvousError(why)
            time.sleep(_LOOK)
        if self._rank == 0:
            self._tell("")
        self._over = True

    def _tell(self, why: str) -> None:
        words = {"rank": self._rank, "failed": why}
        until = time.monotonic() + _GRACE
        for telling in [_begin(self._ours, words, rank, _LATER) for rank in self._others]:
            with suppress(RendezvousError):  # it may have ended
                _finish(telling, until, "a rank does not take this one's word")


def exchange(ranks: Ranks, mine: Words, check: Check, until: float) -> Met:
    """Every rank's words, by rank. Rank 0 refuses all of them for what ``check`` says.

    Args:
        until: when to give up (time.monotonic).

    Raises:
        RendezvousError: ranks do not come, or ``check`` refuses.
    """
    with meeting(ranks):
        _binding()  # whoever has met watches for the end of MPI
        ours = _own(ranks, until)
        if ranks.rank == 0:
            answer = _gather(ours, ranks.size, mine, check, until)
        else:
            _finish(_begin(ours, mine, 0, _TOLD), until, "rank 0 does not take this rank's words")
            answer = _next(ours, 0, _ANSWERED, until + _GRACE) or {"missing": [0]}
        if missing := answer["missing"]:
            raise RendezvousError(
                f"ranks {', '.join(map(str, missing))} of the communicator did not come in time; "
                "look at their logs"
            )
    if answer["refused"]:
        raise RendezvousError(answer["refused"])
    until += _GRACE if ranks.rank == 0 else 2 * _GRACE  # rank 0 says who is late
    return Met(answer["ranks"], _Line(ours, answer["ranks"], ranks.rank, until))


def _gather(ours: Any, size: int, mine: Words, check: Check, until: float) -> Words:
    told = {0: mine}
    while len(told) < size and (words := _next(ours, None, _TOLD, until)) is not None:
        told[words["rank"]] = words
    table = [words for _, words in sorted(told.items())]
    missing = [r for r in range(size) if r not in told]
    answer = {
        "missing": missing, "refused": None if missing else check(table), "ranks": table
    }  # fmt: skip
    for answering in [_begin(ours, answer, r, _ANSWERED) for r in told if r != 0]:
        _finish(answering, until + _GRACE, "a rank does not take what rank 0 has found")
    return answer


def _begin(ours: Any, words: Words, rank: int, tag: int) -> Any:
    """Sends them as text: what others say is never unpickled."""
    return ours.Isend([json.dumps(words).encode(), _found["module"].BYTE], rank, tag)


def _next(ours: Any, source: int | None, tag: int, until: float) -> Words | None:
    """The next words of that rank, or of any; None at the deadline."""
    mpi = _found["module"]
    status = mpi.Status()
    while True:
        message = ours.Improbe(mpi.ANY_SOURCE if source is None else source, tag, status)
        if message is not None:
            text = bytearray(status.Get_count(mpi.BYTE))
            message.Recv([text, mpi.BYTE])
            words: Words = json.loads(text)
            return words
        if time.monotonic() >= until:
            return None
        time.sleep(_LOOK)


def _finish(request: Any, until: float, what: str) -> None:
    """Waits without giving up the chance to be interrupted."""
    while not request.Test():
        if time.monotonic() >= until:
            raise RendezvousError(what)
        time.sleep(_LOOK)


def _own(ranks: Ranks, until: float) -> Any:
    """A duplicate that nobody else uses, made once: kept with the communicator."""
    mpi = _found["module"]
    if "key" not in _found:
        _found["key"] = mpi.Comm.Create_keyval()
    ours = ranks.given.Get_attr(_found["key"])
    if ours is None:
        ours, duplicating = ranks.given.Idup()
        what = f"not all {ranks.size} ranks of the communicator called init() in time"
        _finish(duplicating, until, what)
        ours.Set_errhandler(mpi.ERRORS_RETURN)
        ranks.given.Set_attr(_found["key"], ours)
    return ours


# ---- what the core needs to know ----


def threads() -> Words:
    """Which threads of this process may call MPI, for the other ranks."""
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


def why_not(table: list[Words]) -> str | None:
    """Why data cannot go over MPI, if so, by what ranks say of their `threads()`."""
    for words in table:
        if words["threads"] == "funneled" and not words["of MPI"]:
            return (
                f"{name_of(words)} called init() on "
                "another thread than the one that initialized MPI, which alone may call it; "
                "initialize MPI with MPI_THREAD_MULTIPLE (mpi4py's default)"
            )
    return None


def open_port(ranks: Ranks, world: int) -> _core.MpiPort:
    """What data go over. ``world``: the same on all ranks, and another one each time."""
    ours = ranks.given.Get_attr(_found["key"])
    handle = _handle(ours)
    level = threads()["threads"]
    return _core.MpiPort(_binding(), handle, ranks.rank, ranks.size, world, level)


def _binding() -> _core.MpiBinding:
    if "binding" not in _found:
        mpi = _found["module"]
        _found["binding"] = _core.MpiBinding(
            module=mpi.__file__,
            handle_bytes=mpi._sizeof(mpi.Comm),
            status_bytes=mpi._sizeof(mpi.Status),
            byte=_handle(mpi.BYTE),
            comm_self=_handle(mpi.COMM_SELF),
            comm_world=_handle(mpi.COMM_WORLD),
            errors_return=_handle(mpi.ERRORS_RETURN),
            in_place=int(mpi.IN_PLACE) & (2**64 - 1),
            dtypes={
                ours: _handle(getattr(mpi, theirs))
                for ours, theirs in _DTYPES.items()
                if getattr(mpi, theirs) != mpi.DATATYPE_NULL
            },
            ops={ours: _handle(getattr(mpi, theirs)) for ours, theirs in _OPS.items()},
        )
    binding: _core.MpiBinding = _found["binding"]
    return binding


def _handle(of: Any) -> int:
    return int(_found["module"]._handleof(of)) & (2**64 - 1)


def end_at_exit(joined: bool) -> bool:
    """Whether MPI is ours to end, as exit() will do: by MPI_Abort if this process is `joined` to a
    world, or that has failed, and its exit code is not 0."""
    ours: bool = _found.pop("is ours to end", False)
    if ours:
        _core.end_mpi_at_exit(_binding(), joined)
    return ours


def give_way() -> None:
    """At the end: to the rank that is the cause, whose exit code mpiexec is to have. It calls
    MPI_Abort with it, as does this one, with its own (or mpi4py does, if it runs the program)."""
    if is_bound() and _core.is_mpi_abandoned_by_another():
        time.sleep(_GIVE_WAY)


def is_bound() -> bool:
    """Whether this process has joined, or tried to join, the ranks of a communicator."""
    return "binding" in _found


# ---- for people ----


def describe() -> dict[str, Any]:
    """What `farandole info` says of the communicator that init() would take, as plain values."""
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
