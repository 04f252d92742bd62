"""Optimizers that scale losses, in a loop of a scope: all replicas skip a step, or none does.

Keras looks whether gradients are finite before its replicas sum them, so each would decide by its
own. Here they are summed first, as one process has them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from farandole.strategy._collectives import SUM
from farandole.strategy._extended import as_is
from farandole.strategy._variables import is_ours

_REDUCE = "_all_reduce_sum_gradients"  # of Keras' optimizers, as they update


def learn() -> None:
    """As soon as the program has imported Keras."""
    keras = sys.modules.get("keras")
    there = keras is not None and hasattr(keras, "optimizers")
    if there and keras.backend.backend() == "tensorflow":
        _teach(keras.optimizers.LossScaleOptimizer)


@functools.cache
def _teach(scaling: Any) -> None:
    own = scaling.apply

    @as_is
    @functools.wraps(own)
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        context = tf.distribute.get_replica_context()
        if context is None or not is_ours(context.strategy) or _reduces(self.inner_optimizer):
            return own(self, grads, trainable_variables)
        gradients = list(grads)
        there = [i for i, gradient in enumerate(gradients) if gradient is not None]
        sums = context.all_reduce(SUM, [gradients[i] for i in there]) if there else []
        for i, reduced in zip(there, sums, strict=True):
            gradients[i] = reduced
        with _reduced(self.inner_optimizer):
            return own(self, gradients, trainable_variables)

    scaling.apply = apply


def _reduces(optimizer: Any) -> bool:
    """By itself, before it looks at gradients."""
    from farandole.keras._wrapped import Distributed

    return isinstance(optimizer, Distributed)


@contextmanager
def _reduced(optimizer: Any) -> Iterator[None]:
    vars(optimizer)[_REDUCE] = list
    try:
        yield
    finally:
        del vars(optimizer)[_REDUCE]
