"""Batch normalization over the batches of all ranks, which may differ in length."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from farandole import _world
from farandole._arguments import checked
from farandole._core import InvalidArgument
from farandole.tensorflow._calls import Request, run
from farandole.tensorflow._graph import as_written, goes_on

__all__ = ["SyncBatchNormalization"]


class SyncBatchNormalization(tf.keras.layers.BatchNormalization):  # type: ignore[misc]
    """``keras.layers.BatchNormalization`` over the joined batch of all ranks.

    Every rank calls it as often as the others. In inference, and on one rank, it is the plain
    layer. For Keras on TensorFlow.

    Args:
        fused: must be False: Horovod's argument, which Keras no longer has.
        axis: as of ``keras.layers.BatchNormalization``, like all that follow.

    Examples:
        >>> import farandole.tensorflow as hvd
        >>> hvd.init()
        >>> layer = hvd.SyncBatchNormalization(axis=-1)
    """

    over_all_ranks = True  # farandole.keras.Model joins its statistics, by the samples that count

    @checked
    def __init__(
        self,
        fused: bool = False,
        *,
        axis: int = -1,
        momentum: float = 0.99,
        epsilon: float = 1e-3,
        center: bool = True,
        scale: bool = True,
        **others: Any,
    ) -> None:
        if fused:
            raise InvalidArgument("SyncBatchNormalization does not support fused=True")
        super().__init__(axis, momentum, epsilon, center, scale, **others)

    def _moments(self, inputs: Any, mask: Any) -> Any:
        mean, variance = super()._moments(inputs, mask)
        if not _world.is_initialized() or (_world.size() == 1 and not goes_on()):
            return mean, variance
        return _joined(mean, variance, self._count(inputs, mask))

    def _count(self, inputs: Any, mask: Any) -> Any:
        """The number of values per channel on this rank."""
        values = tf.size(inputs) / tf.shape(inputs)[self.axis]
        if mask is None:
            return values
        return values * tf.reduce_mean(tf.cast(mask, values.dtype))


@as_written
def _joined(mean: Any, variance: Any, count: Any) -> tuple[Any, Any]:
    """Mean and variance of all ranks' values. In float64, since a variance is the difference of
    two larger numbers here."""
    mine, spread = tf.cast(mean, tf.float64), tf.cast(variance, tf.float64)
    n = tf.cast(count, tf.float64)
    # A rank without values has no mean.
    mine, spread = (tf.where(n > 0, x, tf.zeros_like(x)) for x in (mine, spread))
    sums = tf.stack([n * mine, n * (spread + mine * mine), n * tf.ones_like(mine)])
    total = _sum(sums)
    joined = total[0] / total[2]
    wide = tf.maximum(total[1] / total[2] - joined * joined, 0.0)
    return tf.cast(joined, mean.dtype), tf.cast(wide, variance.dtype)


def _sum(statistics: Any) -> Any:
    # A strategy of ours knows which replicas have no samples.
    context = tf.distribute.get_replica_context() if tf.distribute.has_strategy() else None
    if context is not None and getattr(context.strategy, "replicas_are_ranks", False):
        return context.all_reduce("SUM", statistics)
    return run(Request("all_reduce", [statistics], "statistics of SyncBatchNormalization"))[0]
