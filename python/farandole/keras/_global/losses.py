"""Losses of a part of a batch, such that their mean over the ranks is the loss of the batch.

A loss is a sum over samples by a divisor. A rank's weight is that of its samples (steps.py): right
where the divisor is their number. Elsewhere the loss gets a factor beside it:

    reduction                            divisor              factor
    sum_over_batch_size, mean            samples              1
    the same, outputs with a mask        what the mask has    (mine / count) / (all ranks' / total)
    mean_with_sample_weight              sum of the weights   likewise
    sum                                  1                    total / count
    none: a loss for each sample         1                    total / count, in Steps.scaled
    any, samples not kept apart          not known            of the whole batch: whole_losses.py

The third column's sums over ranks are one collective of one number, per output and step, within it.

With several outputs Keras also keeps a mean of each one's loss over the batches, weighted by their
samples, or by 1 in a program that does not know how many there are (TensorFlow): see means.py.
"""

from __future__ import annotations

from typing import Any

import keras

from farandole import _world
from farandole._core import InvalidArgument
from farandole.keras._global.samples_apart import keeps_samples_apart
from farandole.keras._global.steps import LEFT_OPEN, Steps
from farandole.keras._global.sums import sum_over_ranks
from farandole.keras._global.whole_losses import of_all_ranks


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
        if self._steps.share is None or (_world.size() == 1 and self._steps.block is None):
            return self._own(y_true, y_pred, sample_weight)
        if self._is_of_parts is None:
            self._is_of_parts = keeps_samples_apart(self._own, y_true, y_pred)
        if not self._is_of_parts:
            return self._whole(y_true, y_pred, sample_weight)
        # Before the loss, which on PyTorch multiplies the weights by the mask in place.
        factor = self._factor(y_pred, sample_weight)
        loss = self._own(y_true, y_pred, sample_weight)
        if factor is None:
            return loss
        return loss * keras.ops.cast(factor, keras.backend.standardize_dtype(loss.dtype))

    def _whole(self, y_true: Any, y_pred: Any, sample_weight: Any) -> Any:
        if self._steps.block is not None:
            raise InvalidArgument(
                f"logical_ranks={self._steps.block.parts}: loss "
                f"{getattr(self._own, 'name', self._own)} is of the whole batch, which a logical "
                "rank does not know when it computes its part\n"
                "  advice: return a loss for each sample, made from that sample alone, or no "
                "logical_ranks"
            )
        label = self._label.replace("divisor", "whole batch")
        return of_all_ranks(self._own, y_true, y_pred, sample_weight, self._steps, label)

    def _factor(self, y_pred: Any, sample_weight: Any) -> Any:
        count, total = self._steps.count_and_total()
        if self._reduction == "sum":
            return total / count
        if self._reduction in LEFT_OPEN:
            return None
        mask = _mask_of(y_pred)
        if self._reduction != "mean_with_sample_weight":
            sample_weight = None  # it is no part of the divisor
        if mask is None and sample_weight is None:
            return None
        if self._steps.block is not None:
            raise InvalidArgument(
                f"logical_ranks={self._steps.block.parts}: the loss is divided by "
                f"{'the mask' if mask is not None else 'the sum of sample weights'} of the whole "
                "batch, which a logical rank does not know when it computes its part\n"
                "  advice: a loss with reduction='sum', or no logical_ranks"
            )
        if _world.size() == 1:
            return None
        mine = keras.ops.stop_gradient(_sum_of_weights(y_pred, mask, sample_weight))
        zero = keras.ops.zeros_like(mine)
        everywhere = sum_over_ranks(keras.ops.where(self._steps.counts, mine, zero), self._label)
        return keras.ops.divide_no_nan(mine * total, everywhere * count)


def _mask_of(y_pred: Any) -> Any:
    from keras.src.backend import get_keras_mask

    return get_keras_mask(y_pred)


def _sum_of_weights(y_pred: Any, mask: Any, sample_weight: Any) -> Any:
    if mask is None:
        return keras.ops.sum(keras.ops.cast(sample_weight, "float32"))
    ones = keras.ops.ones_like(keras.ops.cast(mask, "float32"))
    return _Ones(ones)(ones, y_pred, sample_weight)


class _Ones(keras.losses.Loss):  # type: ignore[misc]  # Keras has no types
    """The sum of weights where the mask is, as Keras' own rules put them together."""

    def __init__(self, ones: Any) -> None:
        super().__init__(reduction="sum", dtype="float32")
        self._ones = ones

    def call(self, y_true: Any, y_pred: Any) -> Any:  # noqa: ARG002
        return self._ones
