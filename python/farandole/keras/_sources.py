"""What a user gives to fit, evaluate or predict, as this rank's parts of its batches.

Keras reads the parts with its own adapters: what is random access stays a PyDataset, a
tf.data.Dataset stays one, a DataLoader stays one.
"""

from __future__ import annotations

import itertools
import math
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from farandole import _world
from farandole._arguments import shown
from farandole._core import InvalidArgument
from farandole.data import Arrays, FirstBatches, Part, Share, part_of, split_dataset, split_loader
from farandole.data._same import checksum
from farandole.data._tree import leaves, map_leaves, samples
from farandole.keras._bases import PyDataset
from farandole.keras._steps import marked

BATCH_SIZE = 32  # Keras' own default; of all ranks together


@dataclass(frozen=True)
class How:
    """How data are read."""

    what: str  # the call, for errors
    seed: int
    batch_size: int | None = None
    steps: int | None = None
    shuffle: Any = False
    class_weight: Mapping[int, float] | None = None
    passes: int = 0  # over training data, before this call


@dataclass
class Source:
    """One rank's side of them."""

    data: Any  # what Keras reads
    sample: Callable[[], Any]  # a batch as KerasTensors, to build the model with
    rows: list[str]  # what ranks compare
    batch: int | None = None  # samples of a whole batch, where that is known
    firsts: FirstBatches = field(default_factory=FirstBatches)


def source_of(x: Any, y: Any, sample_weight: Any, how: How) -> Source:
    """Raises InvalidArgument for what cannot be split, or does not go together."""
    if _is(x, "tensorflow", "data.Dataset"):
        _alone("a tf.data.Dataset", y, sample_weight, how)
        return _of_dataset(x, how)
    if _is(x, "torch", "utils.data.DataLoader"):
        _alone("a DataLoader", y, sample_weight, how)
        if how.class_weight is not None:
            raise InvalidArgument(f"{how.what}: class_weight does not go with a DataLoader")
        return _of_loader(x, how)
    if isinstance(x, keras.utils.PyDataset):
        _alone("a PyDataset", y, sample_weight, how)
        return _of_py_dataset(x, how)
    if isinstance(x, types.GeneratorType):
        _alone("a generator", y, sample_weight, how)
        return _of_generator(x, how)
    return _of_arrays(x, y, sample_weight, how)


def _is(x: Any, module: str, path: str) -> bool:
    """Whether it is of a class of a framework that the program has imported."""
    kind: Any = sys.modules.get(module)
    for name in path.split("."):
        kind = getattr(kind, name, None)
    return isinstance(kind, type) and isinstance(x, kind)


def _alone(what: str, y: Any, sample_weight: Any, how: How) -> None:
    for name, value in (("y", y), ("sample_weight", sample_weight), ("batch_size", how.batch_size)):
        if value is not None:
            raise InvalidArgument(
                f"{how.what}: x is {what}, whose batches have their targets, weights and size; "
                f"{name} goes with arrays only"
            )


# ---- arrays ----


def _of_arrays(x: Any, y: Any, sample_weight: Any, how: How) -> Source:
    if sample_weight is not None and how.class_weight is not None:
        raise InvalidArgument(f"{how.what}: sample_weight and class_weight are both given")
    nested = dict | list | tuple
    if (
        sample_weight is not None
        and isinstance(y, nested)
        and not isinstance(sample_weight, nested)
    ):
        one_for_all = sample_weight
        sample_weight = map_leaves(lambda _: one_for_all, y)
    x, y, sample_weight = (map_leaves(_array, each) for each in (x, y, sample_weight))
    if how.class_weight is not None:
        sample_weight = class_weights(y, how.class_weight, how.what)
    data = _packed(x, y, sample_weight)
    n = samples(data, f"{how.what}: the data")
    default = math.ceil(n / how.steps) if how.steps else BATCH_SIZE
    arrays = Arrays(data, how.batch_size or default, shuffle=how.shuffle, seed=how.seed)
    rows = [
        f"{n} samples",
        f"batch_size {arrays.batch_size}",
        f"shuffle {how.shuffle!r}, seed {how.seed}",
        *_shapes(data),
        # That a rank has other data is seen by what it begins and ends with.
        f"values {checksum(map_leaves(lambda a: [a[:8], a[-8:]], data)):08x}",
    ]
    share = arrays.part(0).share
    return Source(
        _ArrayParts(arrays, endless=bool(how.steps), epoch=how.passes),
        lambda: map_leaves(lambda leaf: _symbol(leaf.shape[1:], leaf.dtype, share.count), data),
        rows,
        min(arrays.batch_size, n),
    )


def _packed(x: Any, y: Any, sample_weight: Any) -> tuple[Any, ...]:
    if sample_weight is not None:
        return x, y, sample_weight
    return (x,) if y is None else (x, y)


def _array(value: Any) -> np.ndarray[Any, Any]:
    """Of what Keras takes for an array."""
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "to_numpy"):  # pandas
        array = value.to_numpy()
        return array[:, None] if array.ndim == 1 else array
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    if not hasattr(value, "shape") or not hasattr(value, "__array__"):
        raise InvalidArgument(
            f"the data have {shown(value)}, which is a {type(value).__name__}; pass arrays, a "
            "tf.data.Dataset, a PyDataset, a DataLoader or a generator"
        )
    return np.asarray(value)


def _symbol(shape: Any, dtype: Any, count: int) -> Any:
    dims = [None if d is None else int(d) for d in shape]
    return keras.KerasTensor((max(count, 1), *dims), _dtype(dtype))


def _dtype(dtype: Any) -> str:
    name = keras.backend.standardize_dtype(dtype)
    return keras.config.floatx() if name == "float64" else name


def _shapes(data: Any) -> list[str]:
    return [f"array {i}: {list(a.shape[1:])} {a.dtype}" for i, a in enumerate(leaves(data))]


def _marked(part: Part) -> Any:
    """As Keras reads it, of its float type."""
    share = np.array([part.share], np.float32)
    return marked(map_leaves(_of_floatx, part.batch), share)


def _of_floatx(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray) and leaf.dtype == np.float64:
        return leaf.astype(keras.config.floatx())
    return leaf


def class_weights(y: Any, weights: Mapping[int, float], what: str) -> np.ndarray[Any, Any]:
    """Of each sample, by its class; 1 for classes that have none."""
    if not hasattr(y, "shape"):
        raise InvalidArgument(f"{what}: class_weight goes with one array of targets")
    targets = _array(y)
    if targets.ndim > 1:
        targets = targets[..., 0] if targets.shape[-1] == 1 else targets.argmax(-1)
    classes, place = np.unique(np.round(targets).astype(int), return_inverse=True)
    table = np.array([weights.get(int(c), 1.0) for c in classes], keras.config.floatx())
    return table[place].reshape(targets.shape)


class _ArrayParts(PyDataset):
    """Endless where a number of steps ends an epoch: then the next one goes on where it ended."""

    def __init__(self, arrays: Arrays, *, endless: bool, epoch: int) -> None:
        super().__init__()
        self._arrays, self._endless = arrays, endless
        self._first, self._begun = epoch, 0

    @property
    def num_batches(self) -> int | None:
        return None if self._endless else len(self._arrays)

    def __getitem__(self, index: int) -> Any:
        epoch = max(self._begun - 1, 0)
        if self._endless:
            epoch, index = divmod(index, len(self._arrays))
        return _marked(self._arrays.part(index, self._first + epoch))

    def on_epoch_begin(self) -> None:
        self._begun += 1


# ---- batches by number ----


def _of_py_dataset(x: Any, how: How) -> Source:
    length = x.num_batches
    if length == 0:
        raise InvalidArgument(f"{how.what}: the PyDataset has no batches")
    firsts = FirstBatches()
    first = _tuple(x[0])
    n = samples(first, f"{how.what}: the PyDataset's first batch")
    parts = _Parts(x, how, firsts)
    rows = [f"a PyDataset of {length} batches", f"first batch of {n} samples", *_shapes(
        map_leaves(_array, first)
    )]  # fmt: skip
    return Source(parts, lambda: _sample(parts.part(first)), rows, n, firsts)


def _tuple(batch: Any) -> tuple[Any, ...]:
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,)


def _sample(part: Part) -> Any:
    return map_leaves(lambda leaf: _symbol(leaf.shape[1:], leaf.dtype, len(leaf)), part.batch)


def _part(batch: Any, how: How) -> Part:
    part = part_of(_tuple(batch))
    if how.class_weight is None:
        return part
    if len(part.batch) != 2:
        raise InvalidArgument(
            f"{how.what}: class_weight goes with batches of inputs and targets, without weights"
        )
    x, y = part.batch
    return Part((x, y, class_weights(y, how.class_weight, how.what)), part.share)


class _Parts(PyDataset):
    """Of a user's PyDataset."""

    def __init__(self, own: Any, how: How, firsts: FirstBatches) -> None:
        super().__init__(
            workers=own.workers,
            use_multiprocessing=own.use_multiprocessing,
            max_queue_size=own.max_queue_size,
        )
        self._own, self._how, self._firsts = own, how, firsts
        self._begun = 0
        self._orders: dict[int, Any] = {}

    @property
    def num_batches(self) -> int | None:
        length: int | None = self._own.num_batches
        return length

    def __getitem__(self, index: int) -> Any:
        batch = _tuple(self._own[self._place(index)])
        if index == 0:
            self._firsts.note(batch)
        return _marked(self.part(batch))

    def part(self, batch: Any) -> Part:
        return _part(map_leaves(_array, batch), self._how)

    def _place(self, index: int) -> int:
        length = self.num_batches
        if not self._how.shuffle or length is None:
            return index
        # Where steps end an epoch, one pass goes on over several: it has one order.
        epoch = self._how.passes + (0 if self._how.steps else max(self._begun - 1, 0))
        if epoch not in self._orders:
            order = np.random.default_rng([self._how.seed, epoch]).permutation(length)
            self._orders = {epoch: order}
        return int(self._orders[epoch][index])

    def on_epoch_begin(self) -> None:
        self._begun += 1
        self._own.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._own.on_epoch_end()


def _of_generator(x: Any, how: How) -> Source:
    first = next(x, None)
    if first is None:
        raise InvalidArgument(f"{how.what}: the generator gives no batch")
    first = map_leaves(_array, _tuple(first))
    n = samples(first, f"{how.what}: the generator's first batch")
    firsts = FirstBatches()
    firsts.note(first)

    def parts() -> Iterator[Any]:
        for batch in itertools.chain([first], x):
            yield _marked(_part(map_leaves(_array, _tuple(batch)), how))

    rows = ["a generator", f"first batch of {n} samples", *_shapes(first)]
    return Source(parts(), lambda: _sample(_part(first, how)), rows, n, firsts)


# ---- the frameworks' own ----


def _of_dataset(x: Any, how: How) -> Source:
    firsts = FirstBatches()
    if how.class_weight is not None:
        x = _weighted(x, how)
    data = split_dataset(x, firsts.note).map(marked)
    spec = x.element_spec
    specs = leaves(spec)
    length = int(x.cardinality())
    words = {-1: "infinitely many", -2: "an unknown number of"}
    rows = [
        f"a tf.data.Dataset of {words.get(length, length)} batches",
        *(f"array {i}: {s.shape} {s.dtype.name}" for i, s in enumerate(specs)),
    ]
    batch = specs[0].shape[0]
    count = 2 if batch is None else -(-batch // _world.size())

    def sample() -> Any:
        return map_leaves(lambda s: _symbol(s.shape[1:], s.dtype.name, count), _tuple(spec))

    return Source(data, sample, rows, batch, firsts)


def _weighted(dataset: Any, how: How) -> Any:
    import tensorflow as tf

    assert how.class_weight is not None
    if not isinstance(dataset.element_spec, tuple) or len(dataset.element_spec) != 2:
        raise InvalidArgument(
            f"{how.what}: class_weight goes with batches of inputs and targets, without weights"
        )
    spec = dataset.element_spec[1]
    if not isinstance(spec, tf.TensorSpec):
        raise InvalidArgument(f"{how.what}: class_weight goes with one tensor of targets")
    most = max(how.class_weight)
    table = tf.constant([how.class_weight.get(c, 1.0) for c in range(most + 1)], tf.float32)

    def weigh(x: Any, y: Any) -> Any:
        classes = y
        if spec.shape.rank > 1:
            classes = y[..., 0] if spec.shape[-1] == 1 else tf.argmax(y, -1)
        if classes.dtype.is_floating:
            classes = tf.round(classes)
        classes = tf.cast(classes, tf.int64)
        known = (classes >= 0) & (classes <= most)
        weights = tf.gather(table, tf.where(known, classes, 0))
        return x, y, tf.where(known, weights, 1.0)

    return dataset.map(weigh)


def _of_loader(x: Any, how: How) -> Source:
    firsts = FirstBatches()
    data = split_loader(x, firsts.note, how.seed)
    data.collate_fn = _MarkedLoader(data.collate_fn)
    length = len(x) if hasattr(x.dataset, "__len__") else None

    def sample() -> Any:
        # Not by the sampler, whose first order would be lost.
        own = x.collate_fn([x.dataset[0]] if length is not None else [next(iter(x.dataset))])
        return _sample(Part(map_leaves(_array, _tuple(own)), Share(1, 1)))

    rows = [f"a DataLoader of {length} batches", f"batch_size {x.batch_size}"]
    return Source(data, sample, rows, x.batch_size, firsts)


class _MarkedLoader:
    def __init__(self, own: Callable[[Any], Any]) -> None:
        self._own = own

    def __call__(self, samples: Any) -> Any:
        batch, share = self._own(samples)
        return marked(_tuple(batch), share)
