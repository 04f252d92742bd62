"""Losses of a part of a batch, such that their mean over the ranks is the loss of the batch.

A loss is a sum over samples by a divisor. A rank's weight is that of its samples (steps.py): right
where the divisor is their number. Elsewhere the loss gets a factor beside it:

    reduction                            divisor              factor
    sum_over_batch_size, mean            samples              1
    the same, with a mask of outputs,    what the masks have  (mine / count) / (all ranks' / total)
    or of the loss (ignore_class)
    mean_with_sample_weight              sum of the weights   likewise
    sum                                  1                    total / count
    none: a loss for each sample         1                    total / count, in Steps.scaled
    any, samples not kept apart          not known            of the whole batch

The third column's sums over ranks are one collective of one number, per output and step, within it.

With several outputs Keras also keeps a mean of each one's loss over the batches, weighted by their
samples, or by 1 in a program that does not know how many there are (TensorFlow): see
whole_metrics.py.

A function that gives one number for all samples (a Dice loss, a sum by a constant, a mean) does not
say how it depends on them, and one that compares samples needs those of other ranks, so losses of
parts of a batch cannot be put together. Such a loss gets the targets and outputs of all ranks, as
it would in one process: outputs are few beside what they are computed from. Every rank has the same
value, and the gradient of its own outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any

import keras

from farandole import _world
from farandole.data import share
from farandole.keras._global.samples_apart import (
    DIVISOR,
    LOSS,
    keeps_samples_apart,
    needs_whole_batch,
)
from farandole.keras._global.steps import LEFT_OPEN, Steps
from farandole.keras._global.sums import sum_over_ranks


def share_losses(compile_loss: Any, steps: Steps) -> None:
    """Wraps the losses of a compiled model, which are there once Keras has built them."""
    own_build = type(compile_loss).build.__get__(compile_loss)

    def build(y_true: Any, y_pred: Any) -> None:
        own_build(y_true, y_pred)
        _wrap(compile_loss, steps)

    compile_loss.build = build
    if compile_loss.built:
        _wrap(compile_loss, steps)


def _wrap(compile_loss: Any, steps: Steps) -> None:
    compile_loss._flat_losses = [
        each._replace(loss=_SharedLoss(each.loss, steps, f"divisor_of_loss_{i}"))
        if not isinstance(each.loss, _SharedLoss)
        else each
        for i, each in enumerate(compile_loss._flat_losses)
    ]


class _SharedLoss:
    """A loss with its factor."""

    def __init__(self, own: Any, steps: Steps, label: str) -> None:
        self._own, self._steps, self._label = own, steps, label
        self._reduction = getattr(own, "reduction", "sum_over_batch_size")
        self._is_of_parts: bool | None = None  # samples_apart.py; None until it is called

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        self._steps.knows_loss |= self._reduction not in LEFT_OPEN
        with self._steps.not_telling_of_losses():
            return self._shared(y_true, y_pred, sample_weight)

    def _shared(self, y_true: Any, y_pred: Any, sample_weight: Any) -> Any:
        if self._steps.share is None or (_world.size() == 1 and self._steps.block is None):
            return self._own(y_true, y_pred, sample_weight)
        if self._is_of_parts is None:
            self._is_of_parts = keeps_samples_apart(self._own, y_true, y_pred)
        if not self._is_of_parts:
            return self._whole(y_true, y_pred, sample_weight)
        # A copy, since Keras on PyTorch multiplies the weights by the mask in place.
        weights = None if sample_weight is None else keras.ops.copy(sample_weight)
        with noting_mask(self._own) as masks:
            loss = self._own(y_true, y_pred, sample_weight)
        factor = self._factor(reduce(_both, masks, mask_of(y_pred)), weights)
        if factor is None:
            return loss
        return loss * keras.ops.cast(factor, keras.backend.standardize_dtype(loss.dtype))

    def _whole(self, y_true: Any, y_pred: Any, sample_weight: Any) -> Any:
        if self._steps.block is not None:
            raise needs_whole_batch(LOSS, getattr(self._own, "name", self._own), self._steps.block)
        label = self._label.replace("divisor", "whole batch")
        return _of_all_ranks(self._own, y_true, y_pred, sample_weight, self._steps, label)

    def _factor(self, mask: Any, sample_weight: Any) -> Any:
        count, total = self._steps.count_and_total()
        if self._reduction == "sum":
            return total / count
        if self._reduction in LEFT_OPEN:
            return None
        if self._reduction != "mean_with_sample_weight":
            sample_weight = None  # it is no part of the divisor
        if mask is None and sample_weight is None:
            return None
        if self._steps.block is not None:
            divisor = "the mask" if mask is not None else "the sum of sample weights"
            raise needs_whole_batch(DIVISOR, divisor, self._steps.block)
        if _world.size() == 1:
            return None
        mine = keras.ops.stop_gradient(_sum_of_weights(mask, sample_weight))
        zero = keras.ops.zeros_like(mine)
        everywhere = sum_over_ranks(keras.ops.where(self._steps.counts, mine, zero), self._label)
        return keras.ops.divide_no_nan(mine * total, everywhere * count)


def mask_of(tensor: Any) -> Any:
    from keras.src.backend import get_keras_mask

    return get_keras_mask(tensor)


@contextmanager
def noting_mask(loss: Any) -> Iterator[list[Any]]:
    """Notes the mask of what the loss' call() gives, by which Keras divides as by the outputs'. A
    loss with a __call__() of its own may have none, or several."""
    masks: list[Any] = []
    own, before = loss.call, vars(loss).get("call")

    def call(*args: Any, **kwargs: Any) -> Any:
        values = own(*args, **kwargs)
        masks.append(mask_of(values))
        return values

    loss.call = call
    try:
        yield masks
    finally:
        del loss.call
        if before is not None:  # of the program's own
            loss.call = before


def _both(first: Any, second: Any) -> Any:
    """As Keras' losses join them."""
    if first is None or second is None:
        return second if first is None else first
    return first & second


def _sum_of_weights(mask: Any, sample_weight: Any) -> Any:
    from keras.src.backend import set_keras_mask

    if mask is None:
        return keras.ops.sum(keras.ops.cast(sample_weight, "float32"))
    ones = keras.ops.ones_like(keras.ops.cast(mask, "float32"))
    set_keras_mask(ones, mask)
    return _Ones(ones)(ones, ones, sample_weight)


class _Ones(keras.losses.Loss):  # type: ignore[misc]  # Keras has no types
    """The sum of weights where the mask is, as Keras' own rules put them together."""

    def __init__(self, ones: Any) -> None:
        super().__init__(name="ones", reduction="sum", dtype="float32")
        self._ones = ones

    def call(self, y_true: Any, y_pred: Any) -> Any:  # noqa: ARG002
        return self._ones


# ---- losses of a whole batch ----


def _of_all_ranks(
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
