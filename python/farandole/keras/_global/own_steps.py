"""Losses and optimizers in a step of the user's own, of which TensorFlow and Keras are taught.

Gradients are averaged there by the weight of each rank's samples, which is right for a mean over
them: Keras' losses, and what ``compute_loss`` gives. ``tf.nn.compute_average_loss`` with a global
batch divides a sum by the number of all samples, so its result gets the factor of a loss with
``reduction="sum"`` (losses.py). A sum that the program divides by itself is found in its graph
(loss_kinds.py), and its gradients get the factor.

Optimizers that such a step has besides the model's reduce, too. Nobody says where a program keeps
them: one that is applied in a step of a shared model becomes a DistributedOptimizer then.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import keras

from farandole._core import InvalidArgument
from farandole.keras._global.loss_kinds import Kind, compares_samples, kind_of
from farandole.keras._global.losses import mask_of
from farandole.keras._global.samples_apart import mixes_samples
from farandole.keras._global.steps import LEFT_OPEN, Steps, running
from farandole.keras._wrapped import distributed_in, is_updating

_OF_DIVISOR = (
    "a step calls the loss {} by itself, which divides by {}: each rank takes those of its own "
    "samples alone, so the loss and its gradients differ from one process\n"
    "  advice: compile(loss=…) with it, and self.compute_loss() in the step"
)
_ADDED = (
    "layer '{}' adds a loss of one number, and how that combines samples is not known: it is taken "
    "for a mean over the samples of its batch. One that mixes samples, as of means over the batch "
    "(a divergence of activities, a balance of loads), mixes those of one rank alone\n"
    "  advice: add_loss() of a number for each sample, which Keras sums up"
)


@cache
def learn() -> None:
    """Patches TensorFlow and Keras, so that a step knows which losses are means, and optimizers."""
    _learn_optimizers()
    _learn_losses()
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


def _learn_losses() -> None:
    own = keras.losses.Loss.__call__

    @wraps(own)
    def call(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        loss = own(self, y_true, y_pred, sample_weight)
        steps = running()
        if steps is None or not _is_mean(steps, self, y_pred):
            return loss
        if steps.share is not None and steps.tells_of_losses:
            divisor = _own_divisor(self, y_pred, sample_weight)
            if divisor is not None:
                steps.say_once(_OF_DIVISOR.format(type(self).__name__, divisor))
        return steps.know(loss)

    keras.losses.Loss.__call__ = call


def _own_divisor(loss: Any, y_pred: Any, sample_weight: Any) -> str | None:
    """By what else than the number of samples a loss is known to divide."""
    if mixes_samples(loss, y_pred):
        return "what it finds in the samples together"
    if mask_of(y_pred) is not None or getattr(loss, "ignore_class", None) is not None:
        return "how many samples are left by a mask"
    if loss.reduction == "mean_with_sample_weight" and sample_weight is not None:
        return "the sum of sample weights"
    return None


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


def _is_mean(steps: Steps, loss: Any, y_pred: Any) -> bool:
    """Of the loss of each sample of the part."""
    is_reduced = loss.reduction not in ("sum", *LEFT_OPEN)
    return is_reduced and steps.covers(y_pred) and not compares_samples(y_pred)


def share_compute_loss(model: Any, steps: Steps) -> None:
    """What a compute_loss() of the model's class returns, which Keras' own step takes for the loss
    of the batch."""
    own = model.compute_loss

    @wraps(own)
    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        loss = own(*args, **kwargs)
        return loss if steps.share is None or loss is None else steps.as_mean(loss)

    model.compute_loss = compute_loss


def share_added_losses(model: Any, steps: Steps) -> None:
    """Losses that layers add, which Keras sums up where they are one for each sample."""
    own = model._aggregate_additional_loss

    @wraps(own)
    def aggregate(loss: Any) -> Any:
        value = own(loss)
        if steps.share is None:
            return value
        kind = Kind.SUM if steps.is_of_each(loss) else kind_of(loss)
        layer = _layer_that_adds(model, loss) if kind is None else None
        if layer is not None:
            steps.say_once(_ADDED.format(layer.name))
        return steps.weighed_as(kind, value)

    model._aggregate_additional_loss = aggregate


def _layer_that_adds(model: Any, loss: Any) -> Any:
    """None for penalties of weights, which are alike on all ranks, and for what regularizers of
    Keras make of outputs, which is a mean over samples."""
    for layer in model._flatten_layers():
        # On JAX the scope that had them is over, and the layer knows their numbers alone.
        if id(loss) in layer._loss_ids or any(each is loss for each in layer._get_own_losses()):
            maker = layer if layer.activity_regularizer is None else layer.activity_regularizer
            return None if type(maker).__module__.startswith("keras.") else layer
    return None


def _is_of_batch(
    steps: Steps, _: Any, x: Any = None, y: Any = None, y_pred: Any = None, *__: Any, **___: Any
) -> bool:
    del x, y
    return all(map(steps.covers, keras.tree.flatten(y_pred)))


def _learn_optimizers() -> None:
    owner: Any = next(c for c in keras.optimizers.Optimizer.__mro__ if "apply" in vars(c))
    for kind in (owner, keras.optimizers.LossScaleOptimizer):
        for name in ("apply", "stateless_apply"):
            if name in vars(kind):
                setattr(kind, name, _taught(name, vars(kind)[name]))


def _taught(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(own)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_updating() or distributed_in(self) is not None or not _adopted(self):
            return own(self, *args, **kwargs)
        return getattr(self, name)(*args, **kwargs)

    return method


def _adopted(optimizer: Any) -> bool:
    """Whether it reduces from now on: where it is applied in a shared step."""
    steps = running()
    if steps is None or steps.share is None:
        return False
    if steps.block is not None:
        raise InvalidArgument(
            f"logical_ranks={steps.block.parts}: train_step() applies '{optimizer.name}', which is "
            "not the optimizer that the model was compiled with; the parts of a batch are "
            "computed one by one, and updated once\n  advice: no logical_ranks"
        )
    steps.adopt(optimizer)
    return True
