"""Inputs whose results are known exactly, in every dtype.

An array is filled with a pattern of small integers, over and over. The pattern's length is a prime,
so that data that lands a power of two beside its place is seen. Sums and products stay below the
integers that the dtype holds exactly, so a result has one right value, compared with ``==``.
Patterns change from call to call: what an earlier call left behind is wrong.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

LENGTH = 1009

# Up to where a dtype that is no integer holds every integer.
_EXACT = {"float16": 2**11, "bfloat16": 2**8, "float32": 2**24, "float64": 2**53, "bool": 1}

_TURNS = 4  # different patterns, in turn


def storage(dtype: str) -> np.dtype[Any]:
    """The numpy dtype whose bytes these are: numpy has no bfloat16."""
    return np.dtype("uint16" if dtype == "bfloat16" else dtype)


def most_exact(dtype: str) -> int:
    """Up to where the dtype holds every integer."""
    return _EXACT[dtype] if dtype in _EXACT else int(np.iinfo(dtype).max)


def contribution(rank: int, ranks: int, turn: int, op: str, dtype: str) -> NDArray[np.int64]:
    """The pattern, as integers, that `rank` puts in on its turn-th call."""
    noise = np.random.default_rng(turn % _TURNS).integers(0, 1 << 16, LENGTH)
    if op == "product":  # two at most on four ranks, so 16 at most
        return 1 + ((noise >> rank) & 1 if rank < 4 and dtype != "bool" else 0 * noise)
    values = max(2, min(50, most_exact(dtype) // ranks + 1))
    return (noise + 7 * rank) % values


def reduced(parts: list[NDArray[np.int64]], op: str, dtype: str) -> NDArray[Any]:
    """The reduction of these patterns, as stored."""
    stack = np.stack(parts)
    if op == "mean":
        return _mean(stack.sum(0), len(parts), dtype)
    fold = {"sum": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply}[op]
    return encode(fold.reduce(stack), dtype)


def _mean(total: NDArray[np.int64], ranks: int, dtype: str) -> NDArray[Any]:
    """As docs/determinism.md defines it: floats times 1/P, integers divided."""
    if dtype not in ("float16", "bfloat16", "float32", "float64"):
        return encode(total // ranks, dtype)
    wide = np.dtype("float64" if dtype == "float64" else "float32").type
    return encode(total.astype(wide) * wide(1 / ranks), dtype)


def encode(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """The values in the dtype, rounded to nearest even."""
    if dtype != "bfloat16":
        return values.astype(dtype)
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def lay(pattern: NDArray[Any], out: NDArray[Any], phase: int = 0) -> None:
    """Fills `out` with the pattern, beginning at its `phase`-th element."""
    tile = np.roll(pattern, -(phase % LENGTH))
    whole = out.size // LENGTH * LENGTH
    out[:whole].reshape(-1, LENGTH)[...] = tile
    out[whole:] = tile[: out.size - whole]


def count_wrong(pattern: NDArray[Any], found: NDArray[Any], phase: int = 0) -> int:
    """How many elements differ from what `lay` would have written."""
    tile = np.roll(pattern, -(phase % LENGTH))
    whole = found.size // LENGTH * LENGTH
    wrong = np.count_nonzero(found[:whole].reshape(-1, LENGTH) != tile)
    return int(wrong + np.count_nonzero(found[whole:] != tile[: found.size - whole]))


def round_up(count: int, multiple: int) -> int:
    return math.ceil(count / multiple) * multiple
