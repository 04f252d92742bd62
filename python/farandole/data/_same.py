"""Whether all ranks read the same batches.

With policy `slice` every rank makes the batch by itself. Where they make different ones (a shuffle
without a seed), samples are lost and others come twice, and nobody notices. So each rank keeps a
checksum of every batch that it reads, and they compare these: when an epoch ends, where they speak
to each other anyway, and in the second, fourth, eighth, … batch, so that what is computed in vain
is at most as much as was right before.
"""

from __future__ import annotations

import zlib
from collections import Counter
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from farandole._core import Mismatch
from farandole._tables import listed
from farandole.common._objects import allgather_object
from farandole.data._tree import leaves, map_leaves

ADVICE = (
    "give every rank the same batches: pass a seed to what shuffles or draws at random, as in "
    "dataset.shuffle(1000, seed=42), or call tf.random.set_seed(42) or "
    "keras.utils.set_random_seed(42) before the dataset is made; if only what is random within "
    "samples differs, same_batches=False leaves out this comparison"
)
_MOST = 1 << 15  # checksums that are kept if ranks never compare: the latest
ELEMENTS = 1 << 14  # of a large array, that a checksum looks at: some µs


def checksum(batch: Any) -> int:
    """The checksum of all values of a batch."""
    total = 0
    for leaf in leaves(batch):
        array = np.asarray(leaf)
        values = repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes()
        total = zlib.crc32(values, total)
    return total


def sampled(batch: Any) -> Any:
    """The batch with large arrays cut down to some values of every sample, so that a checksum takes
    little time at any size."""
    return map_leaves(_sampled, batch)


def _sampled(leaf: Any) -> Any:
    array = np.asarray(leaf)
    if array.ndim < 2 or array.size <= ELEMENTS:
        return array
    return array.reshape(len(array), -1)[:, :: array.size // ELEMENTS]


def compares_after(batches: int) -> bool:
    """Whether ranks compare when they have got so many: 2, 4, 8, …"""
    return batches > 1 and batches & (batches - 1) == 0


class _Place(NamedTuple):
    """The position of a batch. Batches count from 0, passes from 1."""

    of_pass: int
    number: int

    def __str__(self) -> str:
        return f"batch {self.number + 1} of pass {self.of_pass} over the data"


class ReadBatches:
    """Checksums of the batches that a rank has read of some data, to compare with other ranks'."""

    def __init__(self) -> None:
        self._passes = 0
        self._sums: dict[_Place, int] = {}  # that have not been compared
        self.compared = 0  # checksums

    # ---- called by readers, in any thread ----

    def begin(self) -> int:
        """The number of a pass over the data, which begins."""
        self._passes += 1
        return self._passes

    def note(self, of_pass: int, number: int, batch: Any) -> None:
        """A batch of that pass, from 0."""
        self.tell(of_pass, number, checksum(sampled(batch)))

    def tell(self, of_pass: int, number: int, total: int) -> None:
        """The same, by its checksum."""
        if len(self._sums) >= _MOST:
            with suppress(RuntimeError, StopIteration):  # other threads tell, too
                self._sums.pop(next(iter(self._sums)), None)
        self._sums[_Place(of_pass, number)] = total

    # ---- called by the program ----

    def compare(self, what: str, advice: str = ADVICE) -> None:
        """Compares the batches that all ranks have read since the last time, however far each has
        read ahead. Collective.

        Raises:
            Mismatch: they differ; on every rank, naming the first batch and who has another one.
        """
        theirs = allgather_object(dict(self._sums), f"batches of {what}")
        known = set(theirs[0]).intersection(*theirs[1:])
        for place in sorted(known):
            refuse_other([each[place] for each in theirs], f"in {what}: {place}", advice)
        self.compared += len(known)
        # Drops batches of earlier passes that some ranks read ahead and others never reached.
        newest = max(known).of_pass if known else 0
        left = {place for place in dict(self._sums) if place.of_pass < newest - 1}
        for place in known | left:
            self._sums.pop(place, None)


def refuse_other(values: list[Any], what: str, advice: str) -> None:
    """Raises Mismatch where ranks have other values than most; of two, rank 1 has the other."""
    usual = Counter(values).most_common(1)[0][0]
    others = [rank for rank, value in enumerate(values) if value != usual]
    if others:
        raise Mismatch(
            f"ranks read different batches {what} is another one on {listed('rank', others)} than "
            f"on rank {values.index(usual)}\n  advice: {advice}"
        )
