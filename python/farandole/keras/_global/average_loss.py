"""``tf.nn.compute_average_loss`` with a global batch, in a step of a shared model.

Gradients are averaged there by the weight of each rank's samples, which is right for a mean over
them. This function divides their sum by the number of all samples, so its result gets the factor
of a loss with ``reduction="sum"`` (losses.py). A sum that the program divides by itself is found in
its graph (loss_kinds.py), and its gradients get the factor.
"""

from __future__ import annotations

from functools import cache, wraps
from typing import Any

import keras

from farandole.keras._global.steps import LEFT_OPEN, running


@cache
def learn() -> None:
    """Patches TensorFlow, and Keras' losses, so that a step knows that they are means."""
    _learn_of_losses()
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
        if steps is not None:
            steps.knows_loss = True
        if global_batch_size is None or steps is None or steps.share is None:
            return loss
        count, total = steps.count_and_total()
        return loss * tf.cast(total / count, loss.dtype)

    tf.nn.compute_average_loss = tf.autograph.experimental.do_not_convert(compute_average_loss)
    _learn_of_tapes(tf)


def _learn_of_tapes(tf: Any) -> None:
    """Patches tapes: the target that a step differentiates is its loss, and an optimizer should get
    the gradients as they are."""
    own = tf.GradientTape.gradient

    @wraps(own)
    def gradient(self: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        steps = running()
        if steps is None or not steps.weighs_gradients:
            return own(self, target, *args, **kwargs)
        steps.see_losses(tf.nest.flatten(target))
        gradients = own(self, target, *args, **kwargs)
        steps.see_gradients(tf.nest.flatten(gradients))
        return gradients

    tf.GradientTape.gradient = gradient


def _learn_of_losses() -> None:
    own = keras.losses.Loss.__call__

    @wraps(own)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        steps = running()
        if steps is not None and self.reduction not in ("sum", *LEFT_OPEN):
            steps.knows_loss = True
        return own(self, *args, **kwargs)

    keras.losses.Loss.__call__ = call
