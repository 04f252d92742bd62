"""A rank's part of a tf.data.Dataset, which gives batches of all ranks (policy `slice`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from farandole import _world
from farandole._core import InvalidArgument
from farandole.data._logical import Block
from farandole.data._same import ELEMENTS, ReadBatches


def split_dataset(
    dataset: Any,
    read: ReadBatches | None = None,
    size: int | None = None,
    rank: int | None = None,
) -> Any:
    """A dataset of this rank's parts: pairs of a batch, and [[samples of this rank, of all ranks]],
    float32 of shape (1, 2).

    It comes after whatever the dataset does, so that any of its transformations will do: repeat,
    take, zip, infinite ones, a length that nobody knows. Batches are cut by their own length.

    Args:
        dataset: a tf.data.Dataset of batches.
        read: keeps checksums of the batches, for the ranks to compare.

    Raises:
        InvalidArgument: its elements have no first dimension, or are sparse or ragged.
    """
    ranks = _world.size() if size is None else size
    me = _world.rank() if rank is None else rank
    return _split(dataset, read, Block(ranks, range(me, me + 1)), lambda parts: parts[0])


def split_dataset_in(dataset: Any, read: ReadBatches | None, block: Block | None) -> Any:
    """The same with the parts of a block: pairs of a tuple of batches, and their shares, of shape
    (parts, 2)."""
    return split_dataset(dataset, read) if block is None else _split(dataset, read, block, tuple)


def _split(
    dataset: Any, read: ReadBatches | None, block: Block, put: Callable[[list[Any]], Any]
) -> Any:
    import tensorflow as tf

    ranks, mine = block
    _check(tf.nest.flatten(dataset.element_spec))

    def cut(*elements: Any) -> Any:
        batch = elements if isinstance(dataset.element_spec, tuple) else elements[0]
        tensors = tf.nest.flatten(batch)
        n = tf.shape(tensors[0])[0]
        before = [
            tf.debugging.assert_equal(
                tf.shape(each)[0], n, "a batch has arrays of different lengths"
            )
            for each in tensors[1:]
        ]
        with tf.control_dependencies(before):
            n = tf.identity(n)
        base, more = n // ranks, n % ranks
        parts, shares = [], []
        for me in mine:
            count = base + tf.cast(me < more, n.dtype)
            begin = tf.where(count > 0, me * base + tf.minimum(me, more), 0)
            end = begin + tf.maximum(count, 1)
            parts.append(tf.nest.map_structure(lambda a, b=begin, e=end: a[b:e], batch))
            shares.append([count, n])
        return put(parts), tf.cast(tf.stack(shares), tf.float32)

    noted = dataset if read is None else _noted(dataset, read)
    # A number that TensorFlow tunes may be none at first, and then nothing is read ahead.
    return noted.map(cut).prefetch(_AHEAD)


_AHEAD = 2  # batches
_EACH = 16  # so many first batches are told, and then one in so many: it takes time
_PRIME = 2**31 - 1  # below it, products are whole numbers of 64 bits
_BATCH = "dataset.batch(B), where B is the batch of all ranks together"


def _noted(dataset: Any, read: ReadBatches) -> Any:
    """The same one. Of a batch that is told, TensorFlow makes the checksum."""
    import tensorflow as tf

    last = dataset.cardinality() - 1  # negative, where nobody knows

    def begin() -> Any:
        return np.int64(read.begin())

    def tell(*numbers: Any) -> Any:
        read.tell(*map(int, numbers))
        return np.int64(0)

    def call(function: Callable[..., Any], *numbers: Any) -> Any:
        return tf.ensure_shape(tf.numpy_function(function, numbers, tf.int64), [])

    def note(state: Any, batch: Any) -> Any:
        of_pass, number = state
        # By itself, for every iterator: that of a pass before may still be reading.
        of_pass = tf.cond(number == 0, lambda: call(begin), lambda: of_pass)

        def told() -> Any:
            total = tf.constant(0, tf.int64)
            for each in tf.nest.flatten(batch):
                total = (total * 31 + _hash(each)) % _PRIME
            return call(tell, of_pass, number, total)

        due = (number < _EACH) | (number % _EACH == 0) | (number == last)
        done = tf.cond(due, told, lambda: tf.constant(0, tf.int64))
        with tf.control_dependencies([done]):
            return (of_pass, number + 1), batch

    zero = tf.constant(0, tf.int64)
    return dataset.scan((zero, zero), note)


def _hash(tensor: Any) -> Any:
    """The same in all processes; of a large one a part (_same.py)."""
    import tensorflow as tf

    shape = tf.shape(tensor)
    step = tf.maximum(1, tf.size(tensor) // ELEMENTS)
    rows = tf.reshape(tensor, [shape[0], tf.reduce_prod(shape[1:])])[:, ::step]
    return tf.strings.to_hash_bucket_fast(tf.io.serialize_tensor(rows), _PRIME)


def _check(specs: list[Any]) -> None:
    import tensorflow as tf

    for spec in specs:
        if not isinstance(spec, tf.TensorSpec):
            raise InvalidArgument(
                f"the dataset has {type(spec).__name__.removesuffix('Spec')}s; farandole splits "
                "dense tensors\n  advice: make them dense in the dataset, as by "
                "dataset.map(lambda x, y: (x.to_tensor(), y))"
            )
        if spec.shape.rank == 0:
            raise InvalidArgument(
                f"the dataset is not batched: it gives single numbers\n  advice: {_BATCH}"
            )
    lengths = [spec.shape[0] for spec in specs if spec.shape.rank]
    if len({n for n in lengths if n is not None}) > 1:
        raise InvalidArgument(
            f"the dataset is not batched: it gives arrays of different lengths, {lengths}\n"
            f"  advice: {_BATCH}"
        )
