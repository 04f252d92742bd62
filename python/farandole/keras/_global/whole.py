"""Whole batches, for a rank that reads those of all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras

from farandole.data._logical import Block
from farandole.keras._global.how import Source
from farandole.keras._global.marks import unmarked

WHOLE = Block(1, range(1))  # a rank reads the batch of all


class Reading:
    """Reads the batches of a Source in epochs.

    Args:
        steps: batches of an epoch, if the program sets it; the next epoch then goes on there.
    """

    def __init__(self, source: Source, steps: int | None) -> None:
        self._data, self._steps = source.data, steps
        self._open: Iterator[Any] | None = None

    def epoch(self) -> Iterator[tuple[Any, ...]]:
        """Its batches: inputs, targets, weights, as far as they are there."""
        if isinstance(self._data, keras.utils.PyDataset):
            yield from self._of_numbers()
            return
        if self._open is None or self._steps is None:
            self._open = iter(self._data)
        for done, marked in enumerate(self._open, 1):
            yield _batch(marked)
            if done == self._steps:
                return

    def _of_numbers(self) -> Iterator[tuple[Any, ...]]:
        data = self._data
        data.on_epoch_begin()
        length = self._steps if self._steps is not None else data.num_batches
        begin = 0
        if self._steps is not None:
            begin, self._at = self._at, self._at + self._steps
        for i in range(begin, begin + (length or 0)):
            yield _batch(data[i])
        data.on_epoch_end()

    _at = 0


def _batch(marked: Any) -> tuple[Any, ...]:
    parts, _ = unmarked(marked)
    batch = parts[0]
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,)
