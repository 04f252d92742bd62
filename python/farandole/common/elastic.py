"""Elastic training: a job that goes on where ranks are lost, and takes in new ones.

Horovod's names. What every framework shares is here; programs use ``farandole.torch.elastic`` and
its siblings.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np

from farandole import _elastic, _world
from farandole._arguments import shown, type_of
from farandole._collectives.whole import all_reduce
from farandole._core import InvalidArgument
from farandole.common._objects import broadcast_object
from farandole.common._worlds import Framework, run_in_worlds
from farandole.common.exceptions import HostsUpdatedInterrupt

__all__ = ["ObjectState", "State", "run_fn"]

_R = TypeVar("_R")
_ASKED = ("sync", "restore", "on_reset", "needs_sync")  # of a state


class State:
    """The state with which training goes on in another world. ``sync()`` makes it the same on every
    rank, and ``restore()`` as it was at the last ``commit()``.

    Args:
        bcast_object: accepted as Horovod does; default: ``broadcast_object``.
        get_rank: likewise, and not needed.
    """

    def __init__(
        self,
        bcast_object: Callable[..., Any] | None = None,
        get_rank: Callable[[], int] | None = None,  # noqa: ARG002 - Horovod's signature
    ) -> None:
        self._bcast_object = bcast_object or broadcast_object
        self._reset_callbacks: list[Callable[[], Any]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """To be called whenever this process has joined another world, before the state is shared:
        to scale a learning rate with the number of ranks, say. Ranks that are new there do not call
        them, so nothing in them may be collective.

        Raises:
            InvalidArgument: one cannot be called.
        """
        added = list(callbacks)
        for each in added:
            if not callable(each):
                raise InvalidArgument(f"register_reset_callbacks(): {shown(each)} is no function")
        self._reset_callbacks.extend(added)

    def on_reset(self) -> None:
        """Makes anew what depends on the world, in another one."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Saves the state, and lets the ranks of the job change. Collective: every rank commits at
        the same point of the program. What was trained since the last commit is lost with a rank.

        Raises:
            HostsUpdatedInterrupt: for ``run``: the world is left, here and on every rank.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """The same without saving; ranks that are there go on with what they have. Nothing is sent
        where the job is not elastic.

        Raises:
            HostsUpdatedInterrupt: some rank has heard that another world is wanted; on all ranks.
        """
        if not _elastic.is_elastic():
            return
        heard = _elastic.changes()
        wanted, with_new = heard.wanted, heard.wanted and not heard.only_fewer
        if _world.size() > 1:
            said = all_reduce(np.array([wanted, with_new], np.int64), "max", name="host updates")
            wanted, with_new = said.astype(bool).tolist()
        if wanted:
            raise HostsUpdatedInterrupt(skip_sync=not with_new)

    def save(self) -> None:
        """Keeps a copy in memory, which replaces the former one once it is whole."""
        raise NotImplementedError

    def restore(self) -> None:
        """Goes back to that copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Gives every rank what rank 0 has, and saves that. Collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """Called in another world, before the state is shared."""

    @property
    def needs_sync(self) -> bool:
        """Whether it is shared also where ranks only leave."""
        return False


class ObjectState(State):
    """A state of Python objects, which are its attributes. They are copied and pickled.

    Args:
        bcast_object: accepted as Horovod does.
        get_rank: likewise.
        kwargs: the attributes' names and first values.

    Raises:
        InvalidArgument: a name is one of the state's own, or a value cannot be copied.

    Examples:
        >>> from farandole.common.elastic import ObjectState
        >>> state = ObjectState(epoch=0, losses=[])
        >>> state.losses.append(0.5)
        >>> state.restore()
        >>> state.losses
        []
    """

    def __init__(
        self,
        bcast_object: Callable[..., Any] | None = None,
        get_rank: Callable[[], int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(bcast_object, get_rank)
        for name in kwargs:
            if hasattr(self, name):
                raise InvalidArgument(f"{type(self).__name__}: {name} is a name of its own")
        self._names = list(kwargs)
        self._set(kwargs)
        self._saved_state = self._copied()

    def save(self) -> None:
        self._saved_state = self._copied()

    def restore(self) -> None:
        self._set(copy.deepcopy(self._saved_state))

    def sync(self) -> None:
        if self._names:
            self._set(self._bcast_object(self._now()))
        self._saved_state = self._copied()

    def _now(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def _set(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)

    def _copied(self) -> dict[str, Any]:
        """A copy of all values at once, so that objects they share are shared in the copy."""
        now = self._now()
        try:
            return copy.deepcopy(now)
        except Exception as error:
            raise InvalidArgument(f"{self._uncopied(now)}: {error}") from error

    def _uncopied(self, values: dict[str, Any]) -> str:
        for name, value in values.items():
            try:
                copy.deepcopy(value)
            except Exception:
                return f"{name} of the state is {type_of(value)}, which cannot be copied"
        return "the state cannot be copied"


def run_fn(function: Callable[..., _R], framework: Framework) -> Callable[..., _R]:
    """The function as every framework's ``elastic.run`` decorates it: its first argument is the
    state, and it is called in one world after another until it returns."""

    if not callable(function):
        raise InvalidArgument(f"elastic.run: {shown(function)} is no function")

    @functools.wraps(function)
    def run(state: Any, *args: Any, **kwargs: Any) -> _R:
        lacking = [n for n in _ASKED if not hasattr(state, n)]
        if lacking:
            raise InvalidArgument(
                f"{getattr(function, '__name__', 'the function')}(): its first argument is "
                f"{type_of(state)}, which has no {lacking[0]}(); it is a state of hvd.elastic"
            )
        return run_in_worlds(lambda: function(state, *args, **kwargs), state, framework)

    return run
