"""Whole batches, for a rank that reads those of all ranks: rank 0 alone (policy `leader`), or each
rank of a pipeline."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import keras

from farandole import _world
from farandole._core import InvalidArgument
from farandole.common._objects import broadcast_object
from farandole.data import FromRank0
from farandole.data._logical import Block
from farandole.keras._global.dealt import of_rank_0
from farandole.keras._global.how import How, Source, as_tuple
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
        self._length = length_of(source.data)
        self._done = 0  # batches of the pass that is open

    def epoch(self) -> Iterator[tuple[Any, ...]]:
        """Its batches: inputs, targets, weights, as far as they are there. As in Keras, it ends
        where the data end, and the next one begins them anew."""
        is_numbered = isinstance(self._data, keras.utils.PyDataset)
        if is_numbered:
            self._data.on_epoch_begin()
        if self._open is None or self._steps is None:
            self._open, self._done = iter(self._data), 0
        before = self._done
        for marked in itertools.islice(self._open, self._steps):
            self._done += 1
            yield _batch(marked)
        if self._done - before != self._steps or self._done == self._length:
            self._open = None
        if is_numbered:
            self._data.on_epoch_end()


def length_of(data: Any) -> int | None:
    """How many batches a pass has; None: that is not known, or there is no end."""
    with suppress(TypeError):
        return len(data)
    length: int | None = getattr(data, "num_batches", None)
    return length


def _batch(marked: Any) -> tuple[Any, ...]:
    return as_tuple(unmarked(marked).batch[0])


def led(x: Any, make: Callable[[How], Source], how: How) -> Source:
    """Collective.

    Args:
        x: on rank 0: inputs. Elsewhere it is not looked at.
        make: on rank 0: the source of x and what comes with it.
    """
    if isinstance(x, FromRank0):
        return of_rank_0(x, how)
    mine = _Batches(x, make, how) if _world.rank() == 0 else None
    return of_rank_0(FromRank0(mine), how)


def rank_0_validates(validation: Any, split: Any) -> bool:
    """Collective: whether it has passed data for that.

    Raises:
        InvalidArgument: they are to be a part of the training data, which others may not have.
    """
    if split:
        raise InvalidArgument(
            f"fit(): validation_split={split} with data_policy='leader', by which rank 0 alone has "
            "the data\n  advice: pass validation_data"
        )
    has: bool = broadcast_object(validation is not None, 0, "validation_data")
    return has


class _Batches:
    """Whole batches, read as by a single rank. What is wrong with them is found when their number
    is asked for, which is where the other ranks wait to be told."""

    def __init__(self, x: Any, make: Callable[[How], Source], how: How) -> None:
        self._x, self._make = x, make
        # Weights by class are added to the parts.
        self._how = replace(how, policy="auto", block=WHOLE, class_weight=None)
        self._source: Source | None = None
        self._reading: Reading | None = None

    def __len__(self) -> int:
        """Raises TypeError where it is not known."""
        length = length_of(self._opened().data)
        if length is None:
            raise TypeError("it is not known how many batches there are")
        return length

    def __iter__(self) -> Iterator[Any]:
        source = self._opened()
        if self._reading is None:
            is_known = length_of(source.data) is not None
            self._reading = Reading(source, None if is_known else self._how.steps)
        return self._reading.epoch()

    def _opened(self) -> Source:
        if self._source is None:
            if self._x is None:
                raise self._how.error("x is None on rank 0, which is the one that reads")
            try:
                self._source = self._make(self._how)
            except TypeError as error:
                raise InvalidArgument(str(error)) from error
        return self._source
