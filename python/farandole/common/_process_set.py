"""Sets of ranks that have operations of their own."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

from farandole import _core, _world
from farandole._arguments import KINDS, explained, one_of, shown
from farandole._core import InvalidArgument


class ProcessSet:
    """Some of the ranks of the world. An operation on it concerns its members alone; roots stay
    ranks of the world.

    Args:
        ranks_or_comm: the ranks, in any order.

    A set can be used once every rank of the world has registered it with ``add_process_set``, and
    until the world ends.
    """

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        try:
            ranks = sorted(operator.index(rank) for rank in ranks_or_comm)
        except TypeError:
            raise InvalidArgument(
                f"ProcessSet({shown(ranks_or_comm)}): pass a list of ranks; communicators of MPI "
                "are not supported yet"
            ) from None
        if not ranks or ranks[0] < 0 or len(set(ranks)) < len(ranks):
            raise InvalidArgument(f"ProcessSet({ranks}): different ranks, at least one, are needed")
        self._ranks = ranks
        self._number = -1
        self._world: Any = None  # the one that it is registered in
        self._group: _core.Group | None = None  # None on others than members

    @property
    def process_set_id(self) -> int | None:
        """Its number in this world; None while it is not registered."""
        return self._number if self._world is not None and self._world is _world.current() else None

    @property
    def ranks(self) -> list[int]:
        return list(self._ranks)

    @property
    def mpi_comm(self) -> None:
        """None, as in Horovod without MPI."""
        return None

    def size(self) -> int | None:
        """The number of members; None while the set is not registered, and before ``init()``."""
        return len(self.ranks) if self._is_there() else None

    def rank(self) -> int | None:
        """This process' place in the set; None while the set is not registered, and before
        ``init()``.

        Raises:
            InvalidArgument: this process is no member.
        """
        if not self._is_there():
            return None
        if not self.included():
            raise _no_member_of(self)
        return self.ranks.index(_world.rank())

    def _is_there(self) -> bool:
        return self.process_set_id is not None and _world.is_initialized()

    def included(self) -> bool:
        """Whether this process is a member."""
        return _world.rank() in self.ranks

    def __repr__(self) -> str:
        return f"ProcessSet({self.ranks}, process_set_id={self.process_set_id})"


class _GlobalProcessSet(ProcessSet):
    """All ranks; always there."""

    def __init__(self) -> None:
        self._number = 0

    @property
    def process_set_id(self) -> int:
        return 0

    @property
    def ranks(self) -> list[int]:
        return list(range(_world.size()))

    def __repr__(self) -> str:
        return "global_process_set"


KINDS["ProcessSet"] = one_of("a ProcessSet", ProcessSet)
KINDS["Iterable[int]"] = one_of("a list of ranks", Iterable)

global_process_set: ProcessSet = _GlobalProcessSet()

_registered: list[ProcessSet] = []
_followers: list[Callable[[], None]] = []


def when_sets_change(act: Callable[[], None]) -> None:
    """Whenever a set has been registered or removed, `act` is called."""
    _followers.append(act)


def _tell_followers() -> None:
    for act in _followers:
        act()


@explained
def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Registers a set of ranks. Collective: every rank of the world calls it, in the same order.

    Raises:
        InvalidArgument: a rank does not exist, or a set of the same ranks is registered already.
        Mismatch: the ranks' sets differ; says how.

    Examples:
        >>> import farandole.torch as hvd
        >>> hvd.init()
        >>> alone = hvd.add_process_set([0])  # doctest: +SKIP
    """
    made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    world, ranks = _world.world(), made.ranks
    if made is global_process_set or ranks == list(range(_world.size())):
        raise InvalidArgument(f"a process set of all ranks exists: {global_process_set!r}")
    if ranks[-1] >= _world.size():
        raise InvalidArgument(
            f"{made!r}: rank {ranks[-1]} does not exist in a world of {_world.size()}"
        )
    for other in registered_sets():
        if other.ranks == ranks:
            raise InvalidArgument(f"a process set of the same ranks exists: {other!r}")
    world.barrier(name=f"add_process_set({ranks})")  # compares them
    group = world.split(0 if made.included() else -1)
    number = _core.names_of(world).add_set(group, ranks)
    world.barrier(name="add_process_set")  # no rank submits before all know it
    made._number, made._world, made._group = number, world, group
    _registered[:] = registered_sets()
    _registered.append(made)
    _tell_followers()
    return made


@explained
def remove_process_set(process_set: ProcessSet) -> bool:
    """Forgets a set. Collective: every rank of the world calls it, when nothing is in flight in it.

    Returns:
        False for a set that is not registered, and for that of all ranks.
    """
    if process_set is global_process_set or not isinstance(process_set, ProcessSet):
        return False
    number = process_set.process_set_id
    if number is None:
        return False
    world = _world.world()
    world.barrier(name=f"remove_process_set({process_set.ranks})")
    _core.names_of(world).remove_set(number)
    process_set._world = process_set._group = None
    _registered.remove(process_set)
    _tell_followers()
    return True


def _no_member_of(process_set: ProcessSet) -> InvalidArgument:
    return InvalidArgument(f"rank {_world.rank()} is not in {process_set!r}")


def registered_sets() -> list[ProcessSet]:
    """The sets of this world, except for that of all ranks."""
    return [each for each in _registered if each.process_set_id is not None]


def _forget_all() -> None:
    """Drops all that sets hold of their world (memory of devices, say) as it ends."""
    for each in _registered:
        each._world = each._group = None
    _registered.clear()


_world.before_leaving(_forget_all)


def number_of(process_set: object) -> int:
    """The number of a set that this rank may use. Raises InvalidArgument."""
    if process_set is global_process_set:
        return 0
    if not isinstance(process_set, ProcessSet):
        raise InvalidArgument(f"process_set={shown(process_set)} is no ProcessSet")
    number = process_set.process_set_id
    if number is None:
        raise InvalidArgument(f"{process_set!r} is not registered; call add_process_set() first")
    return number


def group_of(process_set: ProcessSet) -> _core.Group | None:
    """The members of a set that may be used; None on other ranks. Raises InvalidArgument."""
    return _world.world() if number_of(process_set) == 0 else process_set._group


def own_group_of(process_set: ProcessSet) -> _core.Group:
    """The members of a set that this rank is in. Raises InvalidArgument."""
    group = group_of(process_set)
    if group is None:
        raise _no_member_of(process_set)
    return group


def check_process_set(process_set: object) -> None:
    """Raises InvalidArgument for what works on all ranks alone."""
    if process_set is not global_process_set:
        raise InvalidArgument(
            f"process_set={shown(process_set)} is not supported here yet; leave it at "
            "global_process_set"
        )


def members_of(number: int) -> tuple[list[int], int]:
    """The ranks of a set by its number, and this rank's place among them (-1: it is no member).

    Raises:
        InvalidArgument: no set has this number.
    """
    known = [global_process_set, *_registered]
    ranks = next((each.ranks for each in known if each.process_set_id == number), None)
    if ranks is None:
        raise InvalidArgument(f"process set {shown(number)} is not registered")
    return ranks, ranks.index(_world.rank()) if _world.rank() in ranks else -1
