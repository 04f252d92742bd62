"""The learning rate of a Keras optimizer, and what depends on it."""

from __future__ import annotations

from typing import Any

import keras

from farandole._core import InvalidArgument
from farandole.keras._accumulated import inner_of
from farandole.learning_rate import keras_schedule

keras_schedule()  # saved models name it


def set_learning_rate(optimizer: Any, rate: float, *, correct: bool) -> None:
    """With `correct`, velocities that contain the old rate are scaled to the new one.

    Horovod multiplies the momentum for one batch instead. In Keras 3 that is a Python number inside
    a program that is compiled already; scaling the velocity v in m·v - lr·g is the same.
    """
    base = inner_of(optimizer)
    schedules = keras.optimizers.schedules.LearningRateSchedule
    if isinstance(base._learning_rate, schedules):
        raise InvalidArgument(
            "the optimizer has a LearningRateSchedule, which a callback cannot overrule; give the "
            "optimizer a number"
        )
    before = float(keras.ops.convert_to_numpy(base.learning_rate))
    if rate == before:
        return
    base.learning_rate = rate
    if correct and before > 0:
        for velocity in _velocities(base):
            velocity.assign(keras.ops.convert_to_numpy(velocity) * (rate / before))


def _velocities(optimizer: Any) -> list[Any]:
    """Where gradients times learning rates accumulate: in SGD and RMSprop with momentum."""
    if not getattr(optimizer, "momentum", 0):
        return []
    found = getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", None) or []
    return [v for v in found if v is not None]
