"""Any data, read by rank 0 alone (policy `leader`)."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from farandole import _world
from farandole._core import InvalidArgument
from farandole.common._objects import broadcast_object
from farandole.data import FromRank0
from farandole.keras._global.dealt import of_rank_0
from farandole.keras._global.how import How, Source
from farandole.keras._global.whole import WHOLE, Reading


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
        data = self._opened().data
        length = getattr(data, "num_batches", None)
        return len(data) if length is None else int(length)

    def __iter__(self) -> Iterator[Any]:
        source = self._opened()
        if self._reading is None:
            of_number = getattr(source.data, "num_batches", 0) is None
            self._reading = Reading(source, self._how.steps if of_number else None)
        return self._reading.epoch()

    def _opened(self) -> Source:
        if self._source is None:
            if isinstance(self._x, types.NoneType):
                raise self._how.error("x is None on rank 0, which is the one that reads")
            try:
                self._source = self._make(self._how)
            except TypeError as error:
                raise InvalidArgument(str(error)) from error
        return self._source
