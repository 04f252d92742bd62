"""Arrays in batches of all ranks, of which a rank touches its own samples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from farandole.data import Arrays, Part, ReadBatches, part_of
from farandole.data._logical import Block, ranks_own
from farandole.data._same import checksum, sampled
from farandole.data._tree import as_array, map_leaves, samples
from farandole.keras._bases import PyDataset
from farandole.keras._global.how import How, Source, shapes, symbol
from farandole.keras._global.marks import marked

BATCH_SIZE = 32  # Keras' own default; of all ranks together


def of_arrays(x: Any, y: Any, sample_weight: Any, how: How) -> Source:
    if sample_weight is not None and _is_nested(y) and not _is_nested(sample_weight):
        one_for_all = sample_weight
        sample_weight = map_leaves(lambda _: one_for_all, y)
    x, y, sample_weight = (map_leaves(as_array, each) for each in (x, y, sample_weight))
    sample_weight = weights_of(y, sample_weight, how.class_weight, how)
    data = _packed(x, y, sample_weight)
    n = samples(data, f"{how.what}: the data")
    default = math.ceil(n / how.steps) if how.steps else BATCH_SIZE
    size = default if how.batch_size is None else how.batch_size
    arrays = Arrays(data, size, shuffle=how.shuffle, seed=how.seed)
    rows = [
        f"{n} samples",
        f"batch_size {arrays.batch_size}",
        f"shuffle {how.shuffle!r}, seed {how.seed}",
        *shapes(data),
        f"values {checksum(map_leaves(_some_rows, data)):08x}",
    ]
    read = ReadBatches()
    slices = read if how.policy == "slice" else None
    parts = _ArrayParts(arrays, how.block, slices, how.passes)
    share = parts.of(0, how.passes)[0].share
    return Source(
        parts,
        lambda: map_leaves(lambda leaf: symbol(leaf.shape[1:], leaf.dtype, share.samples), data),
        rows,
        min(arrays.batch_size, n),
        read,
    )


def _some_rows(array: Any) -> Any:
    """A sample of rows, which shows that a rank has other data or another order. A look at all of
    them would take too long for large arrays."""
    return [sampled(array[:8]), sampled(array[:: max(len(array) // 64, 1)]), sampled(array[-8:])]


def _is_nested(tree: Any) -> bool:
    return isinstance(tree, dict | list | tuple)


def _packed(x: Any, y: Any, sample_weight: Any) -> tuple[Any, ...]:
    if sample_weight is not None:
        return x, y, sample_weight
    return (x,) if y is None else (x, y)


def marked_parts(parts: list[Part], block: Block | None) -> Any:
    """One part, or the parts of a block, as Keras reads them and in its float type."""
    batches = tuple(map_leaves(_as_keras_reads, _as_tuples(part.batch)) for part in parts)
    shares = np.array([part.share for part in parts], np.float32)
    return marked(batches[0] if block is None else batches, shares)


def _as_tuples(batch: Any) -> Any:
    """Replaces lists by tuples on TensorFlow, which takes a list for a tensor."""
    if keras.backend.backend() != "tensorflow":
        return batch
    if isinstance(batch, dict):
        return {name: _as_tuples(each) for name, each in batch.items()}
    return tuple(map(_as_tuples, batch)) if isinstance(batch, tuple | list) else batch


def _as_keras_reads(leaf: Any) -> Any:
    if not isinstance(leaf, np.ndarray):
        return leaf
    if leaf.dtype.kind in "OSU" and keras.backend.backend() == "tensorflow":  # texts
        import tensorflow as tf

        return tf.constant(leaf)
    return leaf.astype(keras.config.floatx()) if leaf.dtype == np.float64 else leaf


def weights_of(
    y: Any, sample_weight: Any, class_weight: Mapping[int, float] | None, how: How
) -> Any:
    """The weights of samples: those given, or by their class."""
    if class_weight is None:
        return sample_weight
    if sample_weight is not None:
        raise how.error("sample_weight and class_weight are both given")
    return class_weights(y, class_weight, how)


def class_weights(y: Any, weights: Mapping[int, float], how: How) -> np.ndarray[Any, Any]:
    """The weight of each sample, by its class; 1 for classes that have none."""
    if not hasattr(y, "shape"):
        raise how.error("class_weight goes with one array of targets")
    targets = as_array(y)
    if targets.ndim > 1:
        targets = targets[..., 0] if targets.shape[-1] == 1 else targets.argmax(-1)
    classes, place = np.unique(np.round(targets).astype(int), return_inverse=True)
    table = np.array([weights.get(int(c), 1.0) for c in classes], keras.config.floatx())
    return table[place].reshape(targets.shape)


class _ArrayParts(PyDataset):
    """A pass over the arrays begins where batch 0 is asked for: with steps_per_epoch Keras reads
    one pass in several epochs.

    Args:
        slices: records checksums of whole batches, which this rank then reads; None: it does not.
    """

    def __init__(
        self, arrays: Arrays, block: Block | None, slices: ReadBatches | None, epoch: int
    ) -> None:
        super().__init__()
        self._arrays, self._block, self._slices = arrays, block, slices
        self._first, self._passes = epoch, 0
        self._is_training = False  # before, TensorFlow looks at some batches

    @property
    def num_batches(self) -> int:
        return len(self._arrays)

    def __getitem__(self, index: int) -> Any:
        if index == 0 and self._is_training:
            self._passes += 1
        epoch = self._first + max(self._passes - 1, 0)
        return marked_parts(self.of(index, epoch), self._block)

    def of(self, index: int, epoch: int) -> list[Part]:
        """This rank's parts of a batch."""
        parts, mine = self._block or ranks_own()
        if self._slices is None:
            return [self._arrays.part(index, epoch, parts, g) for g in mine]
        batch = self._arrays.part(index, epoch, 1, 0).batch
        self._slices.note(max(self._passes, 1), index, batch)
        return [part_of(batch, parts, g) for g in mine]

    def begin_at(self, epoch: int) -> None:
        self._first = epoch

    def on_epoch_begin(self) -> None:
        self._is_training = True
