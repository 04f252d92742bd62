"""Steps of a serial model on this rank's part of a batch.

Note [How a share reaches a step]

What Keras reads are not batches, but ({_BATCH: batch, _SHARE: [[count, total]]},): the share is
data, so it is right in any program, however far ahead it is read and however many steps run in one
call. The model's steps are replaced, on this one object, by steps that take it off, keep it in
`Steps.share` while the model's own step runs or is traced, and there

    Optimizer.scale_loss     multiplies by count * size / total: the mean of the ranks' gradients is
                             that of all samples
    each loss                see losses.py: where its divisor is not the number of samples
    joined statistics        leave a sample out that does not count (moments.py)
    the metrics' state       is of this rank's samples, and is summed over ranks when somebody asks
                             (metrics.py)

A rank without samples computes on one that does not count (farandole.data): its gradient weighs 0,
and its metrics and moving averages stay as they were, but for those of all ranks' samples.

Data without a share (a user's own calls of the model) are steps as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from farandole import _world
from farandole._core import InvalidArgument
from farandole.data import Share
from farandole.data._logical import Block

_BATCH, _SHARE, _TOTAL = "farandole batch", "farandole share", "farandole total"
OUTPUTS = "farandole outputs"


def marked(batch: Any, share: Any) -> tuple[dict[str, Any]]:
    """What Keras reads; `share`: of shape (1, 2)."""
    read = {_BATCH: batch, _SHARE: share}
    if keras.backend.backend() == "jax":
        read[_TOTAL] = _as_shape(share)
    return (read,)


def _as_shape(share: Any) -> Any:
    """As many rows of nothing as the whole batch has samples: a program of JAX knows shapes alone,
    and is to be another one where other ranks have more samples."""
    if not hasattr(share, "graph"):
        return np.zeros((int(share[0, 1]), 0), np.float32)
    import tensorflow as tf  # a dataset's

    return tf.zeros([tf.cast(share[0, 1], tf.int32), 0])


def unmarked(data: Any) -> tuple[Any, Any]:
    """The batch and its share; None where it has none."""
    first = data[0] if isinstance(data, tuple | list) and data else None
    if isinstance(first, dict) and first.keys() >= {_BATCH, _SHARE}:
        return first[_BATCH], first[_SHARE]
    return data, None


def total_of(data: Any) -> int | None:
    """The samples of the whole batch, on JAX."""
    first = data[0] if isinstance(data, tuple | list) and data else None
    return int(first[_TOTAL].shape[0]) if isinstance(first, dict) and _TOTAL in first else None


def marked_outputs(outputs: Any, share: Any) -> dict[str, Any]:
    return {OUTPUTS: outputs, _SHARE: share}


def unmarked_outputs(outputs: dict[str, Any]) -> tuple[Any, list[Share]]:
    rows = keras.ops.convert_to_numpy(outputs[_SHARE]).astype(int).tolist()
    return outputs[OUTPUTS], [Share(*row) for row in rows]


class Steps:
    """What the steps of one model know of the batch that they compute."""

    def __init__(self, block: Block | None = None) -> None:
        self.block = block  # of logical ranks (logical.py)
        self.share: Any = None  # a tensor, inside a step whose batch has one
        self.total: int | None = None  # on JAX: samples of that batch
        self.held: list[Any] | None = None  # gradients, inside a step that is to update nothing
        self._scaled = False  # the step's loss has its weight

    def count_and_total(self) -> tuple[Any, Any]:
        """Tensors of no dimension; the count is at least 1."""
        return keras.ops.maximum(self.share[0, 0], 1.0), self.share[0, 1]

    @property
    def counts(self) -> Any:
        """Whether this rank has samples in the batch."""
        return self.share[0, 0] > 0

    def scaled(self, loss: Any) -> Any:
        """With the weight of this rank's samples."""
        if self.share is None:
            return loss
        self._scaled = True
        # The gradients of logical ranks are summed, those of ranks averaged.
        ranks = float(_world.size()) if self.block is None else 1.0
        weight = self.share[0, 0] * ranks / self.share[0, 1]
        return loss * keras.ops.cast(weight, keras.backend.standardize_dtype(loss.dtype))

    @contextmanager
    def of(self, share: Any, total: int | None = None) -> Iterator[None]:
        self.share, self.total, self._scaled = share, total, False
        try:
            yield
        finally:
            self.share = self.total = None

    @contextmanager
    def holding(self, share: Any) -> Iterator[list[Any]]:
        """Gradients that the optimizer gets meanwhile come here, and update nothing."""
        held: list[Any] = []
        self.held = held
        try:
            with self.of(share):
                yield held
        finally:
            self.held = None

    def require_scaled(self, model: Any) -> None:
        shared = _world.size() > 1 or self.block is not None
        if not self._scaled and model.optimizer is not None and shared:
            raise InvalidArgument(
                f"train_step() of {type(model).__name__} does not call "
                "self.optimizer.scale_loss(loss), by which ranks with more samples weigh more\n"
                "  advice: compute gradients of self.optimizer.scale_loss(loss), as Keras' own "
                "train_step() does"
            )


def weigh_loss(optimizer: Any, steps: Steps) -> None:
    """From now on the optimizer scales losses by the weight of the step's share, too."""
    own = type(optimizer).scale_loss.__get__(optimizer)
    optimizer.scale_loss = lambda loss: steps.scaled(own(loss))
