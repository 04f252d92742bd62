"""Tables of tests over dimensions that do not depend on each other.

`GRID=full` (make test-all) takes every combination. Otherwise every pair of values of two
dimensions occurs once at least, which finds whatever two dimensions together break; and a slice of
all combinations is drawn by a seed that pytest prints at its start, so that many runs come to see
the whole. Of other tables rows are drawn by the same seed (draws.py). GRID_SEED=N draws the slice
of a run that failed.
"""

from __future__ import annotations

import itertools
import os
import random
import zlib
from collections.abc import Callable, Sequence
from typing import Any

DRAWN = 8  # one combination in so many, beside the pairs

Row = tuple[Any, ...]


class Combinations(list[Row]):
    """Rows of a table that leaves combinations out; the type marks it for draws.py."""


def full() -> bool:
    return os.environ.get("GRID") == "full"


def seed() -> int:
    """The seed of this run, which tests/conftest.py sets for all workers."""
    return int(os.environ["GRID_SEED"])


def combinations(
    *dimensions: Sequence[Any], fits: Callable[..., bool] = lambda *_: True
) -> list[Row]:
    """The rows of a table whose columns have these values; `fits` refuses rows without meaning."""
    every = [row for row in itertools.product(*dimensions) if fits(*row)]
    if full():
        return every
    chosen = set(_pairs(every))
    dice = random.Random(zlib.crc32(repr(every).encode()) + seed())
    chosen.update(dice.sample(range(len(every)), -(-len(every) // DRAWN)))
    return Combinations(every[i] for i in sorted(chosen))


def drawn(name: str, rows: Sequence[Any], one_in: int) -> list[Any]:
    """One row in `one_in`, but at least one, by this run's seed and the table's name."""
    dice = random.Random(zlib.crc32(name.encode()) + seed())
    return dice.sample(list(rows), -(-len(rows) // one_in))


def _pairs(every: Sequence[Row]) -> list[int]:
    """Numbers of a few rows that together hold every pair of values in `every`. Greedy: the next
    row is the one with the most new pairs (Cohen et al., The AETG system, 1997)."""
    of_row = [set(itertools.combinations(enumerate(map(repr, row)), 2)) for row in every]
    missing = set().union(*of_row)
    chosen = []
    while missing:
        best = max(range(len(every)), key=lambda i: len(of_row[i] & missing))
        chosen.append(best)
        missing -= of_row[best]
    return chosen
