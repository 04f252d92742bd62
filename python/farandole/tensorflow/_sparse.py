"""Gradients of embeddings: ``tf.IndexedSlices`` are gathered, since ranks touch different rows."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from farandole.common._process_set import ProcessSet, members_of
from farandole.common._reductions import Average, Sum, op_name
from farandole.tensorflow._calls import Ask, run, tensor_from
from farandole.tensorflow._graph import refused, set_number


def ask_for(
    slices: Sequence[tf.IndexedSlices], name: str | None, process_set: ProcessSet, note: str = ""
) -> Ask:
    """Gathers the values and indices of all of them, as one operation."""
    parts = []
    for i, each in enumerate(slices):
        parts += _added_up(tensor_from(each.values, f"slices {i}"), each.indices)
    return Ask("all_gather", parts, name, set_number(process_set), note=note)


def _added_up(values: tf.Tensor, indices: tf.Tensor) -> list[tf.Tensor]:
    """With every index once: a batch has the frequent words many times."""
    once, places = tf.unique(indices)
    return [tf.math.unsorted_segment_sum(values, places, tf.size(once)), once]


def results_of(
    gathered: Sequence[tf.Tensor],
    slices: Sequence[tf.IndexedSlices],
    op: int,
    process_set: ProcessSet,
) -> list[tf.IndexedSlices]:
    """The rows of all ranks, in rank order; those that ranks share are added up by whoever uses
    them."""
    size = len(members_of(set_number(process_set))[0])
    results = []
    for i, each in enumerate(slices):
        values, indices = gathered[2 * i], gathered[2 * i + 1]
        if op == Average:
            values = tf.cast(values / tf.cast(size, values.dtype), values.dtype)  # integers, too
        results.append(tf.IndexedSlices(values, indices, each.dense_shape))
    return results


def reduce(
    slices: Sequence[tf.IndexedSlices], op: int, name: str | None, process_set: ProcessSet
) -> list[tf.IndexedSlices]:
    """Their sum or mean over the ranks.

    First of all as an all-reduce of nothing, which says what they are: a rank whose tensors are
    dense submits an all-reduce by that name, and the two would wait for each other for ever."""
    if op not in (Average, Sum):
        raise refused(f"op={op_name(op)}: tf.IndexedSlices are reduced with Average or Sum")
    note = f"{len(slices)} tf.IndexedSlices"
    nothing = [tf.zeros([0])]
    agreed = run(Ask("all_reduce", nothing, name, set_number(process_set), note=note))
    with tf.control_dependencies(agreed):
        return results_of(run(ask_for(slices, name, process_set)), slices, op, process_set)
