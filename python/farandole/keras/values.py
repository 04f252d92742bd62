"""Values and variables of all ranks, outside of the training step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import keras
import numpy as np

from farandole import _core, _unreduced
from farandole._arguments import checked, explained
from farandole._core import InvalidArgument
from farandole.common._objects import agree
from farandole.common._reduction import Average, Sum, choose_op, core_op, op_name
from farandole.common._weights import note_broadcast
from farandole.keras import _host
from farandole.keras._exchange import label_of, rows_of
from farandole.keras.compression import Compression, Compressor

__all__ = [
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_variables",
    "reducescatter",
]


def _is_sent(value: Any) -> bool:
    try:
        return _array(value).dtype.name in _core.dtypes
    except (TypeError, ValueError):
        return False


_A_VALUE = ("a number, an array, a tensor or a variable", _is_sent)


def _are_variables(value: Any) -> bool:
    listed = value if isinstance(value, Sequence) else ()  # what can be iterated once is not
    return isinstance(value, Iterable) and all(hasattr(each, "assign") for each in listed)


@explained(value=_A_VALUE)
def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Compressor | type[Compressor] | None = Compression.none,
) -> Any:
    """The mean (or ``op``) of all ranks' values: an array of numpy, or a number for a number.

    Args:
        value: a number, an array, a tensor or a variable of Keras; of one shape on all ranks.
        name: the operation's: ranks submit named ones in any order.
        average: deprecated: use ``op``.
        prescale_factor: a factor on every value.
        postscale_factor: a factor on the result.
        op: ``Average`` (default), ``Sum``, ``Min``, ``Max`` or ``Product``.
        compression: what is sent.

    Raises:
        InvalidArgument: bad input on this rank.
        Mismatch: ranks disagree on shape, dtype or op; on every rank.

    Examples:
        >>> import farandole.keras as hvd
        >>> hvd.init()
        >>> float(hvd.allreduce(3.0))
        3.0
    """
    word = core_op(choose_op(average, op))
    array = _array(value)
    if compression is None or compression is Compression.none:
        return _plain(_host.all_reduce(array, word, name, prescale_factor, postscale_factor))
    wire, context = compression.compress(keras.ops.convert_to_tensor(array))
    reduced = _host.all_reduce(_array(wire), word, name, prescale_factor, postscale_factor)
    return _plain(_array(compression.decompress(keras.ops.convert_to_tensor(reduced), context)))


@explained(value=_A_VALUE)
def allgather(value: Any, name: str | None = None) -> Any:
    """All ranks' rows, in rank order. Only the first dimension may differ between ranks."""
    return _host.all_gather(_array(value), name)


@explained(value=_A_VALUE)
def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """The root's value, of the same shape and dtype on all ranks."""
    return _plain(_host.broadcast(_array(value), root_rank, name))


@explained(value=_A_VALUE)
def reducescatter(value: Any, name: str | None = None, op: int = Average) -> Any:
    """This rank's rows of the mean (or sum) of all ranks' arrays; the first ranks have one more
    where they do not divide."""
    if op not in (Average, Sum):
        raise InvalidArgument(f"op={op_name(op)}: reducescatter reduces with Average or Sum only")
    return _host.reduce_scatter(_array(value), core_op(op), name)


@checked(variables=("a list of variables", _are_variables))
def broadcast_variables(variables: Sequence[Any], root_rank: int) -> None:
    """Overwrites Keras variables with the root's.

    Args:
        variables: ``model.weights``, ``model.optimizer.variables``, … alike on all ranks.
        root_rank: whose values.

    Raises:
        Mismatch: the ranks' variables differ; says which. Nothing has been overwritten then.
    """
    given = list(variables)
    agree("variables to broadcast", rows_of(given))
    _unreduced.note_broadcast("broadcast_variables")
    note_broadcast(getattr(variable, "_value", variable) for variable in given)
    for i, variable in enumerate(given):
        array = _array(variable)
        if array.size > 0:
            variable.assign(_host.broadcast(array, root_rank, f"broadcast {label_of(i, variable)}"))


def broadcast_global_variables(root_rank: int) -> NoReturn:  # noqa: ARG001 - Horovod's signature
    """Raises RuntimeError, as Horovod's does without TensorFlow 1's graphs: Keras 3 keeps no list
    of all variables."""
    raise RuntimeError(
        "Keras 3 keeps no list of global variables\n"
        "  advice: use hvd.callbacks.BroadcastGlobalVariablesCallback(root_rank) in fit(), or "
        "hvd.broadcast_variables(model.weights, root_rank)"
    )


def _array(value: Any) -> np.ndarray[Any, Any]:
    if isinstance(value, keras.Variable) or keras.ops.is_tensor(value):
        return np.asarray(keras.ops.convert_to_numpy(value))
    return np.asarray(value)


def _plain(array: np.ndarray[Any, Any]) -> Any:
    """A number for a number."""
    return array[()] if array.ndim == 0 else array
