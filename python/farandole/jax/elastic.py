"""Elastic training with JAX: a job that goes on where ranks are lost, and takes in new ones.

Programs that were compiled in one world run in the next ones, of other sizes: all ranks of an
elastic job trace them anew there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from farandole import _elastic, _world
from farandole._core import Error, InvalidArgument
from farandole._core import jax as _native
from farandole.common._causes import verdict_behind
from farandole.common._worlds import Framework
from farandole.common.elastic import ObjectState, run_fn
from farandole.jax._call import settle
from farandole.jax._from_first import from_first
from farandole.jax._kept import copied
from farandole.jax._order import init

__all__ = ["JaxState", "run"]

_R = TypeVar("_R")


def run(func: Callable[..., _R]) -> Callable[..., _R]:
    """Decorates the function that trains, whose first argument is the state: in an elastic job it
    is called again, with the state of the last commit, where ranks were lost or have come.

    In an elastic job it returns when the collectives of all programs that it has started are over.

    Args:
        func: as ``train(state, …)``.

    Raises:
        InvalidArgument: what comes first is no state.

    Examples:
        >>> import jax, jax.numpy as jnp, farandole.jax as fdj
        >>> fdj.init()
        >>> step = jax.jit(lambda w, x: w + fdj.allreduce(x), donate_argnums=0)
        >>> @fdj.elastic.run
        ... def train(state):
        ...     while state.step < 4:
        ...         state.w = step(state.w, jnp.ones(2))
        ...         state.step += 1
        ...         state.commit()
        >>> state = fdj.elastic.JaxState(w=jnp.zeros(2), step=0)
        >>> train(state)
        >>> state.w.tolist()
        [4.0, 4.0]
    """
    settled = _to_its_end(func) if callable(func) else func
    return run_fn(settled, Framework(init=lambda: init(), cause_of=cause_of))


def _to_its_end(function: Callable[..., _R]) -> Callable[..., _R]:
    """Programs run behind Python's back: the last step may fail when the function has returned."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> _R:
        result = function(*args, **kwargs)
        if _elastic.is_elastic():
            settle()
        return result

    return call


def cause_of(error: Exception) -> BaseException:
    """Our error, where JAX raises its own for it, or for arrays that a failed program left."""
    behind = error.__cause__ if isinstance(error, InvalidArgument) else error
    if isinstance(behind, Error):
        return behind
    given_away = type(behind) is ValueError and "deleted or donated" in str(behind)
    if given_away or type(behind) is RuntimeError or isinstance(behind, jax.errors.JaxRuntimeError):
        failure = _native.failure() or verdict_behind(error)
        return failure if isinstance(failure, Error) else error
    return error


class JaxState(ObjectState):
    """The state with which training goes on in another world. Each value is an attribute: a pytree
    of arrays (parameters, an optimizer's state, random keys, numpy's arrays) or any object.

    ``commit()`` waits for the programs that compute the arrays, and copies them to the host: the
    copy outlives arrays that are donated later (``donate_argnums``). ``restore()`` makes new
    arrays, on the devices where they were. ``sync()`` compares the trees of all ranks, and sends
    arrays as they are; anything else is pickled. Arrays on several devices of one process stay
    there; those of several processes (``jax.distributed``) are refused.

    Args:
        values: by name, as ``params=params, opt_state=opt_state, key=key, step=0``.

    Raises:
        InvalidArgument: a name is one of the state's own, or a value cannot be kept. From
            ``save()``, also: an array has been given to a program, and is no more.
        Mismatch: from ``sync()``: the ranks' trees differ; says where, and who has what. A number
            of Python and an array that is one number do not.

    Examples:
        >>> import jax, jax.numpy as jnp, farandole.jax as fdj
        >>> state = fdj.elastic.JaxState(params={"w": jnp.ones(2)}, step=0)
        >>> state.params = jax.jit(lambda p: {"w": p["w"] * 3}, donate_argnums=0)(state.params)
        >>> state.restore()
        >>> state.params["w"].tolist()
        [1.0, 1.0]
    """

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)

    def restore(self) -> None:
        self._set(_copied_all(self._saved_state))

    def sync(self) -> None:
        values = self._now()
        if _world.rank() == 0:
            self._saved_state = from_first(values, self._copied)
            return
        received = from_first(values, lambda: values)
        self._set(_copied_all(received))
        self._saved_state = received

    def _copied(self) -> dict[str, Any]:
        return _copied_all(self._now())


def _copied_all(values: dict[str, Any]) -> dict[str, Any]:
    memo: dict[int, Any] = {}
    return {name: copied(name, value, memo) for name, value in values.items()}
