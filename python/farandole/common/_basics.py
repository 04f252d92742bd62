"""Ranks, sizes and features of the build: the functions that all of Horovod's modules have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from farandole import _core, _world
from farandole._arguments import explained, type_of
from farandole._core import InvalidArgument, Mismatch, RendezvousError
from farandole._timeline import start_timeline, stop_timeline
from farandole._world import (
    cross_rank,
    cross_size,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from farandole.common._process_set import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from farandole.common._reduction import Adasum, Average, Max, Min, Product, Sum
from farandole.common.exceptions import HorovodInternalError
from farandole.common.util import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    mpi_built,
    nccl_built,
    rocm_built,
)

__all__ = [
    "Adasum",
    "Average",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]


_HAS_SETS = "process sets"


@explained
def init(comm: Any = None, process_sets: Iterable[Any] | str | None = None, **place: Any) -> None:
    """Joins the other ranks of the job; a second call without ``shutdown()`` does nothing.

    Args:
        comm: None, all ranks that were started; or a list of some of them, which then are the world
            and are numbered by their places in the list, and each of them calls with the same list;
            or an mpi4py communicator of those that form the world.
        process_sets: sets of ranks to register, alike on all ranks, as by ``add_process_set``; or
            "dynamic" (Horovod's word for what is always possible here).
        place: the keywords of ``farandole.init``.

    Raises:
        ValueError: ``comm`` is neither a list of ranks with this one in it nor a communicator; on
            every rank:
            ``process_sets`` differ, some rank has none, or there are equals among them.
        RendezvousError: ranks are missing, duplicate, or disagree about the world.

    Examples:
        >>> import farandole.torch as hvd
        >>> hvd.init()
        >>> hvd.rank(), hvd.size()
        (0, 1)
    """
    if is_initialized() and not _core.in_child():
        return
    sets = _sets_of(process_sets)
    if sets:
        place["agree"] = ", ".join(filter(None, [_HAS_SETS, place.get("agree")]))
    try:
        if comm is None:
            _world.init(**place)
        elif hasattr(comm, "Get_rank"):
            _world.init(comm=comm, **place)
        else:
            _world.init(ranks=_ranks_of(comm), **place)
    except RendezvousError as error:
        if str(error).count(_HAS_SETS) != 1:  # in the settings of all, or of none
            raise
        raise InvalidArgument(f"ranks disagree on process_sets: {error}") from error
    try:
        _register(sets)
    except BaseException:
        _world.shutdown()
        raise


def _ranks_of(comm: Any) -> Sequence[int]:
    if isinstance(comm, str) or not isinstance(comm, Sequence):
        raise InvalidArgument(
            f"comm is {type_of(comm)}; it is None, a list of ranks or a communicator of mpi4py"
        )
    return comm


def _sets_of(process_sets: Iterable[Any] | str | None) -> list[ProcessSet]:
    if process_sets is None or process_sets == "dynamic":
        return []
    if isinstance(process_sets, str):
        raise InvalidArgument(
            f"process_sets is {process_sets!r}; the only word for it is 'dynamic'"
        )
    sets = list(process_sets)
    if not all(isinstance(each, ProcessSet) for each in sets):
        raise InvalidArgument(f"process_sets is {sets}; it is a list of ProcessSet")
    return sets


def _register(sets: list[ProcessSet]) -> None:
    if not sets:
        return
    listed = [each.ranks for each in sets]
    try:  # first of all: of lists of different lengths one would wait for the other
        _world.world().barrier(name=f"init(process_sets={listed})")
    except Mismatch as error:
        raise InvalidArgument(f"ranks disagree on process_sets: {error}") from error
    for each in sets:
        add_process_set(each)


def is_homogeneous() -> bool:
    """Whether every host has equally many ranks: true of one host."""
    return rank() < size()  # raises before init(), as Horovod does


def mpi_enabled() -> bool:
    """Whether MPI carries operations of this process."""
    return _world.is_over_mpi()


def gloo_enabled() -> bool:
    """Whether Gloo carries operations of this process: farandole has transports of its own."""
    return False


def mpi_threads_supported() -> bool:
    """Whether MPI may be called from several threads.

    Raises:
        ValueError: MPI is not used.
    """
    if _world.is_over_mpi():
        return True  # else init() would not have taken it
    raise InvalidArgument("MPI is not used, so there is no answer to mpi_threads_supported()")
