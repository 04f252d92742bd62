"""Maps the number of a step, counted over all workers, to its batch of samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from farandole._arguments import shown
from farandole._core import InvalidArgument
from farandole.data import Arrays
from farandole.keras._global.arrays import BATCH_SIZE

Batch = tuple[Any, Any, Any]  # x, y, sample_weight


class Whole:
    """Arrays of which every rank has all samples. A batch is the same on any worker."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays
        self.steps: int | None = len(arrays)

    def batch(self, epoch: int, step: int) -> Batch:
        whole: Batch = self._arrays.part(step, epoch, 1, 0).batch
        return whole

    def end_epoch(self) -> None:
        """Nothing to do."""


class Numbered:
    """A keras.utils.PyDataset."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.steps: int | None = dataset.num_batches

    def batch(self, epoch: int, step: int) -> Batch:
        del epoch
        return unpacked(self._dataset[step])

    def end_epoch(self) -> None:
        self._dataset.on_epoch_end()


class Own:
    """A dataset that can only be read in order: each worker reads its own, batch after batch."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._iterator: Iterator[Any] | None = None
        self.steps: int | None = None

    def batch(self, epoch: int, step: int) -> Batch:
        del epoch, step
        for _ in range(2):
            if self._iterator is None:
                self._iterator = iter(self._source)
            try:
                return unpacked(next(self._iterator))
            except StopIteration:
                self._iterator = None  # from the beginning
        raise InvalidArgument("fit: the dataset has no batches, or cannot be read a second time")

    def end_epoch(self) -> None:
        """Nothing to do."""


Source = Whole | Numbered | Own


def source_of(
    x: Any, y: Any, sample_weight: Any, batch_size: int | None, shuffle: bool, seed: int
) -> Source:
    """Raises InvalidArgument if `x` gives no batches, or another argument does not go with it."""
    if isinstance(x, keras.utils.PyDataset):
        found: Source = Numbered(x)
    elif all(
        hasattr(each, "__getitem__") and hasattr(each, "shape") for each in keras.tree.flatten(x)
    ):
        if x is None:
            raise InvalidArgument("fit: x is missing")
        data = _each((x, y, sample_weight), _array)
        size = BATCH_SIZE if batch_size is None else batch_size
        return Whole(Arrays(data, size, shuffle=bool(shuffle), seed=seed))
    elif hasattr(x, "__iter__"):
        found = Own(x)
    else:
        raise InvalidArgument(f"fit: x is {shown(x)}; arrays, a PyDataset, or a dataset of batches")
    for name, value in [("y", y), ("sample_weight", sample_weight), ("batch_size", batch_size)]:
        if value is not None:
            raise InvalidArgument(f"fit: {name} is given beside a dataset, which has its own")
    return found


def unpacked(batch: Any) -> Batch:
    """Inputs, targets and weights, as numpy arrays."""
    parts = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    if not 1 <= len(parts) <= 3:
        raise InvalidArgument(f"fit: a batch has {len(parts)} parts; x, y, sample_weight")
    return tuple(_each((*parts, None, None)[:3], _array))


def _array(value: Any) -> np.ndarray:
    return np.asarray(keras.ops.convert_to_numpy(value))


def _each(data: Any, act: Any) -> Any:
    return keras.tree.map_structure(lambda each: None if each is None else act(each), data)
