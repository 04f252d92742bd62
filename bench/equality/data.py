"""The data that all frameworks train on, and the comparison of results."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np

EPOCHS, PARTS = 2, 4
# Samples and batch; 8 do not divide by 3 ranks, and of a last batch of 1 most ranks have none.
REMAINDERS = {"32 by 8": (32, 8), "35 by 7": (35, 7), "33 by 8": (33, 8)}
STEPS, BATCH = 20, 8
WIDTH, LENGTH, WORDS, CLASSES = 6, 5, 11, 3
_rng = np.random.default_rng(5)
X = _rng.normal(size=(40, WIDTH)).astype("float32")
Y = (X[:, :1] - X[:, 1:2]).astype("float32")
_SAMPLES = STEPS * BATCH - 5  # a last batch of 3, which leaves a logical rank without samples
INPUTS = {
    "MLP": _rng.normal(size=(_SAMPLES, WIDTH)).astype("float32"),
    "CNN": _rng.normal(size=(_SAMPLES, 8, 8, 1)).astype("float32"),
    "transformer": _rng.integers(0, WORDS, size=(_SAMPLES, LENGTH)),
}
LABELS = _rng.integers(0, CLASSES, size=_SAMPLES)


def batches(x: Any, y: Any, size: int) -> list[tuple[Any, Any]]:
    return [(x[at : at + size], y[at : at + size]) for at in range(0, len(x), size)]


def apart(mine: Iterable[Any], right: Iterable[Any]) -> float:
    """The largest difference; of large numbers the relative one."""
    largest = 0.0
    for a, b in zip(mine, right, strict=True):
        a, b = np.asarray(a, float), np.asarray(b, float)
        largest = max(largest, float((np.abs(a - b) / np.maximum(np.abs(b), 1.0)).max()))
    return largest


def digest(arrays: Iterable[Any]) -> str:
    found = hashlib.sha256()
    for array in arrays:
        found.update(np.asarray(array).tobytes())
    return found.hexdigest()
