"""This process' place in its world: by init()'s arguments, else by its environment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from farandole import _hosts, _place
from farandole._core import InvalidArgument, RendezvousError
from farandole._launchers import PlaceError


@dataclass(frozen=True)
class Place:
    """Where this process stands among the ranks of its job."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    job: str
    among: _hosts.Among | None = None  # of a world of some ranks
    named: str = ""  # the job, as its ranks on all hosts call it, where they know
    hint: _hosts.Hint | None = None  # where nobody has said how many ranks this host has


def find_place(
    rank: int | None,
    size: int | None,
    local_rank: int | None,
    local_size: int | None,
    epoch: int,
) -> Place:
    """`epoch`: how many worlds this process has joined before.

    Raises:
        RendezvousError: it is said by halves, or by two launchers that disagree; or there is no
            such rank.
    """
    try:
        found = _told(rank, size)
        whole_rank, whole_size = _rank_and_size(found, rank, size)
        job = _place.job_name(found.launcher, whole_size, epoch, os.environ)
        named = _place.common_id(found.launcher, os.environ)
    except PlaceError as error:
        raise RendezvousError(str(error)) from None
    hint = None
    if rank is None and size is None:
        local_rank = found.local_rank if local_rank is None else local_rank
        local_size = found.local_size if local_size is None else local_size
        if local_size is None and whole_size > 1:
            hint = _hosts.Hint(found, whole_rank, whole_size)
    local_rank = whole_rank if local_rank is None else local_rank
    local_size = whole_size if local_size is None else local_size
    return Place(
        whole_rank, whole_size, local_rank, local_size, 0, 1, job, named=named, hint=hint
    )  # fmt: skip


def _told(rank: int | None, size: int | None) -> _place.Found:
    """Where the arguments say all, launchers may contradict each other: they only name the job."""
    if rank is None or size is None:
        return _place.find(os.environ)
    return _place.Found(next(iter(_place.seen(os.environ)), None))


def _rank_and_size(found: _place.Found, rank: int | None, size: int | None) -> tuple[int, int]:
    found = found._replace(
        rank=found.rank if rank is None else rank, size=found.size if size is None else size
    )
    if found.rank is None and found.size is None:
        return 0, 1
    if found.rank is None or found.size is None:
        raise RendezvousError(_place.half_said(found))
    if found.size < 1 or not 0 <= found.rank < found.size:
        raise RendezvousError(f"rank {found.rank} does not exist in a world of {found.size}")
    return found.rank, found.size


def narrowed(place: Place, ranks: Sequence[int], times: int) -> Place:
    """The same process in a world of some of the job's ranks, in the order in which they stand.
    `times`: how many worlds of these it has joined before.

    Raises:
        InvalidArgument: `ranks` are not different ranks of the job, or this one is not among them.
    """
    chosen = list(ranks)
    strange = [r for r in chosen if not isinstance(r, int) or not 0 <= r < place.size]
    if strange or not chosen or len(set(chosen)) < len(chosen):
        raise InvalidArgument(
            f"ranks={chosen} are not different ranks of the {place.size} that were started"
        )
    if place.rank not in chosen:
        raise InvalidArgument(f"rank {place.rank} calls init(ranks={chosen}) and is not among them")
    here, count = chosen.index(place.rank), len(chosen)
    which = f"{','.join(map(str, chosen))}:{times}"
    among = _hosts.Among(place.rank, place.size, which)
    on_one_host = place.local_size == place.size
    local = (here, count) if on_one_host else (0, 0)  # the ranks will find out
    return Place(here, count, *local, 0, 1, f"{place.job}:{which}", among, place.named, place.hint)
