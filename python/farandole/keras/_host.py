"""Arrays and objects among all ranks outside of the training step: what callbacks send.

They are operations by name (docs/named.md), which have a stream of their own: this traffic never
comes between gradients, whichever of the two a rank is ahead with.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from farandole import _core, _world
from farandole._arguments import no_such_dtype
from farandole._core import InvalidArgument
from farandole.common._objects import gathered, run_named
from farandole.common._reduction import share


def _prepared(value: Any, what: str) -> np.ndarray[Any, Any]:
    array = np.asarray(value)
    if array.dtype.name not in _core.dtypes:
        raise no_such_dtype(what, array.dtype)
    # ascontiguousarray would make a vector of a scalar.
    return array if array.flags.c_contiguous else array.copy(order="C")


def all_reduce(
    value: Any, op: str, name: str | None, prescale: float = 1.0, postscale: float = 1.0
) -> np.ndarray[Any, Any]:
    source = _prepared(value, "value")
    result = np.empty_like(source)
    how: Any = {"op": op, "prescale": prescale, "postscale": postscale}
    run_named("all_reduce", name, source, result, **how)
    return result


def reduce_scatter(value: Any, op: str, name: str | None) -> np.ndarray[Any, Any]:
    """This rank's rows of the reduced array: the first ranks have one more where they do not
    divide."""
    source = _prepared(value, "value")
    if source.ndim == 0:
        raise InvalidArgument("value has no dimension; reducescatter splits the first")
    mine = share(len(source), _world.size(), _world.rank())
    result = np.empty((mine, *source.shape[1:]), source.dtype)
    run_named("reduce_scatter", name, source, result, op=op)
    return result


def broadcast(value: Any, root: int, name: str | None) -> np.ndarray[Any, Any]:
    source = _prepared(value, "value")
    result = np.empty_like(source)
    run_named("broadcast", name, source, result, root=root)
    return result


def all_gather(value: Any, name: str | None) -> np.ndarray[Any, Any]:
    """All ranks' rows, which may be differently many."""
    return gathered(_prepared(value, "value"), name, 0).copy()
