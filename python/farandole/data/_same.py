"""Whether all ranks read the same batches.

With policy `slice` every rank makes the batch by itself. Where they make different ones (a shuffle
without a seed), samples are lost and others come twice, and nobody notices. So each rank keeps a
checksum of the first batch of every pass over the data, and they compare these.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from farandole import _world
from farandole._core import Mismatch
from farandole.common._objects import allgather_object
from farandole.data._tree import leaves

ADVICE = (
    "give every rank the same batches: pass a seed to what shuffles or draws at random, as in "
    "dataset.shuffle(1000, seed=42), or call tf.random.set_seed(42) or "
    "keras.utils.set_random_seed(42) before the dataset is made; if only what is random within "
    "samples differs, same_batches=False leaves out this comparison"
)


Note = Callable[[list[Any]], None]  # what hears of the first batch of a pass


def checksum(batch: Any) -> int:
    """Of the arrays' values."""
    total = 0
    for leaf in leaves(batch):
        array = np.asarray(leaf)
        values = repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes()
        total = zlib.crc32(values, total)
    return total


class FirstBatches:
    """Of the passes over one rank's data."""

    def __init__(self) -> None:
        self._sums: list[int] = []
        self._compared = 0

    def note(self, batch: Any) -> None:
        """A pass begins with this batch. May be called by the thread that reads ahead."""
        self._sums.append(checksum(batch))

    @property
    def compared(self) -> int:
        """How many passes have been."""
        return self._compared

    def compare(self, what: str, advice: str = ADVICE) -> None:
        """Collective: those that have come since the last time.

        Raises:
            Mismatch: the ranks have different ones; on every rank.
        """
        theirs = allgather_object(self._sums[self._compared :], f"batches of {what}")
        for i, sums in enumerate(zip(*theirs, strict=False)):
            if len(set(sums)) > 1:
                alike = [r for r, each in enumerate(sums) if each == sums[0]]
                other = next(r for r in range(_world.size()) if r not in alike)
                raise Mismatch(
                    f"ranks read different batches in {what}: in pass {self._compared + i + 1} "
                    f"over the data the first batch of rank {other} is not that of rank 0\n"
                    f"  advice: {advice}"
                )
        self._compared += min(map(len, theirs))
