"""Batches that Python code makes: every rank makes the whole one, and keeps its part."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from farandole.data import Part, ReadBatches, part_of
from farandole.data._order import shuffled
from farandole.data._tree import as_array, map_leaves, samples
from farandole.keras._bases import PyDataset
from farandole.keras._global.arrays import class_weights, marked_parts
from farandole.keras._global.how import How, Source, as_tuple, shapes, symbol


def of_py_dataset(x: Any, how: How) -> Source:
    how.refuse_index("a PyDataset")
    length = x.num_batches
    if length == 0:
        raise how.error("the PyDataset has no batches")
    first = _arrays(x[0])
    n = samples(first, f"{how.what}: the PyDataset's first batch")
    rows = [
        f"a PyDataset of {length} batches",
        f"shuffle {how.shuffle!r}, seed {how.seed}",
        f"first batch of {n} samples",
        *shapes(first),
    ]
    read = ReadBatches()
    data = _PyParts(x, how, read)
    return Source(data, lambda: sample(_parts(first, how)[0]), rows, n, read)


def of_generator(x: Any, how: How) -> Source:
    how.refuse_index("a generator")
    first = next(x, None)
    if first is None:
        raise how.error("the generator gives no batch")
    first = _arrays(first)
    n = samples(first, f"{how.what}: the generator's first batch")
    read = ReadBatches()

    def parts() -> Iterator[Any]:
        of_pass = read.begin()
        for number, given in enumerate(itertools.chain([first], x)):
            batch = _arrays(given)
            read.note(of_pass, number, batch)
            yield marked_parts(_parts(batch, how), how.block)

    rows = ["a generator", f"first batch of {n} samples", *shapes(first)]
    return Source(parts(), lambda: sample(_parts(first, how)[0]), rows, n, read)


def sample(part: Part) -> Any:
    """KerasTensors with the shapes and dtypes of a part."""
    return map_leaves(lambda leaf: symbol(leaf.shape[1:], leaf.dtype, len(leaf)), part.batch)


def _arrays(batch: Any) -> Any:
    return map_leaves(as_array, as_tuple(batch))


def _parts(batch: tuple[Any, ...], how: How) -> list[Part]:
    parts, mine = how.here
    return [weighted(part_of(batch, parts, g), how) for g in mine]


def weighted(part: Part, how: How) -> Part:
    """The part with weights by class, if the caller asked for them."""
    if how.class_weight is None:
        return part
    if len(part.batch) != 2:
        raise how.error(
            "class_weight goes with batches of inputs and targets, without weights of their own"
        )
    x, y = part.batch
    return Part((x, y, class_weights(y, how.class_weight, how)), part.share)


class _PyParts(PyDataset):
    """This rank's parts of the batches of a user's PyDataset."""

    def __init__(self, own: Any, how: How, read: ReadBatches) -> None:
        super().__init__(
            workers=own.workers,
            use_multiprocessing=own.use_multiprocessing,
            max_queue_size=own.max_queue_size,
        )
        self._own, self._how, self._read = own, how, read
        self._first, self._begun = how.passes, 0
        self._order: tuple[int, np.ndarray[Any, Any]] | None = None

    @property
    def num_batches(self) -> int | None:
        length: int | None = self._own.num_batches
        return length

    def __getitem__(self, index: int) -> Any:
        begun = self._begun
        batch = _arrays(self._own[self._place(index, begun)])
        self._read.note(max(begun, 1), index, batch)
        return marked_parts(_parts(batch, self._how), self._how.block)

    def begin_at(self, epoch: int) -> None:
        self._first = epoch

    def _place(self, index: int, begun: int) -> int:
        length = self.num_batches
        if not self._how.shuffle or length is None:
            return index
        # If a number of steps ends an epoch, one pass spans several epochs, in one order.
        epoch = self._first + (0 if self._how.steps else max(begun - 1, 0))
        known = self._order  # other threads may ask, too
        if known is None or known[0] != epoch:
            known = self._order = epoch, shuffled(length, self._how.seed, epoch)
        return int(known[1][index])

    def on_epoch_begin(self) -> None:
        self._begun += 1
        self._own.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._own.on_epoch_end()
