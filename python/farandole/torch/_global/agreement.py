"""That all ranks read the same batches, and equally many: an error on every rank where they do not.

Where batches are sample numbers, ranks compare the numbers: in the first, second, fourth, eighth, …
batch of a pass, and as it ends. Where every rank makes the whole batch, nobody knows before how
many there are, and they ask each other before every one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from farandole import _world
from farandole._core import InvalidArgument
from farandole.common._objects import (
    agree,
    agree_prepared,
    allgather_object,
    attempt,
    compare,
    gathered,
)
from farandole.data._same import refuse_other
from farandole.torch._global.numbers import Position
from farandole.torch._global.reading import Whole

WHAT = "the batches of a GlobalBatch"
ADVICE = (
    "give every rank the same DataLoader, with the batch of all ranks; one seed for whatever "
    "shuffles or draws the order; the same state, where it goes on from one"
)
_END, _FAILED = -1, -2


def begin(reads: Iterator[Whole], rows: Sequence[str], first: list[str]) -> Whole | None:
    """Collective: the first batch of a pass; None where there is none.

    Args:
        rows: what ranks compare.
        first: filled by the reading: likewise.
    """
    whole, error = attempt(lambda: next(reads, None))
    if _world.size() == 1:
        if error is not None:
            raise error
        return whole
    known = "no further batch" if whole is None else f"a first batch of {whole.total} samples"
    agree_prepared("a GlobalBatch", WHAT, [*rows, known, *first], error, ADVICE, None)
    return whole


def same_so_far(position: Position, sums: Sequence[int]) -> None:
    """Collective: whether the batches up to this one have had the same samples everywhere.

    Args:
        sums: checksums of the pass after so many batches.

    Raises:
        Mismatch: they have not; on every rank, naming the first one.
    """
    if _world.size() == 1:
        return
    done = position.batches
    theirs = gathered(np.array([[done, sums[done]]], np.int64), f"numbers of {WHAT}", 0)
    if (theirs == theirs[0]).all():
        return
    every = allgather_object(list(sums[1 : done + 1]), f"all numbers of {WHAT}")
    for number, values in enumerate(zip(*every, strict=False), 1):
        refuse_other(
            list(values), f"in epoch {position.epoch + 1}: the order up to batch {number}", ADVICE
        )


def end(position: Position, sums: Sequence[int]) -> None:
    """Compares the whole pass, as it ends. Collective."""
    if _world.size() > 1:
        agree(f"{WHAT} at their end", [f"{position.batches} batches"], advice=ADVICE)
        same_so_far(position, sums)


def in_step(reads: Iterator[Whole], position: Position) -> Iterator[Whole]:
    """The batches of a pass of unknown length. Collective in every batch."""
    while True:
        whole, error = attempt(lambda: next(reads, None))
        if _world.size() > 1:
            _require_all(whole, error, position)
        if error is not None:
            raise error
        if whole is None:
            return
        yield whole


def _require_all(whole: Whole | None, error: Exception | None, position: Position) -> None:
    mine = [_FAILED if error else _END if whole is None else whole.total]
    mine.append(0 if whole is None else whole.checksum)
    theirs = gathered(np.array([mine], np.int64), f"next of {WHAT}", 0)
    if error is not None or (theirs == theirs[0]).all():
        return
    for rank in np.flatnonzero(theirs[:, 0] == _FAILED).tolist():
        raise InvalidArgument(f"rank {rank} could not read the next batch; it says why")
    if (theirs[:, 0] != theirs[0, 0]).any():
        words = ["no more" if n == _END else f"{n} samples" for n in theirs[:, 0].tolist()]
        compare("the next batch", {r: [each] for r, each in enumerate(words)}, ADVICE)
    refuse_other(
        theirs[:, 1].tolist(),
        f"in epoch {position.epoch + 1}: batch {position.batches + 1}",
        f"{ADVICE}; if only what is random within samples differs, same_batches=False leaves out "
        "this comparison",
    )
