"""The samples of each batch, and the position of a program in their order.

The order is that of the program of one process, whatever the number of ranks: so a pass over the
data goes on where it was left, on any number of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch

from farandole._arguments import shown
from farandole._core import InvalidArgument


@dataclass
class Position:
    """A position in the passes over the data."""

    epoch: int = 0  # passes that are over
    batches: int = 0  # of the present one that the program has got
    checksum: int = 0  # of their samples' numbers
    generators: list[torch.Tensor] = field(default_factory=list)  # as the present one began

    @classmethod
    def of(cls, state: Any, data: Mapping[str, int]) -> Position:
        """The position in a state dict of the same data. Raises InvalidArgument."""
        if not isinstance(state, Mapping) or not {*_KEYS, *_DATA} <= state.keys():
            raise InvalidArgument(
                f"load_state_dict(): {shown(state)} is not what state_dict() of a GlobalBatch gives"
            )
        for key, value in data.items():
            if state.get(key) != value:
                raise InvalidArgument(
                    f"load_state_dict(): {key} was {state.get(key)} and is {value} here\n"
                    "  advice: go on with the same data and the same batch of all ranks, and as "
                    "many logical ranks"
                )
        return cls(**{key: state[key] for key in _KEYS})

    def state(self, data: Mapping[str, int]) -> dict[str, Any]:
        return {key: getattr(self, key) for key in _KEYS} | dict(data)


_KEYS = ("epoch", "batches", "checksum", "generators")
_DATA = ("samples", "batch_size")


class Numbers:
    """A batch sampler that gives the numbers of another one, and can begin in the middle."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches
        drawn = (getattr(each, "generator", None) for each in (batches, sampler_of(batches)))
        found = {id(g): g for g in drawn if isinstance(g, torch.Generator)}
        self._generators = list(found.values())
        self._from: Position | None = None  # the next pass is that one, from there on
        self._left: Position | None = None  # the last pass was left there
        self.sums = [0]  # of the present pass: checksums of its numbers after so many batches
        self.first: list[Any] = []
        self._began = self.generators()

    def __len__(self) -> int:
        return len(self._batches)

    def generators(self) -> list[torch.Tensor]:
        """The present states of the generators that draw the order."""
        return [generator.get_state() for generator in self._generators]

    def began(self) -> list[torch.Tensor]:
        """The same, as the present pass began."""
        return self._began

    def go_on(self, position: Position) -> None:
        """The next pass is one that was begun before."""
        self._from, self._left = position, None

    def leave(self, position: Position) -> None:
        """The present pass is not read to its end. How far ahead it was read depends on ranks and
        workers; the next order must not."""
        self._left = position

    def __iter__(self) -> Iterator[list[Any]]:
        left, self._left = self._left, None
        if left is not None:
            self._restore(left.generators)
            for _ in islice(self._batches, left.batches):
                pass
        begin, self._from = self._from, None
        if begin is not None:
            self._restore(begin.generators)
        self._began, self.sums, self.first = self.generators(), [0], []
        for batch in self._batches:
            numbers = list(batch)
            self.sums.append(zlib.crc32(_bytes(numbers), self.sums[-1]))
            given = len(self.sums) - 1
            if begin is not None and given <= begin.batches:
                if given == begin.batches:
                    self._check(begin)
                continue
            self.first = self.first or numbers
            yield numbers
        if begin is not None and len(self.sums) - 1 < begin.batches:
            raise InvalidArgument(
                f"the state is one after {begin.batches} batches, and there are "
                f"{len(self.sums) - 1}\n  advice: go on with the same data"
            )

    def _check(self, begin: Position) -> None:
        if self.sums[-1] != begin.checksum:
            raise InvalidArgument(
                f"the first {begin.batches} batches are not those that were taken before the state "
                "was saved\n  advice: where the sampler is your own, let it give the same order "
                "again in every run, or draw it by a torch.Generator that is its attribute "
                "'generator'"
            )

    def _restore(self, states: list[torch.Tensor]) -> None:
        if len(states) != len(self._generators):
            raise InvalidArgument(
                f"the state has {len(states)} generators of the order, and the sampler "
                f"{len(self._generators)}\n  advice: go on with the same sampler"
            )
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


def sampler_of(batches: Any) -> Any:
    return getattr(batches, "sampler", None)


def _bytes(numbers: list[Any]) -> bytes:
    array = np.asarray(numbers)
    return repr(numbers).encode() if array.dtype.hasobject else array.tobytes()
