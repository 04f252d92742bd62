"""Numbers of a batch that Keras' Mean and Sum are told, in a step of a shared model.

Each rank tells the number of its part. A mean over samples weighs by the part's samples, a sum over
samples is added up: which of the two a number is follows from TensorFlow's graph (loss_kinds.py).
Elsewhere it is taken for a mean, and a whole number that Sum is told for a count. Values for each
sample, and what has a weight, are as they are.
"""

from __future__ import annotations

from functools import cache, wraps
from typing import Any

import keras

from farandole.keras._global.loss_kinds import Kind, kind_of
from farandole.keras._global.saying import say_once
from farandole.keras._global.steps import Steps, running


def sharing() -> Steps | None:
    """Returns the steps of the step that runs, if its batch has a share."""
    steps = running()
    return steps if steps is not None and steps.share is not None else None


def part_of_batch(steps: Steps) -> Any:
    """Returns the fraction of the batch's samples that this rank has."""
    return steps.share[0, 0] / steps.share[0, 1]


def is_number(value: Any) -> bool:
    if isinstance(value, float | int):
        return not isinstance(value, bool)
    return len(getattr(value, "shape", (0,))) == 0


def kind_told(value: Any, metric: Any) -> Kind:
    """Tells whether a number of a part is a mean or a sum over its samples, and says so if that is
    not known."""
    kind = kind_of(value)
    if kind is not None or isinstance(value, keras.Variable):  # a variable is alike on all ranks
        return kind or Kind.MEAN
    taken = Kind.SUM if _is_whole(value) else Kind.MEAN
    say_once(
        f"metric {type(metric).__name__} is told one number of a batch, and whether that is a mean "
        f"or a sum over samples is not known: it is taken for {taken.value}\n"
        "  advice: tell the metric a value for each sample"
    )
    return taken


def _is_whole(value: Any) -> bool:
    if isinstance(value, float | int):
        return isinstance(value, int)
    return not keras.backend.is_float_dtype(keras.backend.standardize_dtype(value.dtype))


@cache
def learn() -> None:
    """From now on, in a step of a shared model."""
    own_mean, own_sum = keras.metrics.Mean.update_state, keras.metrics.Sum.update_state

    @wraps(own_mean)
    def update_mean(self: Any, values: Any, sample_weight: Any = None) -> Any:
        steps = sharing()
        if steps is not None and sample_weight is None and is_number(values):
            sample_weight = part_of_batch(steps)
            if kind_of(values) is Kind.SUM:  # it is to be divided by the one batch alone
                fraction = keras.ops.where(sample_weight > 0, sample_weight, 1.0)
                values = values / keras.ops.cast(fraction, values.dtype)
        return own_mean(self, values, sample_weight=sample_weight)

    @wraps(own_sum)
    def update_sum(self: Any, values: Any, sample_weight: Any = None) -> Any:
        steps = sharing()
        plain = steps is not None and sample_weight is None and is_number(values)
        if steps is not None and plain and kind_told(values, self) is Kind.MEAN:
            sample_weight = part_of_batch(steps)
        return own_sum(self, values, sample_weight=sample_weight)

    keras.metrics.Mean.update_state, keras.metrics.Sum.update_state = update_mean, update_sum
