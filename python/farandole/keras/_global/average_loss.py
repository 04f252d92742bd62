"""Losses that a step of the user's own computes, as far as their use of samples is known.

Gradients are averaged there by the weight of each rank's samples, which is right for a mean over
them: Keras' losses, and what ``compute_loss`` gives. ``tf.nn.compute_average_loss`` with a global
batch divides a sum by the number of all samples, so its result gets the factor of a loss with
``reduction="sum"`` (losses.py). A sum that the program divides by itself is found in its graph
(loss_kinds.py), and its gradients get the factor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import keras

from farandole.keras._global.loss_kinds import compares_samples
from farandole.keras._global.steps import LEFT_OPEN, Steps, running


@cache
def learn() -> None:
    """Patches TensorFlow and Keras, so that a step knows which losses are means."""
    _learn(keras.losses.Loss, "__call__", _is_mean)
    owner: Any = next(c for c in keras.Model.__mro__ if "compute_loss" in vars(c))
    _learn(owner, "compute_loss", _is_of_batch)
    if keras.backend.backend() != "tensorflow":
        return
    import tensorflow as tf

    own = tf.nn.compute_average_loss

    @wraps(own)
    def compute_average_loss(
        per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None
    ) -> Any:
        loss = own(per_example_loss, sample_weight, global_batch_size)
        steps = running()
        if steps is None or steps.share is None:
            return loss
        if global_batch_size is None:
            return steps.know(loss)
        count, total = steps.count_and_total()
        return steps.know(loss * tf.cast(total / count, loss.dtype))

    tf.nn.compute_average_loss = tf.autograph.experimental.do_not_convert(compute_average_loss)


def _learn(kind: Any, name: str, is_mean: Callable[..., bool]) -> None:
    own = vars(kind)[name]

    @wraps(own)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss = own(self, *args, **kwargs)
        steps: Steps | None = running()
        if steps is None or loss is None or not is_mean(steps, self, *args, **kwargs):
            return loss
        return steps.know(loss)

    setattr(kind, name, call)


def _is_mean(
    steps: Steps, loss: Any, y_true: Any = None, y_pred: Any = None, *_: Any, **__: Any
) -> bool:
    """Of the loss of each sample of the part."""
    del y_true
    is_reduced = loss.reduction not in ("sum", *LEFT_OPEN)
    return is_reduced and steps.covers(y_pred) and not compares_samples(y_pred)


def _is_of_batch(
    steps: Steps, _: Any, x: Any = None, y: Any = None, y_pred: Any = None, *__: Any, **___: Any
) -> bool:
    del x, y
    return all(map(steps.covers, keras.tree.flatten(y_pred)))
