"""Objects that outlive worlds in an elastic job: DistributedOptimizers and GlobalBatches.

A rank that is new makes its optimizer while the others share their state with it (elastic.run), so
making one exchanges nothing in such a job. As soon as ranks have one state, all of them `enter()`:
what they have made makes its exchanges, in the order in which the program has made it. As a world
has ended they `leave()`, and let go of them.

What is made inside of elastic.run is of the present world alone, as in any other job: where the
program's function is called again, it makes another one.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import NoReturn, Protocol

import torch

from farandole import _elastic, _world
from farandole._core import InvalidArgument, Mismatch
from farandole.common._objects import agree
from farandole.torch._training.hooked import Hooked


class Follower(Protocol):
    """Goes from one world into the next."""

    def is_superseded(self) -> bool:
        """Whether a newer one has its place."""

    def described(self) -> str:
        """The description that ranks compare."""

    def leave_world(self) -> None:
        """The world has ended."""

    def enter_world(self) -> None:
        """Collective, in the order in which they were made."""


class _State:
    inside = False  # between enter(), and leave() or end()
    followers: list[weakref.ref[Follower]] = []  # noqa: RUF012 - the process' own


_state = _State()


def makes_later() -> bool:
    """Whether what is made now waits for elastic.run to make its exchanges."""
    return _elastic.is_elastic() and not _state.inside


def follow(follower: Follower) -> None:
    """Notifies it of worlds for as long as it is alive."""
    _state.followers.append(weakref.ref(follower))


def leave() -> None:
    """The world was left."""
    _state.inside = False
    for each in _living():
        each.leave_world()


def enter() -> None:
    """Collective: all ranks of this world have the same state.

    Raises:
        Mismatch: ranks have made other ones.
    """
    if not _elastic.is_elastic():
        return
    if _world.size() > 1:
        try:
            _agree()
        except Mismatch:
            gc.collect()  # slow; dead objects may be in reference cycles on some ranks
            _agree()
    for each in _living():
        each.enter_world()
    _state.inside = True


def _agree() -> None:
    advice = (
        "make them before elastic.run, in the same order on every rank, and keep them as long as "
        "it runs"
    )
    rows = [each.described() for each in _living()]
    agree("what elastic.run goes on with", rows, advice=advice)


def end() -> None:
    """The program goes on by itself, in the same world."""
    _state.inside = False


def _living() -> list[Follower]:
    found = [each for ref in _state.followers if (each := ref()) is not None]
    found = [each for each in found if not each.is_superseded()]
    _state.followers = [weakref.ref(each) for each in found]
    return found


class Alone(Hooked):
    """Stands in for the exchange of gradients where a rank is alone: in a world of one, or
    `outside` of all worlds, where a gradient is an error."""

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]], *, outside: bool) -> None:
        super().__init__(named, ())
        self._outside = outside
        self.hear()

    def on_gradient(self, i: int, *, final: bool) -> None:  # noqa: ARG002
        if self._outside:
            raise _outside(f"backward() of '{self.names[i]}'")

    def check(self) -> None:
        """Before a step. Raises InvalidArgument outside of elastic.run."""
        if self._outside:
            raise _outside("step()")
        self.check_alive()

    def refuse(self, why: InvalidArgument) -> NoReturn:
        raise why


def _outside(what: str) -> InvalidArgument:
    return InvalidArgument(
        f"{what} with a DistributedOptimizer outside of elastic.run, in an elastic job (farandole "
        "run --min-np): nobody would reduce the gradients\n"
        "  advice: train inside of a function that hvd.elastic.run decorates"
    )
