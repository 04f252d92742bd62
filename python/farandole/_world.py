"""The world this process belongs to: how it was started, init and shutdown, groups of ranks."""

from __future__ import annotations

import atexit
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from farandole import _core, _elastic, _endings, _hosts, _meeting, _mpi, _mpi_meeting, _secret
from farandole._arguments import checked, explained, is_text, shown
from farandole._core import (
    Error,
    InvalidArgument,
    LinkError,
    NotInitialized,
    PeerLost,
    RendezvousError,
)
from farandole._launchers import VARIABLES
from farandole._meeting import KeyValueStore
from farandole._meeting.here import meet_here
from farandole._mpi import Ranks
from farandole._watch import Watch
from farandole._world_place import Place, find_place, narrowed

__all__ = [
    "Group",
    "cross_rank",
    "cross_size",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
    "split",
    "world",
]

Group = _core.Group

_MOST_IN_VAIN = 3  # worlds of an elastic job


class _State:
    """The one default world of the process."""

    # Every call asks for the group, and finds a slot sooner than an entry of a dictionary.
    __slots__ = (
        "after_joining", "after_leaving", "before_leaving", "epoch", "group", "handled", "joined",
        "narrowed", "over_mpi", "place", "watch",
    )  # fmt: skip

    def __init__(self) -> None:
        self.after_joining: list[Callable[[], None]] = []
        self.before_leaving: list[Callable[[], None]] = []
        self.after_leaving: list[Callable[[], None]] = []
        self.place: Place | None = None
        self.group: Group | None = None
        self.over_mpi = False  # some of its data
        self.handled = 0  # the identity of the exception that was handled when it joined
        self.watch: Watch | None = None
        self.joined = 0  # how many worlds, of whichever ranks
        self.epoch = 0  # those of all of the job's ranks
        # The same for worlds of some of the job's ranks, by these.
        self.narrowed: Counter[tuple[int, ...]] = Counter()


_state = _State()


def _places_of_nccl() -> tuple[bytes, bytes]:
    from farandole import cuda  # loaded when the first memory of a device is met

    return cuda._places_of_nccl()


_core.look_for_nccl_by(_places_of_nccl)  # here: a rank without a world has no use for it

_READ = ("FARANDOLE_", "HOROVOD_", "TORCHELASTIC_", "MASTER_")


def _refuse_bytes() -> None:
    """Refuses settings that are no text: C++ and its messages would pass them on as they are."""
    for name, value in os.environ.items():
        if (name.startswith(_READ) or name in VARIABLES) and not is_text(value):
            raise InvalidArgument(
                f"the environment says {name}={shown(value)}, which is not text in UTF-8"
            )


@checked
def init(
    rank: int | None = None,
    size: int | None = None,
    *,
    local_rank: int | None = None,
    local_size: int | None = None,
    job: str | None = None,
    timeout: float | None = None,
    ranks: Sequence[int] | None = None,
    agree: str = "",
    comm: Any = None,
) -> None:
    """Joins the other ranks of the job; a second call without ``shutdown()`` does nothing.

    Without arguments the place of this process comes from what its launcher has set: ``farandole
    run``, torchrun, mpiexec, srun and others, or ``RANK`` and ``WORLD_SIZE``. ``farandole info``
    says which one is found. A program started by none of these is a world of size 1.

    Args:
        rank: this process' rank, from 0.
        size: the number of ranks.
        local_rank: this process' rank within its host.
        local_size: the number of ranks on its host.
        job: a name that the ranks of this job share and no other job has; default: from the
            environment.
        timeout: seconds to wait for the other ranks; default ``FARANDOLE_START_TIMEOUT``.
        ranks: only these of the started ranks form the world, numbered in this order; all of them
            call with the same list.
        agree: a word that all ranks must give alike, such as a version of the program's own; at
            most 200 bytes.
        comm: an intracommunicator of mpi4py, whose ranks form the world: all of them call. Between
            hosts their data go over MPI, unless ``FARANDOLE_TRANSPORT`` says otherwise.

    Raises:
        InvalidArgument: an argument is of a wrong type; ``ranks`` are not ranks of the job, or this
            one is not among them; ``comm`` is none, or is given beside another place; a place is
            given in an elastic job.
        RendezvousError: ranks are missing, duplicate, or disagree about the world; or two launchers
            disagree about this process.
        VersionMismatch: another rank runs another version of farandole.
        SystemExit: in an elastic job, whose launcher has no place left for this worker.

    Examples:
        >>> import farandole as fd
        >>> fd.init()
        >>> fd.size()
        1
    """
    if is_initialized() and not _core.in_child():
        return
    _refuse_bytes()
    if timeout is not None and not timeout >= 0:
        raise InvalidArgument(f"init(): timeout is {timeout}; it is a number of seconds, 0 or more")
    if _elastic.is_elastic():
        _elastic.refuse_place(
            rank=rank, size=size, local_rank=local_rank, local_size=local_size, job=job,
            ranks=ranks, comm=comm,
        )  # fmt: skip
        _enter_next(timeout, agree)
        return
    if comm is not None:
        _refuse_beside_comm(
            rank=rank, size=size, local_rank=local_rank, local_size=local_size, job=job, ranks=ranks
        )
        over = _mpi.ranks_of(comm)
        _enter(Place(over.rank, over.size, 0, 0, 0, 1, "comm"), timeout, agree, ranks=over)
        _state.epoch += 1
        return
    place = find_place(rank, size, local_rank, local_size, _state.epoch)
    if place.size == 1 and rank is None and size is None and _mpi.is_forced():
        of_mpi = _mpi.all_ranks()  # started by a launcher that MPI alone knows, or alone
        place = replace(place, rank=of_mpi.rank, size=of_mpi.size)
    if ranks is not None:
        if job is not None:
            raise InvalidArgument("ranks and job are both given; ranks are of the job they are in")
        place = narrowed(place, ranks, _state.narrowed[tuple(ranks)])
    awaited: Sequence[int] = ()
    if rank is None and size is None and job is None:
        awaited = range(place.size) if ranks is None else ranks
    if job is not None:
        place = replace(place, job=job, named=job)
    _enter(place, timeout, agree, awaited)
    if ranks is None:
        _state.epoch += 1
    else:
        _state.narrowed[tuple(ranks)] += 1


def _enter_next(timeout: float | None, agree: str) -> None:
    """Joins the next world of an elastic job. If its ranks cannot meet, since one of them died,
    another world follows. Where it fails for other reasons, this is tried again a few times."""
    in_vain = 0
    while True:
        _elastic.enter_next()
        place = find_place(None, None, None, None, 0)  # the launcher counts worlds, all alike
        try:
            _enter(place, timeout, agree)
            break
        except (RendezvousError, LinkError, PeerLost):
            in_vain += not _elastic.is_broken()
            if in_vain == _MOST_IN_VAIN:
                raise
    _state.epoch += 1


def _refuse_beside_comm(**given: object) -> None:
    for name, value in given.items():
        if value is not None:
            raise InvalidArgument(
                f"comm and {name} are both given; a communicator says who its ranks are (for some "
                "of them: comm.Create_group or comm.Split)"
            )


def enter(
    rank: int, size: int, job: str, timeout: float | None, *, store: KeyValueStore | None = None
) -> None:
    """Joins the ranks that give this job, whatever the environment says: all are on this host,
    unless they give a store in which they meet."""
    local_size = size if store is None else 0
    _enter(Place(rank, size, rank, local_size, 0, 1, job), timeout, store=store)
    _state.epoch += 1


def _enter(
    place: Place,
    timeout: float | None,
    agree: str = "",
    awaited: Sequence[int] = (),
    store: KeyValueStore | None = None,
    ranks: Ranks | None = None,
) -> None:
    """`awaited`: the world's ranks, as the launcher numbered them; none where nobody knows.
    `ranks`: those of a communicator, where the world is one."""
    if ranks is None and _mpi.is_forced() and place.size > 1:
        ranks = _all_of_mpi(place)
    table = _table(place)
    _endings.tell_meeting(awaited)
    try:
        place, table, elsewhere = _found(place, timeout, table, agree, store, ranks)
        with _mpi_meeting.abandoning(ranks):
            group = _opened(place, timeout, table, agree, elsewhere)
    except Error as error:
        _endings.tell_no_meeting(error)
        raise
    finally:
        _endings.tell_met()
    _state.group = group
    _state.place = place
    _state.joined += 1
    _state.over_mpi = elsewhere is not None and elsewhere.port is not None
    _state.handled = id(sys.exc_info()[1])
    _endings.watch(current)
    _state.watch = Watch(_state.group) if place.size > 1 else None
    if os.environ.get("FARANDOLE_TIMELINE") or os.environ.get("HOROVOD_TIMELINE"):
        from farandole._trace import timeline

        timeline.start_as_asked(group)
    is_first = _state.epoch == 0 or _elastic.is_elastic()  # there: of its folder
    if (traced := os.environ.get("FARANDOLE_TRACE")) and place.rank == 0 and is_first:
        from farandole import _trace

        with suppress(_trace.TraceError):  # that it cannot be written is said already
            _trace.announce(Path(traced) / _trace.MERGED, place.size)
    for act in _state.after_joining:
        act()


def _opened(
    place: Place, timeout: float | None, table: str, agree: str, elsewhere: _hosts.Measured | None
) -> Group:
    """Opens the group. If it fails on one rank, raises the error of that one on every rank."""
    _secret.show_libcrypto()
    if elsewhere is None:
        _core.prepare_world(place.rank, place.size)
        look = partial(_look, place.hint)
        if place.size == 1:
            return _core.open_world(place.rank, [], None, place.job, timeout, table, look=look)
        return _joined(place, timeout, table, agree, None, look)
    line = elsewhere.line
    with _meeting.told(line):
        _core.prepare_world(place.rank, place.size)
        group = _joined(place, timeout, table, agree, elsewhere, partial(_look, line))
        try:
            line.end(_elastic.look)
        except BaseException:
            group.leave()
            raise
    return group


def _joined(
    place: Place, timeout: float | None, table: str, agree: str, elsewhere: _hosts.Measured | None,
    look: Callable[[], None],
) -> Group:  # fmt: skip
    """Once those of this host have met, too."""
    several = elsewhere if elsewhere is not None and elsewhere.cross_size > 1 else None
    ranks: Sequence[int] = range(place.size)
    job, port = place.job, None if elsewhere is None else elsewhere.port
    if several is not None:
        name = several.hosts[place.rank]
        ranks, job = [r for r in ranks if several.hosts[r] == name], f"{job}:host {name}"
    mine = _meeting.who(place.rank, place.size) | _meeting.alike(agree) | {"tuning": table}
    secret = None if several is None else several.secret
    meeting = _hosts.started(place.rank, ranks, timeout, look=look)
    here = meet_here(replace(meeting, secret=b""), job, place.size, mine, secret)
    tuning = here.table[0]["tuning"]
    if several is None:
        peers, listeners = here.peers(here.table, ["local"] * place.size), None
    else:
        peers = here.peers(several.table, several.hosts)
        listeners = [each.detach() for each in several.listeners]
    table_of_all = here.table if several is None else several.table
    _endings.know_processes([words["pid"] for words in table_of_all])
    return _core.open_world(
        place.rank, peers, here.memory, place.job, timeout, tuning, listeners, port, look
    )


def _look(line: _meeting.Line | _hosts.Hint | None) -> None:
    """Raises the error that another rank has met with, while ranks meet and connect."""
    if line is not None:
        line.look()
    _elastic.look()


def _all_of_mpi(place: Place) -> Ranks:
    """The ranks of MPI_COMM_WORLD, for a world whose ranks somebody else has numbered."""
    ranks = _mpi.all_ranks()
    if (ranks.rank, ranks.size) != (place.rank, place.size):
        raise RendezvousError(
            f"FARANDOLE_TRANSPORT=mpi, and this process is rank {place.rank} of {place.size}, but "
            f"rank {ranks.rank} of {ranks.size} in MPI_COMM_WORLD; start the ranks by mpiexec, and "
            "give init() the communicator of those that form a world"
        )
    return ranks


def _found(
    place: Place, timeout: float | None, table: str, agree: str, store: KeyValueStore | None,
    ranks: Ranks | None,
) -> tuple[Place, str, _hosts.Measured | None]:  # fmt: skip
    """Where ranks may be on several hosts: who shares one, as they find it themselves."""
    on_one_host = ranks is None and place.local_size == place.size and not _hosts.is_split()
    if place.size == 1:
        return replace(place, local_rank=0, local_size=1), table, None
    if on_one_host:
        return place, table, None
    measured = _hosts.meet(
        place.rank, place.size, place.job, *_hosts.master(), timeout, table, agree,
        store, ranks, place.among, place.named,
    )  # fmt: skip
    place = replace(
        place,
        job=measured.job,
        local_rank=measured.local_rank,
        local_size=measured.local_size,
        cross_rank=measured.cross_rank,
        cross_size=measured.cross_size,
    )
    return place, measured.tuning, measured


def _table(place: Place) -> str:
    """The tuning table: rank 0's, which it hands to all. One rank alone has little to choose."""
    if place.rank != 0 or place.size == 1 or os.environ.get("FARANDOLE_TUNING") == "off":
        return ""
    from farandole._tune import table

    return table.for_world(place.size)


def after_joining(act: Callable[[], None]) -> None:
    """Whenever this process has joined a world, `act` is called."""
    _state.after_joining.append(act)


def before_leaving(act: Callable[[], None]) -> None:
    """Whenever this process leaves a world by itself, `act` is called first."""
    _state.before_leaving.append(act)


def after_leaving(act: Callable[[], None]) -> None:
    """Whenever this process has left a world by itself, `act` is called."""
    _state.after_leaving.append(act)


def shutdown() -> None:
    """Leaves the world. Operations in flight fail, here and on the ranks that wait for this one.

    ``init()`` may be called again afterwards.
    """
    if _state.group is not None and not _core.in_child():
        _endings.tell_leaving(_state.group, _state.handled)
        for act in _state.before_leaving:
            act()
    if "farandole._trace.timeline" in sys.modules and is_initialized() and not _core.in_child():
        sys.modules["farandole._trace.timeline"].finish()
    group, _state.group, _state.place = _state.group, None, None
    watch, _state.watch = _state.watch, None
    if group is not None and not _core.in_child():
        group.leave()
        if watch is not None:
            watch.end()
        for act in _state.after_leaving:
            act()


def _leave_at_exit() -> None:
    """Peers that wait for a rank which ends learn why."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is not None:  # where somebody replaced our hook
        _endings.tell_exception(_state.group, error)
    if not _core.in_child():
        # mpi4py calls MPI_Finalize before the exit code is known, and that waits for the others.
        knows_its_code = _mpi.end_at_exit(_state.group is not None) or not _mpi.is_bound()
        if _state.group is not None and knows_its_code:
            _endings.tell_end(_state.group)
    shutdown()
    if not _core.in_child():
        _core.drop_trace_file()
        _mpi.give_way()


atexit.register(_leave_at_exit)


def is_initialized() -> bool:
    """Whether this process has joined a world."""
    return _state.group is not None


def _here() -> Place:
    if _state.place is None:
        raise NotInitialized("farandole has not been initialized; call farandole.init() first")
    return _state.place


def job() -> str:
    """The name of this world's job. Between hosts it is another one each time."""
    return _here().job


def world() -> Group:
    """The group of all ranks."""
    if _state.group is None:
        raise NotInitialized("farandole has not been initialized; call farandole.init() first")
    return _state.group


def current() -> Group | None:
    """The group of all ranks; None while this process has not joined a world."""
    return _state.group


def epoch() -> int:
    """How many worlds this process has joined: what belongs to one is of no use in another."""
    return _state.joined


def is_over_mpi() -> bool:
    """Whether data of the world that this process is in go over MPI."""
    return is_initialized() and _state.over_mpi


def rank() -> int:
    """This process' rank, from 0."""
    return _here().rank


def size() -> int:
    """The number of ranks."""
    return _here().size


def local_rank() -> int:
    """This process' rank among those of its host."""
    return _here().local_rank


def local_size() -> int:
    """The number of ranks on this host."""
    return _here().local_size


def cross_rank() -> int:
    """The number of this host among the job's hosts."""
    return _here().cross_rank


def cross_size() -> int:
    """The number of hosts."""
    return _here().cross_size


@explained
def split(color: int | None, key: int = 0, *, group: Group | None = None) -> Group | None:
    """Splits a group: ranks that give the same color form a group, ordered by key, then rank.

    Collective: every rank of ``group`` (default: all) calls it. A rank that gives ``None`` joins
    no group and gets ``None``.

    Raises:
        InvalidArgument: a negative color.
    """
    if color is not None and color < 0:
        raise InvalidArgument(f"color {color} is negative; use None to join no group")
    return (group or world()).split(-1 if color is None else color, key)
