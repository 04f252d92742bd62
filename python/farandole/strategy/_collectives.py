"""Values of all replicas, reduced or gathered: lists of tensors, in words of tf.distribute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from farandole import _world
from farandole.common._process_set import global_process_set
from farandole.common._reduction import Average, Sum
from farandole.tensorflow._calls import DTYPES as SENT
from farandole.tensorflow._calls import Request, run, tensor_from
from farandole.tensorflow._graph import refused
from farandole.tensorflow._reduction import Reduction
from farandole.tensorflow._weights import Compared

__all__ = ["MEAN", "SENT", "SUM", "from_replica_0", "gather", "op_of", "packed", "reduce_all"]

SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN


def op_of(reduce_op: Any) -> Any:
    """As users write it: a ReduceOp, or its name. Raises Refused."""
    try:
        return tf.distribute.ReduceOp(
            reduce_op.upper() if isinstance(reduce_op, str) else reduce_op
        )
    except ValueError:
        raise refused(f"reduce_op is {reduce_op!r}; it is SUM or MEAN") from None


def reduce_all(reduce_op: Any, values: Sequence[Any], packs: Any = 0) -> list[Any]:
    """Collective: the sum or mean over replicas, of tensors and ``tf.IndexedSlices``.

    Args:
        packs: a number of packs, or lists of values; see ``Reduction.groups``.
    """
    if not values or _world.size() == 1:
        return list(values)
    mean = reduce_op == MEAN
    whole = [i for i, value in enumerate(values) if mean and not value.dtype.is_floating]
    if whole:  # integers are summed first, and then divided
        sums = reduce_all(SUM, values, packs)
        return [tf.cast(each / _world.size(), each.dtype) for each in sums]
    with tf.device("/cpu:0"):
        if len(values) == 1 and not isinstance(values[0], tf.IndexedSlices) and not _gradients:
            tensor = tensor_from(values[0], "the value to reduce")
            return run(Request("all_reduce", [tensor], op="mean" if mean else "sum"))
        op = Average if mean else Sum
        reduction = Reduction(op, groups=packs or 0, label="values of replicas")
        called = [f"value {i}" for i in range(len(values))]
        if not _gradients:
            return reduction.reduce(values, values, called)
        [(names, variables, finite)] = _gradients
        weights = Compared(reduction.label, global_process_set, variables, names, ALIKE)
        names = [*names, *called[len(names) :]]
        return reduction.reduce(values, values, names, weights, finite=finite)


ALIKE = "the same assign() on every replica"
_gradients: list[tuple[Sequence[str], Sequence[Any], bool]] = []  # one at most


@contextmanager
def gradients_of(
    names: Sequence[str], variables: Sequence[Any], *, finite: bool = True
) -> Iterator[None]:
    """A context in which `reduce_all` reduces gradients of these variables, which a step uses, and
    compares their values. `finite`: whether the gradients have to be."""
    _gradients[:] = [(names, variables, finite)]
    try:
        yield
    finally:
        _gradients.clear()


def packed(values: Sequence[Any], most: int) -> list[list[Any]]:
    """Values in packs of at most so many bytes each, in their order; one that is larger, or whose
    size is not known, is a pack by itself."""
    packs: list[list[Any]] = []
    room = 0
    for value in values:
        count = None if isinstance(value, tf.IndexedSlices) else value.shape.num_elements()
        size = most + 1 if count is None else count * value.dtype.size
        if not packs or size > room:
            packs.append([])
            room = most
        packs[-1].append(value)
        room -= size
    return packs


def gather(value: Any, axis: Any) -> tf.Tensor:
    """Collective: the replicas' values, one after the other along an axis."""
    if isinstance(value, tf.IndexedSlices):
        raise refused("tf.IndexedSlices are not gathered; gather their values and indices")
    texts = getattr(value, "dtype", None) == tf.string
    tensor = tf.convert_to_tensor(value) if texts else tensor_from(value, "the value to gather")
    if tensor.shape.rank == 0:
        raise refused("a value without a dimension cannot be gathered\n  advice: value[None]")
    number = _axis(axis, tensor.shape.rank)
    if _world.size() == 1:
        return tf.identity(tensor)
    join = _joined_texts if texts else _joined
    with tf.device("/cpu:0"):
        if number == 0:
            return join(tensor)
        order = [number, *(i for i in range(tensor.shape.rank) if i != number)]
        back = [order.index(i) for i in range(tensor.shape.rank)]
        return tf.transpose(join(tf.transpose(tensor, order)), back)


def _joined(tensor: tf.Tensor) -> tf.Tensor:
    return run(Request("all_gather", [tensor]))[0]


def _joined_texts(texts: tf.Tensor) -> tf.Tensor:
    """Gathers texts as their bytes, with the length of each."""
    flat = tf.reshape(texts, [-1])
    sent = [tf.strings.length(texts), tf.io.decode_raw(tf.strings.reduce_join(flat), tf.uint8)]
    lengths, codes = run(Request("all_gather", sent))
    letters = tf.gather(
        tf.constant([bytes([code]) for code in range(256)]), tf.cast(codes, tf.int32)
    )
    words = tf.RaggedTensor.from_row_lengths(letters, tf.reshape(lengths, [-1]))
    return tf.reshape(tf.strings.reduce_join(words, axis=1), tf.shape(lengths))


def _axis(axis: Any, rank: int | None) -> int:
    number = tf.get_static_value(axis) if tf.is_tensor(axis) else axis
    try:
        number = int(number)
    except (TypeError, ValueError):
        raise refused(f"axis is {axis!r}; it is a whole number") from None
    if rank is not None and not 0 <= number < rank:
        raise refused(f"axis is {number}; the value has the dimensions 0 to {rank - 1}")
    return number


def from_replica_0(value: Any, name: str | None = None, note: str = "") -> tf.Tensor:
    """Collective: replica 0's value, on every replica."""
    tensor = tensor_from(value, "the value to broadcast")
    if _world.size() == 1:
        return tensor
    with tf.device("/cpu:0"):
        return run(Request("broadcast", [tensor], name, note=note))[0]
