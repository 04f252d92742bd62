"""The order of samples: the same on every rank, and for any number of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

DEFAULT_SEED = 42


def shuffled(n: int, seed: int, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The numbers below ``n`` in the order of one epoch; another epoch has another one."""
    return np.random.default_rng([seed, epoch]).permutation(n)


def shuffled_within(
    n: int, batch_size: int, seed: int, epoch: int
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Likewise, where batches stay as they are and each is shuffled by itself."""
    random = np.random.default_rng([seed, epoch])
    order = np.arange(n)
    for begin in range(0, n, batch_size):
        random.shuffle(order[begin : begin + batch_size])
    return order
