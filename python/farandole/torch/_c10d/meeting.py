"""How ranks that share a store of torch.distributed become a group of one farandole world.

Each rank posts who it is and reads what the others posted, so all decide alike: ranks that have a
world already stay in it; ranks that have none enter a new one, under a name that the first posted.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from farandole import _core, _endings, _hosts, _meeting, _world
from farandole._core import RendezvousError
from farandole._numerics import is_asked_for
from farandole._tables import listed
from farandole._world import Group

_T = TypeVar("_T")
_log = logging.getLogger("farandole")
_PATIENCE = timedelta(seconds=10)  # then a warning, as of operations that wait
_ADVICE = (
    "\n  advice: call new_group() for the same ranks on each of them; with "
    "use_local_synchronization=True PyTorch finds a group by how many its ranks have made before, "
    "which must be equally many"
)


@dataclass(frozen=True)
class _Post:
    """A rank's description of itself, which it posts for the others."""

    place: str  # where its sockets are: the boot of the kernel, and the network namespace
    world: str | None  # the name of the world it is in
    world_rank: int
    token: int  # the first rank's names the new group, and the new world if there is none
    tells: bool  # it is asked to tell the others of gradients that are not finite


def _my_post() -> _Post:
    place = _world._state.place
    alive = place is not None and not _core.in_child()
    return _Post(
        _hosts.boot_id() + os.readlink("/proc/self/ns/net"),  # noqa: PTH115
        f"{place.job} of {place.size}" if alive and place is not None else None,
        place.rank if alive and place is not None else -1,
        secrets.randbits(62),
        is_asked_for(),
    )


def _exchange(store: Any, rank: int, size: int, mine: _Post, timeout: timedelta) -> list[_Post]:
    until = time.monotonic() + timeout.total_seconds()
    meeting = _meeting.Meeting(
        rank, range(size), until,
        warn=lambda text: _log.warning("%s%s", text, _ADVICE),
        warn_after=_PATIENCE.total_seconds(),
    )  # fmt: skip
    words = _meeting.who(rank, size) | {"post": asdict(mine)}
    try:
        met = _meeting.meet_in(store, "farandole", meeting, words, lambda _: None)
    except RendezvousError as error:
        raise RendezvousError(
            f"the ranks did not make the process group within {timeout.total_seconds():g} s: "
            f"{error.verdict}{_ADVICE}"
        ) from error
    return [_Post(**words["post"]) for words in met.table]


def _differing(posts: list[_Post], what: Callable[[_Post], _T]) -> dict[_T, list[int]]:
    ranks: dict[_T, list[int]] = {}
    for rank, post in enumerate(posts):
        ranks.setdefault(what(post), []).append(rank)
    return ranks


class SeveralWorlds(RendezvousError):
    """Each rank of a group is in a world, and not all in the same."""


def _check(posts: list[_Post]) -> None:
    """Raises the same on every rank when they cannot share a world."""
    worlds = _differing(posts, lambda post: post.world)
    if len(worlds) > 1:
        rows = (f"{listed('rank', r)} in {world or 'none'}" for world, r in worlds.items())
        kind = RendezvousError if None in worlds else SeveralWorlds
        raise kind(
            f"ranks of a process group are in different farandole worlds: {'; '.join(rows)}\n"
            "  advice: call farandole.init() on all ranks before init_process_group, or on none"
        )


class Membership:
    """A group of the engine, made through a store. The last one to leave shuts down the world that
    a meeting entered.

    Attributes:
        name: of the group; no other group's, ever.
        group: of the engine.
        tells: whether its ranks tell each other of gradients that are not finite: all are asked to.
    """

    _entered: Group | None = None  # the world that a meeting entered
    _members = 0  # memberships that keep it

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        posts = _exchange(store, rank, size, _my_post(), timeout)
        _check(posts)
        token = posts[0].token
        self.name = f"farandole-{token:x}"
        self.tells = all(post.tells for post in posts)
        if posts[0].world is None:
            spread = len({post.place for post in posts}) > 1 or _hosts.is_split()
            _world.enter(
                rank, size, self.name, timeout.total_seconds(), store=store if spread else None
            )
            Membership._entered, Membership._members = _world.world(), 0
            ranks = list(range(size))
        else:
            ranks = [post.world_rank for post in posts]
        self._world = _world.world()
        if self._world is Membership._entered:
            Membership._members += 1
        self.group = self._world.form(ranks, token, timeout.total_seconds())

    def leave(self) -> None:
        """Called once. Where ``farandole.init()`` made the world, it stays."""
        entered = self._world is Membership._entered
        is_last = entered and Membership._members == 1
        if is_last and _world._state.group is self._world and not _core.in_child():
            # An exception that is handled now is the cause, and comes before what follows from it.
            _endings.tell_leaving(self._world, _world._state.handled)
        del self.group
        if not entered:
            return
        Membership._members -= 1
        if is_last:
            Membership._entered = None
            if _world._state.group is self._world:
                _world.shutdown()


def meet_beside(group: dist.ProcessGroup, name: str) -> Membership:
    """In a group of a process group's ranks (of any backend), with its own order of operations."""
    store = PrefixStore(name, dist.distributed_c10d._get_process_group_store(group))
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    return Membership(store, rank, size, dist.default_pg_timeout)
