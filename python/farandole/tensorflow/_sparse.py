"""Gradients of embeddings: ``tf.IndexedSlices`` are gathered, since ranks touch different rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from farandole.common._process_set import ProcessSet, number_of
from farandole.common._reduction import Average, Sum, op_name
from farandole.tensorflow._calls import Request, members_when_run, run, tensor_from
from farandole.tensorflow._graph import unsupported


def merged(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """The slices with every index once. A batch has frequent words many times, and ranks share
    them. Code that squares rows (Adam, a norm) must see the values of a dense gradient."""
    values, indices = _added_up(slices.values, slices.indices)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _added_up(values: tf.Tensor, indices: tf.Tensor) -> list[tf.Tensor]:
    once, places = tf.unique(indices)
    # A long sum in 16 bits would stop growing.
    wide = tf.cast(values, tf.float32) if _is_half(values) else values
    sums = tf.math.unsorted_segment_sum(wide, places, tf.size(once))
    return [tf.cast(sums, values.dtype), once]


def _is_half(values: tf.Tensor) -> bool:
    return bool(values.dtype.is_floating) and values.dtype.size == 2


def check_op(op: int, whose: str = "") -> None:
    """Raises Unsupported for what has no meaning where rows are missing."""
    if op not in (Average, Sum):
        raise unsupported(
            f"{whose}op={op_name(op)} takes dense gradients: tf.IndexedSlices are reduced with "
            "Average or Sum\n  advice: sparse_as_dense=True makes them dense, as does "
            "tf.convert_to_tensor(slices)"
        )


def request_for(
    slices: Sequence[tf.IndexedSlices], name: str | None, process_set: ProcessSet, note: str = ""
) -> Request:
    """Gathers the values and indices of all of them, as one operation."""
    parts = []
    for i, each in enumerate(slices):
        parts += _added_up(_checked(each.values, f"slices {i}"), each.indices)
    return Request("all_gather", parts, name, number_of(process_set), note=note)


def _checked(values: tf.Tensor, what: str) -> tf.Tensor:
    tensor = tensor_from(values, what)
    if tensor.dtype == tf.bool:
        raise unsupported(f"{what} are of bool: rows of several ranks are added up")
    return tensor


def results_of(
    gathered: Sequence[tf.Tensor],
    slices: Sequence[tf.IndexedSlices],
    op: int,
    process_set: ProcessSet,
) -> list[tf.IndexedSlices]:
    """The gathered rows of all ranks, in rank order; rows that ranks share are added up."""
    size = members_when_run(number_of(process_set))
    results = []
    for i, each in enumerate(slices):
        values, indices = _added_up(gathered[2 * i], gathered[2 * i + 1])
        if op == Average:
            values = _divided(values, size)
        results.append(tf.IndexedSlices(values, indices, each.dense_shape))
    return results


def _divided(values: tf.Tensor, size: Any) -> tf.Tensor:
    """Integers toward zero, as the engine divides dense ones: docs/determinism.md."""
    if values.dtype.is_floating:
        return values / tf.cast(size, values.dtype)
    wide = tf.uint64 if values.dtype.is_unsigned else tf.int64  # a byte cannot hold every size
    return tf.cast(tf.truncatediv(tf.cast(values, wide), tf.cast(size, wide)), values.dtype)


def reduce(
    slices: Sequence[tf.IndexedSlices], op: int, name: str | None, process_set: ProcessSet
) -> list[tf.IndexedSlices]:
    """The sum or mean of slices over the ranks.

    An empty all-reduce comes first, whose note describes them. A rank whose tensors are dense
    submits an all-reduce by that name, and would otherwise wait for ever, as the others would."""
    check_op(op)
    note = f"{len(slices)} tf.IndexedSlices"
    nothing = [tf.zeros([0])]
    agreed = run(Request("all_reduce", nothing, name, number_of(process_set), note=note))
    with tf.control_dependencies(agreed):
        return results_of(run(request_for(slices, name, process_set)), slices, op, process_set)
