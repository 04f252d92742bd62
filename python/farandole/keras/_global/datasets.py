"""Makes a tf.data.Dataset or a PyTorch DataLoader give a rank's parts; each keeps its type."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from farandole.data import Part, ReadBatches, Share
from farandole.data._tensorflow import split_dataset_in
from farandole.data._torch import split_loader_in
from farandole.data._tree import as_array, leaves, map_leaves
from farandole.keras._global.batches import sample
from farandole.keras._global.how import How, Source, as_tuple, symbol
from farandole.keras._global.marks import marked

_LENGTHS = {-1: "infinitely many", -2: "an unknown number of"}  # tf.data's cardinality


def of_dataset(x: Any, how: How) -> Source:
    read = ReadBatches()
    data, policy, looks = split_dataset_in(x, read, how.block, how.policy, how.seed)
    length, specs = int(x.cardinality()), leaves(x.element_spec)
    several = how.block is not None
    if how.class_weight is not None:
        weigh = _weighing(x.element_spec, how)

        def weighed(batch: Any, share: Any) -> Any:
            return tuple(weigh(*part) for part in batch) if several else weigh(*batch), share

        data = data.map(weighed)
    spec = data.element_spec[0][0] if several else data.element_spec[0]
    rows = [
        f"a tf.data.Dataset of {_LENGTHS.get(length, length)} batches, policy {policy}",
        *(f"array {i}: {s.shape} {s.dtype.name}" for i, s in enumerate(specs)),
    ]
    batch = specs[0].shape[0]
    parts = how.here.parts
    count = 2 if batch is None else -(-batch // parts)

    def symbols() -> Any:
        return map_leaves(lambda s: symbol(s.shape[1:], s.dtype.name, count), as_tuple(spec))

    return Source(data.map(marked), symbols, rows, batch, read, is_looked_into=looks)


def _weighing(spec: Any, how: How) -> Callable[[Any, Any], Any]:
    """A function that adds weights by class to inputs and targets, as Keras does."""
    import tensorflow as tf

    assert how.class_weight is not None
    if not isinstance(spec, tuple) or len(spec) != 2 or not isinstance(spec[1], tf.TensorSpec):
        raise how.error(
            "class_weight goes with batches of inputs and one tensor of targets, without weights "
            "of their own"
        )
    most = max(how.class_weight)
    table = tf.constant([how.class_weight.get(c, 1.0) for c in range(most + 1)], tf.float32)

    def weigh(x: Any, y: Any) -> Any:
        classes = y
        if spec[1].shape.rank > 1:
            classes = y[..., 0] if spec[1].shape[-1] == 1 else tf.argmax(y, -1)
        if classes.dtype.is_floating:
            classes = tf.round(classes)
        classes = tf.cast(classes, tf.int64)
        known = (classes >= 0) & (classes <= most)
        weights = tf.gather(table, tf.where(known, classes, 0))
        return x, y, tf.where(known, weights, 1.0)

    return weigh


def of_loader(x: Any, how: How) -> Source:
    if how.class_weight is not None:
        raise how.error("class_weight does not go with a DataLoader")
    read = ReadBatches()
    data = split_loader_in(x, read, how.seed, how.block, how.policy)
    data.collate_fn = _Marked(data.collate_fn, several=how.block is not None)
    length = len(x) if hasattr(x.dataset, "__len__") else None

    def symbols() -> Any:
        samples = [_first_sample(x)]
        return sample(Part(map_leaves(as_array, as_tuple(x.collate_fn(samples))), Share(1, 1)))

    rows = [f"a DataLoader of {length} batches", f"batch_size {x.batch_size}", f"seed {how.seed}"]
    return Source(data, symbols, rows, x.batch_size, read, is_looked_into=True)


def _first_sample(loader: Any) -> Any:
    from torch.random import fork_rng
    from torch.utils.data import IterableDataset

    if isinstance(loader.dataset, IterableDataset):
        return next(iter(loader.dataset))
    with suppress(Exception):  # it may have keys, and raises what it likes
        return loader.dataset[0]
    # By the sampler itself, the order of its first pass would be lost.
    with fork_rng(devices=[]):
        return loader.dataset[next(iter(copy.deepcopy(loader.batch_sampler)))[0]]


class _Marked:
    """Wraps a loader's collate function: it gives batches as Keras reads them."""

    def __init__(self, own: Callable[[Any], Any], *, several: bool) -> None:
        self._own, self._several = own, several

    def __call__(self, samples: Any) -> Any:
        batch, share = self._own(samples)
        if self._several:
            return marked(tuple(as_tuple(each) for each in batch), share)
        return marked(as_tuple(batch), share)
