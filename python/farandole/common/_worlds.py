"""The loop of an elastic job: a program runs in one world after another, with its state.

A world is left when a rank of it is lost, or when the launcher wants another one. Then each worker

1. leaves the world;
2. joins the next one, which may fail, and goes back to its last commit where the former has failed;
3. shares one state with the ranks of that world, and calls the program's function again.

A world that fails in 2 or 3 is left as any other.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from farandole import _elastic, _world
from farandole._collectives.whole import all_reduce
from farandole._core import (
    DeviceError,
    EarlyExit,
    InternalError,
    LinkError,
    MembershipChanged,
    PeerHung,
    PeerLost,
    RemoteError,
    RendezvousError,
    ResourceError,
    Stalled,
)
from farandole.common import _inside
from farandole.common.exceptions import HostsUpdatedInterrupt

_R = TypeVar("_R")
# Errors that end a world, and not the program: after them an elastic job forms another one.
_OF_THE_RANKS = (
    EarlyExit, LinkError, MembershipChanged, PeerHung, PeerLost, RemoteError, RendezvousError,
    Stalled,
)  # fmt: skip
_OF_ONE_RANK = (DeviceError, InternalError, ResourceError)  # that rank would fail again
_LONGEST_PAUSE = 2.0  # seconds, between worlds that fail as soon as they are asked for


class Synced(Protocol):
    """The methods of a state that the loop calls (farandole.common.elastic.State)."""

    def sync(self) -> None: ...
    def restore(self) -> None: ...
    def on_reset(self) -> None: ...

    @property
    def needs_sync(self) -> bool: ...


def _nothing() -> None:
    pass


def _itself(error: Exception) -> BaseException:
    return error


@dataclass(frozen=True)
class Framework:
    """The callbacks of a framework between worlds."""

    init: Callable[[], None]  # joins the next one
    cause_of: Callable[[Exception], BaseException] = _itself  # ours, where its own hides it
    leave: Callable[[], None] = _nothing  # lets go of what belongs to the world that was left
    enter: Callable[[], None] = _nothing  # collective: makes it anew, once the state is shared
    end: Callable[[], None] = _nothing  # the program's function is called no more


@dataclass
class _Loop:
    """The state of this worker's loop."""

    framework: Framework
    state: Synced
    ended: Exception | None = None  # why the last world was left; None in the first one
    goes_back: bool = False  # to the last commit, in the next world
    skip_sync: bool = False  # no rank of the next world is known to need this one's state
    has_state: bool = False  # that of the job, not as the program has made it
    in_vain: int = 0  # worlds asked for, since the last one that formed

    def enter(self) -> None:
        """Enters the next world, with the same state on every rank."""
        if self.ended is not None:
            self.in_vain += 1
            self.framework.init()
            self.in_vain = 0
            if self.goes_back:
                self.state.restore()
                self.goes_back = False
            self.state.on_reset()
        if self._wants_sync():
            self.state.sync()
        self.has_state = True
        _elastic.hold_state()
        self.framework.enter()
        _inside.enter()

    def _wants_sync(self) -> bool:
        """Whether to sync. Collective: a rank that skips it alone would leave new ranks waiting."""
        alone = self.has_state and self.skip_sync and not self.state.needs_sync
        if not _elastic.is_elastic() or _world.size() == 1:
            return not alone
        orphaned = _world.rank() == 0 and not self.has_state
        said = all_reduce(
            np.array([not alone, self.has_state, orphaned], np.int64), "max", name="who needs state"
        )
        if said[1] and said[2]:
            raise InternalError(
                "rank 0 has not got the job's state, which other ranks have: it is new, or the "
                "first sync failed on it alone"
            )
        return bool(said[0])

    def leave(self) -> None:
        """Leaves the world. Called outside of `except`: to the other ranks, a process that leaves
        while it handles an exception ends with that."""
        _inside.leave()
        _world.shutdown()
        self.framework.leave()
        if self.in_vain:
            time.sleep(min(0.05 * 2 ** min(self.in_vain, 10), _LONGEST_PAUSE))

    def judge(self, error: Exception) -> bool:
        """Whether another world follows on that error."""
        if isinstance(error, HostsUpdatedInterrupt):
            self.skip_sync = error.skip_sync
        elif ends_world(self.framework.cause_of(error), _rank()):
            self.skip_sync = False
            self.goes_back = self.goes_back or not self.in_vain
        else:
            return False
        traceback.clear_frames(error.__traceback__)  # they hold what belongs to that world
        error.__context__ = None  # else worlds that fail in a row would be one chain
        self.ended = error
        return True


def _rank() -> int | None:
    return _world.rank() if _world.is_initialized() else None


def run_in_worlds(function: Callable[[], _R], state: Synced, framework: Framework) -> _R:
    """Calls the function in one world after another, until it returns.

    Where the job is not elastic there is one world, and its errors are the program's.

    Raises:
        Exception: what the function raises, but for what ends a world of an elastic job.
    """
    loop = _Loop(framework, state)
    _elastic.tell_training("training")
    try:
        while True:
            try:
                with _because_of(loop.ended):
                    loop.enter()
                returned = function()
                break
            except Exception as error:
                if not _elastic.is_elastic() or not loop.judge(error):
                    raise
            with _because_of(loop.ended):
                loop.leave()
    except BaseException:
        framework.end()
        _elastic.tell_training("failed")
        raise
    framework.end()
    _elastic.tell_training("done")
    return returned


@contextmanager
def _because_of(before: Exception | None) -> Iterator[None]:
    """Chains an error that is raised inside to the one before."""
    try:
        yield
    except BaseException as error:
        if error.__context__ is None and error is not before:
            error.__context__ = before
        raise


def ends_world(error: BaseException, rank: int | None) -> bool:
    """Whether the ranks that are left can go on without what has failed. The program's own faults
    (InvalidArgument, Mismatch, Deadlock and so on) would come again in every world.

    Args:
        rank: this process, in the world that has failed; None: the world had not formed. What is
            wrong with this process alone ends it, and the others go on.
    """
    if isinstance(error, _OF_THE_RANKS):
        return True
    if not isinstance(error, _OF_ONE_RANK) or error.rank is None:
        return False
    return error.pid != os.getpid() if rank is None else error.rank != rank
