"""The world this process belongs to: how it was started, init and shutdown, groups of ranks."""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from dataclasses import dataclass

from farandole import _core
from farandole._core import InvalidArgument, NotInitialized, RendezvousError

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


@dataclass(frozen=True)
class _Place:
    """Where this process stands among the ranks of its job."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    job: str


class _State:
    """The one default world of the process."""

    place: _Place | None = None
    group: Group | None = None
    epoch: int = 0  # how many worlds this process has joined


_state = _State()


def _number(name: str, default: int | None = None) -> int | None:
    text = os.environ.get(name)
    if text is None or text == "":
        return default
    try:
        return int(text)
    except ValueError:
        raise RendezvousError(
            f"the environment says {name}={text}, which is not a number"
        ) from None


def _first(*names: str) -> str:
    return next((os.environ[n] for n in names if os.environ.get(n)), "")


def _find_place(
    rank: int | None, size: int | None, local_rank: int | None, local_size: int | None
) -> _Place:
    """From the arguments, else from what the launcher put into the environment."""
    found_rank = rank if rank is not None else _number("RANK")
    found_size = size if size is not None else _number("WORLD_SIZE")
    if (found_rank is None) != (found_size is None):
        given, lacking = ("RANK", "WORLD_SIZE") if found_size is None else ("WORLD_SIZE", "RANK")
        raise RendezvousError(f"{given} is given, but {lacking} is not")
    if found_rank is None or found_size is None:
        found_rank, found_size = 0, 1
    if found_size < 1 or not 0 <= found_rank < found_size:
        raise RendezvousError(f"rank {found_rank} does not exist in a world of {found_size}")
    if rank is None and size is None:
        local_rank = local_rank if local_rank is not None else _number("LOCAL_RANK")
        local_size = local_size if local_size is not None else _number("LOCAL_WORLD_SIZE")
    found_local = local_rank if local_rank is not None else found_rank
    found_locals = local_size if local_size is not None else found_size
    if found_locals != found_size:
        raise RendezvousError(
            f"{found_size} ranks, {found_locals} of them on this host: "
            "worlds of more than one host are not supported yet"
        )
    job = ":".join(
        [
            _first("MASTER_ADDR") or "127.0.0.1",
            _first("MASTER_PORT") or "0",
            str(found_size),
            _first("FARANDOLE_RUN_ID", "TORCHELASTIC_RUN_ID"),
            _first("FARANDOLE_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"),
            str(_state.epoch),
        ]
    )
    return _Place(found_rank, found_size, found_local, found_locals, 0, 1, job)


def init(
    rank: int | None = None,
    size: int | None = None,
    *,
    local_rank: int | None = None,
    local_size: int | None = None,
    job: str | None = None,
    timeout: float | None = None,
) -> None:
    """Joins the other ranks of the job; a second call without ``shutdown()`` does nothing.

    Without arguments the place of this process comes from ``RANK``, ``WORLD_SIZE``,
    ``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT``, as ``farandole run``, torchrun and others
    set them. A program started with none of these is a world of size 1.

    Args:
        rank, size: this process' rank and the number of ranks.
        local_rank, local_size: the same within this host.
        job: a name that the ranks of this job share and no other job has; default: from the
            environment.
        timeout: seconds to wait for the other ranks; default ``FARANDOLE_START_TIMEOUT``.

    Raises:
        RendezvousError: ranks are missing, duplicate, or disagree about the world.
        VersionMismatch: another rank runs another version of farandole.

    Example:
        >>> import farandole as fd
        >>> fd.init()
        >>> fd.size()
        1
    """
    if is_initialized() and not _core.in_child():
        return
    place = _find_place(rank, size, local_rank, local_size)
    name = f"{job}:{_state.epoch}" if job is not None else place.job
    _state.group = _core.open_world(place.rank, place.size, name, timeout)
    _state.place = place
    _state.epoch += 1


def shutdown() -> None:
    """Leaves the world. Operations in flight fail, here and on the ranks that wait for this one.

    ``init()`` may be called again afterwards.
    """
    group, _state.group, _state.place = _state.group, None, None
    if group is not None and not _core.in_child():
        group.leave()


def _leave_at_exit() -> None:
    """Peers that wait for a rank which ends by an exception learn what it was."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    group = _state.group
    if error is not None and group is not None and not hasattr(sys, "ps1") and not _core.in_child():
        frames = traceback.extract_tb(error.__traceback__)
        place = f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else ""
        text = "".join(traceback.format_exception_only(type(error), error)).strip()
        group.report_exception(text.partition("\n")[0], place)
    shutdown()


atexit.register(_leave_at_exit)


def is_initialized() -> bool:
    """Whether this process has joined a world."""
    return _state.group is not None


def _place() -> _Place:
    if _state.place is None:
        raise NotInitialized("farandole has not been initialized; call farandole.init() first")
    return _state.place


def world() -> Group:
    """The group of all ranks."""
    if _state.group is None:
        raise NotInitialized("farandole has not been initialized; call farandole.init() first")
    return _state.group


def current() -> Group | None:
    """The group of all ranks; None while this process has not joined a world."""
    return _state.group


def rank() -> int:
    """This process' rank, from 0."""
    return _place().rank


def size() -> int:
    """The number of ranks."""
    return _place().size


def local_rank() -> int:
    """This process' rank among those of its host."""
    return _place().local_rank


def local_size() -> int:
    """The number of ranks on this host."""
    return _place().local_size


def cross_rank() -> int:
    """The number of this host among the job's hosts."""
    return _place().cross_rank


def cross_size() -> int:
    """The number of hosts."""
    return _place().cross_size


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
