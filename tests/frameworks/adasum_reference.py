"""Adasum in numpy, along the canonical tree: what every framework's results are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def numpys_adasum(leaves: Sequence[Array]) -> Array:
    """In float64; the tree splits at the largest power of two below the number of leaves."""
    if len(leaves) == 1:
        return np.asarray(leaves[0], np.float64)
    half = 1 << ((len(leaves) - 1).bit_length() - 1)
    return _fold(numpys_adasum(leaves[:half]), numpys_adasum(leaves[half:]))


def _fold(a: Array, b: Array) -> Array:
    dot, aa, bb = (a * b).sum(), (a * a).sum(), (b * b).sum()
    return (1 - dot / (2 * aa) if aa else 1) * a + (1 - dot / (2 * bb) if bb else 1) * b
