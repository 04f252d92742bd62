"""A rank's part of every batch: of arrays, by `index`; of what gives batches, by `slice`
(_policy.py)."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np

from farandole import _world
from farandole._arguments import shown
from farandole._core import InvalidArgument
from farandole.data._order import DEFAULT_SEED, shuffled, shuffled_within
from farandole.data._share import Share, taken
from farandole.data._tree import map_leaves, samples


class Part(NamedTuple):
    """A rank's part of a batch, and how much of it counts."""

    batch: Any
    share: Share


def part_of(batch: Any, size: int | None = None, rank: int | None = None) -> Part:
    """A rank's part of a batch of all ranks (policy ``slice``).

    Args:
        batch: arrays or tensors of one first dimension; dicts, tuples and lists of them.
        size: ranks; default: this world's.
        rank: default: this one.

    Raises:
        InvalidArgument: the batch is empty, has no first dimension or several.
    """
    mine, share = taken(samples(batch, "the batch"), *_here(size, rank))
    return Part(map_leaves(lambda leaf: leaf[mine], batch), share)


def _here(size: int | None, rank: int | None) -> tuple[int, int]:
    return (
        _world.size() if size is None else size,
        _world.rank() if rank is None else rank,
    )


class Arrays:
    """Arrays in batches of all ranks, of which each rank touches its part (policy ``index``).

    Args:
        data: arrays of one length; dicts, tuples and lists of them.
        batch_size: samples of all ranks together.
        shuffle: another order in each epoch; or "batch": within each batch.
        seed: of the orders.
        drop_last: leave out a last batch that is not full.

    Raises:
        InvalidArgument: an argument is wrong, or there are no samples.
    """

    def __init__(
        self,
        data: Any,
        batch_size: int = 32,
        *,
        shuffle: bool | Literal["batch"] = False,
        seed: int = DEFAULT_SEED,
        drop_last: bool = False,
    ) -> None:
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise InvalidArgument(
                f"batch_size is {shown(batch_size)}; it is a whole number of at least 1, the "
                "samples of all ranks together"
            )
        self.data = data
        self.samples = samples(data, "the data")
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        whole = self.samples // batch_size
        self._length = whole if drop_last else math.ceil(self.samples / batch_size)
        if self._length == 0:
            raise InvalidArgument(
                f"the data have {self.samples} samples, which make no batch of {batch_size}"
            )
        self._order = functools.lru_cache(2)(self._new_order)

    def __len__(self) -> int:
        """Batches of an epoch."""
        return self._length

    def part(
        self, index: int, epoch: int = 0, size: int | None = None, rank: int | None = None
    ) -> Part:
        """A rank's part of one batch."""
        begin = index * self.batch_size
        n = min(self.batch_size, self.samples - begin)
        mine, share = taken(n, *_here(size, rank))
        rows: Any = slice(begin + mine.start, begin + mine.stop)
        order = self._order(epoch)
        if order is not None:
            rows = order[rows]
        return Part(map_leaves(lambda leaf: leaf[rows], self.data), share)

    def parts(
        self, epoch: int = 0, size: int | None = None, rank: int | None = None
    ) -> Iterator[Part]:
        """The parts of an epoch."""
        return (self.part(index, epoch, size, rank) for index in range(len(self)))

    def _new_order(self, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]] | None:
        if not self.shuffle:
            return None
        if self.shuffle == "batch":
            return shuffled_within(self.samples, self.batch_size, self.seed, epoch)
        return shuffled(self.samples, self.seed, epoch)
