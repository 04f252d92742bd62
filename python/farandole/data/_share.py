"""A rank's samples of a global batch, and the weight of its mean gradient: arithmetic alone."""

from __future__ import annotations

from typing import NamedTuple

from farandole._core import InvalidArgument
from farandole.common._reduction import share as rows_of

FEW = 16  # samples of a rank, below which their statistics say little of the batch


class Share(NamedTuple):
    """How much of a batch a rank has."""

    samples: int  # of this rank; 0 where it computes on a sample that does not count
    total: int  # of all ranks

    def weight(self, size: int) -> float:
        """The factor on a rank's mean gradient with which the mean over ``size`` ranks is the mean
        over all samples: ``samples * size / total``."""
        return self.samples * size / self.total


def share(n: int, size: int, rank: int) -> slice:
    """A rank's samples of a batch: contiguous, ``n // size`` of them, one more for the first
    ``n % size`` ranks.

    Args:
        n: samples of the batch, at least 0.
        size: ranks.
        rank: one of them.

    Raises:
        InvalidArgument: there is no such rank, or no such batch.

    Examples:
        >>> [share(7, 3, rank) for rank in range(3)]
        [slice(0, 3, None), slice(3, 5, None), slice(5, 7, None)]
    """
    if n < 0 or not 0 <= rank < size:
        raise InvalidArgument(f"share(n={n}, size={size}, rank={rank}): there is no such share")
    begin = rank * (n // size) + min(rank, n % size)
    return slice(begin, begin + rows_of(n, size, rank))


def taken(n: int, size: int, rank: int) -> tuple[slice, Share]:
    """The samples that a rank computes on, and its share. No framework computes on an empty batch,
    so a rank whose share is empty takes the batch's first sample, with weight 0.

    Raises:
        InvalidArgument: the batch is empty.
    """
    if n < 1:
        raise InvalidArgument("a batch is empty; no rank can compute on it")
    mine = share(n, size, rank)
    count = mine.stop - mine.start
    return (mine if count else slice(0, 1)), Share(count, n)


def places(totals: list[int], size: int) -> list[list[range]]:
    """By rank and batch, where a rank's samples stand in the order of all batches.

    Args:
        totals: the batches' samples.
    """
    begin, table = 0, list[list[range]]()
    for n in totals:
        parts = [share(n, size, rank) for rank in range(size)]
        table.append([range(begin + part.start, begin + part.stop) for part in parts])
        begin += n
    return [[batch[rank] for batch in table] for rank in range(size)]
