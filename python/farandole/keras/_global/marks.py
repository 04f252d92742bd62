"""What Keras reads instead of a batch, and gets instead of outputs: they carry a share.

See Note [How a share reaches a step] in steps.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np

from farandole.data import Share

_BATCH, _SHARE, _TOTAL = "farandole batch", "farandole share", "farandole total"
_OUTPUTS = "farandole outputs"


def marked(batch: Any, share: Any) -> tuple[dict[str, Any]]:
    """Returns what Keras reads instead of a batch. `share` has the shape (1, 2)."""
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


class Shared(NamedTuple):
    """A batch with its share."""

    batch: Any
    share: Any  # None where it has none
    total: int | None = None  # samples of the whole batch, on JAX


def unmarked(data: Any) -> Shared:
    first = data[0] if isinstance(data, tuple | list) and data else None
    if not isinstance(first, dict) or not first.keys() >= {_BATCH, _SHARE}:
        return Shared(data, None)
    total = int(first[_TOTAL].shape[0]) if _TOTAL in first else None
    return Shared(first[_BATCH], first[_SHARE], total)


def of_shared(step: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    """A model's step: of a batch with its share, or else its own. On JAX a state comes first."""

    def either(*given: Any) -> Any:
        *state, data = given
        shared = unmarked(data)
        return own(*given) if shared.share is None else step(*state, shared)

    return either


def marked_outputs(outputs: Any, share: Any) -> dict[str, Any]:
    return {_OUTPUTS: outputs, _SHARE: share}


def unmarked_outputs(outputs: dict[str, Any]) -> tuple[Any, list[Share]]:
    rows = keras.ops.convert_to_numpy(outputs[_SHARE]).astype(int).tolist()
    return outputs[_OUTPUTS], [Share(*row) for row in rows]
