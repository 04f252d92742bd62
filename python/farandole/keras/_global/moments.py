"""Mean and variance of all ranks' samples, inside of a step.

A rank's statistics are its count, mean and variance per channel. All ranks get those of all, and
join them in rank order: a variance is made of distances from means, never of the difference of two
large numbers. They get them as the sum of tables in which each rank has filled its own row, since
the gradient of a sum is the one that all backends agree on.
"""

from __future__ import annotations

from typing import Any

import keras

from farandole import _world
from farandole.keras._global.steps import Steps
from farandole.keras._global.sums import sum_over_ranks


def moments_of_all_ranks(inputs: Any, mask: Any, axes: list[int], steps: Steps, name: str) -> Any:
    """As Keras' ``BatchNormalization._moments``, whose place it takes, with its epsilon in the
    count that a mask leaves. A rank's sample that does not count is in neither."""
    ops = keras.ops
    count, mean, variance = _of_this_rank(inputs, mask, axes)
    count = ops.where(steps.counts, count, ops.zeros_like(count))
    table = _rows_of_all_ranks(ops.stack([count, mean, variance]), name)
    counts, means, variances = table[:, 0], table[:, 1], table[:, 2]
    total = ops.sum(counts, 0)
    weights = counts / (ops.maximum(total, 1) if mask is None else total + keras.config.epsilon())
    mean = ops.sum(weights * means, 0)
    return mean, ops.sum(weights * (variances + ops.square(means - mean)), 0)


def _of_this_rank(inputs: Any, mask: Any, axes: list[int]) -> tuple[Any, Any, Any]:
    """Count, mean, variance: a number per channel each."""
    ops = keras.ops
    if mask is None:
        mean, variance = ops.moments(inputs, axes)
        shape, count = ops.shape(inputs), 1
        for axis in axes:
            count = count * shape[axis]
        return ops.ones_like(mean) * ops.cast(count, mean.dtype), mean, variance
    there = ops.cast(ops.broadcast_to(ops.expand_dims(mask, -1), ops.shape(inputs)), "bool")
    count = ops.sum(ops.cast(there, inputs.dtype), axes, keepdims=True)
    least = ops.maximum(count, 1)
    mean = ops.sum(ops.where(there, inputs, 0), axes, keepdims=True) / least
    distance = ops.where(there, inputs - mean, 0)
    variance = ops.sum(ops.square(distance), axes, keepdims=True) / least
    return ops.reshape(count, (-1,)), ops.reshape(mean, (-1,)), ops.reshape(variance, (-1,))


def _rows_of_all_ranks(mine: Any, name: str) -> Any:
    others = keras.ops.zeros_like(mine)
    rows = [mine if rank == _world.rank() else others for rank in range(_world.size())]
    return sum_over_ranks(keras.ops.stack(rows), name)
