"""A rank's part of every batch, or its parts, in micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from farandole.data._logical import Block
from farandole.data._parts import part_of
from farandole.data._same import checksum, sampled
from farandole.data._share import taken
from farandole.data._torch import Asked, collated, loader_of_numbers, loader_of_slices
from farandole.data._tree import map_leaves
from farandole.torch._global.numbers import Numbers


class Micro(NamedTuple):
    """A micro-batch: the samples that a rank computes on at once."""

    batch: Any
    samples: int  # that count: 0 where this part of the batch has none
    part: int  # of the batch: this rank, or a logical rank of it


class Whole(NamedTuple):
    """A batch of all ranks, as one of them sees it."""

    micros: list[Micro]
    total: int  # samples of all ranks
    checksum: int  # of the whole batch, where it was made


class Reader(Protocol):
    numbers: Numbers | None

    def read(self, after: int) -> Iterator[Whole]:
        """The batches of a pass, except for the first `after` of them."""


class _Piece(NamedTuple):
    """Describes the piece of a batch that is one micro-batch."""

    samples: int  # that count
    total: int  # of the batch
    part: int
    last: bool  # of this rank's pieces of the batch


class NumberReader:
    """Reads this rank's samples alone, by their numbers.

    Args:
        block: of the parts of a batch, which are this rank's.
        at_once: samples of a part, at most.
    """

    def __init__(self, loader: Any, batches: Any, block: Block, at_once: int | None):
        self.numbers: Numbers | None = Numbers(batches)
        self._loader = loader_of_numbers(loader, _Mine(self.numbers, block, at_once), tuple)

    def read(self, after: int) -> Iterator[Whole]:
        del after  # the numbers know
        micros: list[Micro] = []
        for batch, (count, total, part, last) in self._loader:
            micros.append(Micro(batch, count, part))
            if last:
                yield Whole(micros, total, 0)
                micros = []


class _Mine:
    """A batch sampler: the sample numbers of a rank's micro-batches."""

    def __init__(self, batches: Numbers, block: Block, at_once: int | None) -> None:
        self._batches, self._block, self._at_once = batches, block, at_once

    def __iter__(self) -> Iterator[Asked]:
        parts, mine = self._block
        for numbers in self._batches:
            asked = []
            for part in mine:
                of_part, share = taken(len(numbers), parts, part)
                rows = numbers[of_part]
                for piece in pieces(len(rows), self._at_once):
                    count = min(piece.stop - piece.start, share.samples)
                    asked.append((rows[piece], _Piece(count, share.total, part, False)))
            for i, (rows, piece_of) in enumerate(asked, 1):
                yield Asked(rows, piece_of._replace(last=i == len(asked)))


class SliceReader:
    """Makes whole batches, and keeps this rank's parts."""

    numbers: Numbers | None = None

    def __init__(self, loader: Any, block: Block, at_once: int | None, same: bool):
        self._at_once = at_once
        self._loader = loader_of_slices(loader, _Slice(loader.collate_fn, block, same))

    def read(self, after: int) -> Iterator[Whole]:
        for i, (parts, total, checksum_of_all) in enumerate(self._loader):
            if i < after:
                continue
            micros = [
                Micro(cut(batch, piece), min(piece.stop - piece.start, count), part)
                for batch, count, part in parts
                for piece in pieces(max(count, 1), self._at_once)
            ]
            yield Whole(micros, total, checksum_of_all)


class _Slice:
    """Samples to a rank's parts of their batch, with a checksum of all of it."""

    def __init__(self, own: Any, block: Block, same: bool) -> None:
        self._own, self._block, self._check = own, block, same

    def __call__(self, samples: list[Any]) -> tuple[list[tuple[Any, int, int]], int, int]:
        whole = collated(self._own, samples)
        known = checksum(sampled(whole)) if self._check else 0
        cuts = [(part, part_of(whole, self._block.parts, part)) for part in self._block.mine]
        parts = [(each.batch, each.share.samples, part) for part, each in cuts]
        return parts, cuts[0][1].share.total, known


def cut(batch: Any, part: slice) -> Any:
    return map_leaves(lambda leaf: leaf[part], batch)


def pieces(n: int, at_once: int | None) -> list[slice]:
    """Cuts n samples into slices of at most `at_once`; None: into one."""
    size = at_once or n
    return [slice(begin, min(begin + size, n)) for begin in range(0, n, size)]
