"""Losses of a whole batch.

A function that gives one number for all samples (a Dice loss, a sum by a constant, a mean) does not
say how it depends on them, and one that compares samples needs those of other ranks, so losses of
parts of a batch cannot be put together. Such a loss gets the targets and outputs of all ranks, as
it would in one process: outputs are few beside what they are computed from. Every rank has the same
value, and the gradient of its own outputs.
"""

from __future__ import annotations

from typing import Any

import keras

from farandole import _world
from farandole.data import share
from farandole.keras._global.steps import Steps


def of_all_ranks(
    loss: Any, y_true: Any, y_pred: Any, sample_weight: Any, steps: Steps, name: str
) -> Any:
    """Collective: the loss of the whole batch. Its gradient is such that the weighted mean over
    ranks is that of the whole batch."""
    from keras.src.backend import get_keras_mask, set_keras_mask

    mask = get_keras_mask(y_pred)
    given = keras.tree.flatten([y_true, sample_weight, mask])
    rows = [i for i, each in enumerate(given) if each is not None and len(each.shape)]
    count, total = steps.count_and_total()
    # What comes by outputs is summed over ranks, and all else, as a penalty of weights, averaged.
    outputs = [_with_flow(each, total / count) for each in keras.tree.flatten(y_pred)]
    gather = GATHER[keras.backend.backend()]
    gathered, whole = gather([given[i] for i in rows], outputs, steps, name)
    for i, each in zip(rows, gathered, strict=True):
        given[i] = each
    targets, weights, mask = keras.tree.pack_sequence_as([y_true, sample_weight, mask], given)
    predicted = keras.tree.pack_sequence_as(y_pred, whole)
    if mask is not None:
        set_keras_mask(predicted, mask)
    value = loss(targets, predicted, weights)
    if len(value.shape) > 0:  # without a reduction; Steps.scaled has the factor of a sum
        return _with_flow(value, count / total)
    return value


def _with_flow(value: Any, factor: Any) -> Any:
    """The same, with its gradient times the factor."""
    constant = keras.ops.stop_gradient(value)
    by = keras.ops.cast(factor, keras.backend.standardize_dtype(value.dtype))
    return constant + by * (value - constant)


_Whole = tuple[list[Any], list[Any]]  # what is only read; outputs, this rank's with its gradient


def _by_tensorflow(given: list[Any], outputs: list[Any], steps: Steps, name: str) -> _Whole:
    import tensorflow as tf

    from farandole.tensorflow.ops import grouped_allgather

    # A rank without samples adds none; what it computes on does not count.
    mine = [t[: tf.where(steps.counts, tf.shape(t)[0], 0)] for t in (*given, *outputs)]
    counts = tf.stack([tf.shape(t)[0] for t in mine[len(given) :]])
    sent = [tf.stop_gradient(t) for t in mine]
    *whole, table = grouped_allgather([*sent, counts[None]], name, ignore_name_scope=True)
    made = []
    for i, own in enumerate(mine[len(given) :]):
        begin = tf.reduce_sum(table[: _world.rank(), i])
        others = tf.stop_gradient(whole[len(given) + i])
        joined = tf.concat([others[:begin], own, others[begin + counts[i] :]], 0)
        joined.set_shape([None, *outputs[i].shape[1:]])
        made.append(joined)
    for before, after in zip(given, whole, strict=False):
        after.set_shape([None, *before.shape[1:]])
    return whole[: len(given)], made


def _by_torch(given: list[Any], outputs: list[Any], steps: Steps, name: str) -> _Whole:
    import torch

    from farandole.torch.ops import allgather

    def of_all(tensor: Any, number: int) -> Any:
        return allgather(tensor.detach().contiguous(), name=f"{name} {number}")

    there = bool(steps.counts)
    mine = [t if there else t[:0] for t in (*given, *outputs)]
    whole = [of_all(t, i) for i, t in enumerate(mine)]
    counts = torch.tensor([[len(t) for t in mine[len(given) :]]])
    table = of_all(counts, len(mine))
    made = []
    for i, own in enumerate(mine[len(given) :]):
        begin = int(table[: _world.rank(), i].sum())
        others = whole[len(given) + i]
        made.append(torch.cat([others[:begin], own, others[begin + len(own) :]]))
    return whole[: len(given)], made


def _by_jax(given: list[Any], outputs: list[Any], steps: Steps, name: str) -> _Whole:
    import jax
    from jax import numpy as jnp

    from farandole.jax.ops import allgather

    size, rank, total = _world.size(), _world.rank(), steps.total
    assert total is not None
    parts = [share(total, size, each) for each in range(size)]
    counts = [part.stop - part.start for part in parts]

    def of_all(tensor: Any, number: int) -> tuple[Any, slice]:
        """Each sample may have several rows."""
        each = tensor.shape[0] // max(counts[rank], 1)
        rows = [count * each for count in counts]
        mine = tensor[: rows[rank]]
        begin = sum(rows[:rank])
        sent = jax.lax.stop_gradient(mine)
        return allgather(sent, rows, name=f"{name} {number}"), slice(begin, begin + rows[rank])

    whole = [of_all(t, i)[0] for i, t in enumerate(given)]
    made = []
    for i, output in enumerate(outputs):
        others, place = of_all(output, len(given) + i)
        own = output[: place.stop - place.start]
        made.append(jnp.concatenate([others[: place.start], own, others[place.stop :]]))
    return whole, made


GATHER = {"tensorflow": _by_tensorflow, "torch": _by_torch, "jax": _by_jax}
