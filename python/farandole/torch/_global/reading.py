"""A rank's part of every batch, in micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from farandole.data._parts import part_of
from farandole.data._same import checksum
from farandole.data._share import Share, taken
from farandole.data._share import share as share_of
from farandole.data._torch import Asked, loader_of_numbers, loader_of_slices
from farandole.data._tree import map_leaves
from farandole.torch._global.numbers import Numbers


class Micro(NamedTuple):
    """What a rank computes on at once."""

    batch: Any
    samples: int  # that count: 0 where this rank has none of the batch


class Whole(NamedTuple):
    """A batch of all ranks, as one of them sees it."""

    micros: list[Micro]
    total: int  # samples of all ranks
    checksum: int  # of the whole batch, where it is known


class Reader(Protocol):
    numbers: Numbers | None

    def read(self, after: int) -> Iterator[Whole]:
        """The batches of a pass, after so many of them."""


class NumberReader:
    """Reads this rank's samples alone, by their numbers."""

    def __init__(self, loader: Any, batches: Any, where: tuple[int, int], at_once: int | None):
        self.numbers: Numbers | None = Numbers(batches)
        self._where = where
        self._loader = loader_of_numbers(loader, _Mine(self.numbers, where, at_once), tuple)

    def read(self, after: int) -> Iterator[Whole]:
        del after  # the numbers know
        micros: list[Micro] = []
        for batch, (count, total) in self._loader:
            micros.append(Micro(batch, count))
            mine = share_of(total, *self._where)
            if sum(each.samples for each in micros) == mine.stop - mine.start:
                yield Whole(micros, total, 0)
                micros = []


class _Mine:
    """A batch sampler: the sample numbers of a rank's micro-batches."""

    def __init__(self, batches: Numbers, where: tuple[int, int], at_once: int | None) -> None:
        self._batches, self._where, self._at_once = batches, where, at_once

    def __iter__(self) -> Iterator[Asked]:
        for numbers in self._batches:
            mine, share = taken(len(numbers), *self._where)
            rows = numbers[mine]
            for part in pieces(len(rows), self._at_once):
                count = min(part.stop - part.start, share.samples)
                yield Asked(rows[part], Share(count, share.total))


class SliceReader:
    """Makes whole batches, and keeps this rank's part."""

    numbers: Numbers | None = None

    def __init__(self, loader: Any, where: tuple[int, int], at_once: int | None, same: bool):
        self._at_once = at_once
        self._loader = loader_of_slices(loader, _Slice(loader.collate_fn, where, same))

    def read(self, after: int) -> Iterator[Whole]:
        for i, (batch, (count, total), checksum_of_all) in enumerate(self._loader):
            if i < after:
                continue
            parts = pieces(max(count, 1), self._at_once)
            micros = [Micro(cut(batch, p), min(p.stop - p.start, count)) for p in parts]
            yield Whole(micros, total, checksum_of_all)


class _Slice:
    """Samples to a rank's part of their batch, with a checksum of the first batch."""

    def __init__(self, own: Any, where: tuple[int, int], same: bool) -> None:
        self._own, self._where, self._check = own, where, same

    def __call__(self, samples: list[Any]) -> tuple[Any, Any, int]:
        whole = self._own(samples)
        total = checksum(whole) if self._check else 0
        self._check = False  # one in every worker will do
        part = part_of(whole, *self._where)
        return part.batch, tuple(part.share), total


def cut(batch: Any, part: slice) -> Any:
    return map_leaves(lambda leaf: leaf[part], batch)


def pieces(n: int, at_once: int | None) -> list[slice]:
    """Of n samples, so many at once."""
    size = at_once or n
    return [slice(begin, min(begin + size, n)) for begin in range(0, n, size)]
