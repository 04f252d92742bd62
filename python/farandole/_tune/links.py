"""Measures the cost of messages between hosts, with one rank on each of them.

The first host is paired with each other one. A round is an all-reduce of four bytes, which are sent
along with the ranks' agreement, one message each way, less the time of the same call in Python. A
byte is measured by an all-reduce that is long enough for its rounds to matter little. The slowest
pair counts: a collective waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

import farandole as fd
from farandole import _core
from farandole._tune.fit import Link

_CALLS = 5  # between two looks at the time
_PART_OF_TIME = 0.5  # for each of the two
_MIB = 1 << 20
_MOST_BYTES = 16 * _MIB
_LONG = 0.02  # seconds of a call whose rounds do not count
_LEAST_LEFT = 0.1  # of a round, when Python's part is taken off


def measure(seconds: float) -> Link:
    """Joins a world of one rank on each host, and measures for about that long.

    Raises:
        InvalidArgument: ranks share a host, or there is one alone.
    """
    fd.init()
    if fd.cross_size() != fd.size() or fd.size() < 2:
        raise fd.InvalidArgument(
            f"links are measured by one rank on each of several hosts; {fd.size()} ranks found "
            f"themselves on {fd.cross_size()}"
        )
    return measure_from_first(range(1, fd.size()), seconds)


def measure_from_first(others: Sequence[int], seconds: float) -> Link:
    """Measures rank 0 with each of `others`, for about that long; the same on every rank."""
    python = python_part()
    mine = np.zeros(3)
    for other in others:
        pair = fd.split(0 if fd.rank() in (0, other) else None)
        if pair is not None:
            mine = np.maximum(mine, _measure_pair(pair, seconds / len(others), python))
        fd.barrier()
    return Link(*fd.all_reduce(mine, "max").tolist())


def python_part() -> float:
    """Seconds of a call that are Python's: it has nobody to wait for."""
    alone = fd.split(fd.rank())
    assert alone is not None
    return float(np.median(times(alone, np.ones(1, np.float32), 0)))


def _measure_pair(pair: fd.Group, seconds: float, python: float) -> NDArray[np.float64]:
    word = np.ones(1, np.float32)
    small = float(np.median(times(pair, word, seconds * _PART_OF_TIME)))
    round_ = max(small - python, _LEAST_LEFT * small)
    size = _MIB
    while size < _MOST_BYTES and _call(pair, size) < _LONG:
        size *= 2
    data = np.ones(size // 4, np.float32)
    large = times(pair, data, seconds * (1 - _PART_OF_TIME), "halving_doubling")
    folds = size / 2 * _core.tuning.numbers()["channel_folded_byte"]
    # Its rounds: one to agree, and two exchanges of halves, by which each sends all of the size.
    byte = (float(np.median(large)) - 3 * round_ - folds) / size
    return np.array([round_, max(byte, _LEAST_LEFT * np.median(large) / size), spread(large)])


def _call(pair: fd.Group, size: int) -> float:
    """Seconds of a call that is not the first one; equal on both ranks."""
    return float(times(pair, np.ones(size // 4, np.float32), 0, "halving_doubling")[-1])


def times(
    group: fd.Group, data: NDArray[np.float32], seconds: float, algorithm: str | None = None
) -> NDArray[np.float64]:
    """Seconds of successive calls, the slower rank's; as many as fit, equal on all ranks."""
    level: Literal["fast"] | None = "fast" if algorithm == "mpi" else None
    readings: list[NDArray[np.float64]] = []
    left = seconds
    while left > 0 or len(readings) < 2:
        mine = np.empty(_CALLS)
        fd.barrier(group=group)
        for i in range(_CALLS):
            data.fill(1)
            start = time.perf_counter()
            fd.all_reduce(data, out=data, algorithm=algorithm, level=level, group=group)
            mine[i] = time.perf_counter() - start
        readings.append(fd.all_reduce(mine, "max", group=group))
        left -= float(readings[-1].sum())
    return np.concatenate(readings[1:])  # the first ones connect


def spread(readings: NDArray[np.float64]) -> float:
    """By how much slow readings exceed quick ones."""
    low, high = np.quantile(readings, (0.25, 0.75))
    return float(high / low - 1)
