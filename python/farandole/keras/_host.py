"""Arrays and objects among all ranks outside of the training step: what callbacks send.

They are operations by name (docs/named.md), which have a stream of their own: this traffic never
comes between gradients, whichever of the two a rank is ahead with.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from farandole import _core, _world
from farandole._core import InvalidArgument
from farandole.common._reduction import share


def _row(source: np.ndarray[Any, Any], target: np.ndarray[Any, Any] | None) -> Any:
    def buffer(array: np.ndarray[Any, Any]) -> _core.Buffer:
        return _core.Buffer(array.ctypes.data, array.size, array.dtype.name, array)

    return buffer(source), None if target is None else buffer(target), source.shape


def _prepared(value: Any, what: str) -> np.ndarray[Any, Any]:
    array = np.asarray(value)
    if array.dtype.name not in _core.dtypes:
        raise InvalidArgument(
            f"{what} has dtype {array.dtype}, which is not supported; there are "
            + ", ".join(_core.dtypes)
        )
    # ascontiguousarray would make a vector of a scalar.
    return array if array.flags.c_contiguous else array.copy(order="C")


def _submit(kind: str, name: str | None, row: Any, **options: Any) -> Any:
    number = _core.names_of(_world.world()).submit(kind, name, [row], **options)
    return _core.wait_by_number(number)


def all_reduce(
    value: Any, op: str, name: str | None, prescale: float = 1.0, postscale: float = 1.0
) -> np.ndarray[Any, Any]:
    source = _prepared(value, "value")
    result = np.empty_like(source)
    row = _row(source, result)
    _submit("all_reduce", name, row, op=op, prescale=prescale, postscale=postscale)
    return result


def reduce_scatter(value: Any, op: str, name: str | None) -> np.ndarray[Any, Any]:
    """This rank's rows of the reduced array: the first ranks have one more where they do not
    divide."""
    source = _prepared(value, "value")
    if source.ndim == 0:
        raise InvalidArgument("value has no dimension; reducescatter splits the first")
    mine = share(len(source), _world.size(), _world.rank())
    result = np.empty((mine, *source.shape[1:]), source.dtype)
    _submit("reduce_scatter", name, _row(source, result), op=op)
    return result


def broadcast(value: Any, root: int, name: str | None) -> np.ndarray[Any, Any]:
    source = _prepared(value, "value")
    result = np.empty_like(source)
    _submit("broadcast", name, _row(source, result), root=root)
    return result


def all_gather(value: Any, name: str | None) -> np.ndarray[Any, Any]:
    """All ranks' rows, which may be differently many."""
    source = _prepared(value, "value")

    def finish(made: list[Any], _: Any) -> np.ndarray[Any, Any]:
        memory, _, shape = made[0]
        if 0 in shape:
            return np.empty(shape, source.dtype)
        count = int(np.prod(shape))
        return np.frombuffer(memory, source.dtype, count).reshape(shape).copy()

    result: np.ndarray[Any, Any] = _submit("all_gather", name, _row(source, None), finish=finish)
    return result
