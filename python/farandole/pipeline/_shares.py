"""Splits a batch into micro-batches: arithmetic alone."""

from __future__ import annotations

from farandole.data._share import share
from farandole.pipeline._places import Place


def micro_batches(samples: int, place: Place, count: int) -> list[slice]:
    """The micro-batches of this rank's replica, in a batch of all replicas. The first have one
    sample more where they do not divide; where there are too few, the last have none.

    Args:
        count: micro-batches of a replica.
    """
    mine = share(samples, place.replicas, place.replica)
    parts = [share(mine.stop - mine.start, count, k) for k in range(count)]
    return [slice(mine.start + each.start, mine.start + each.stop) for each in parts]
