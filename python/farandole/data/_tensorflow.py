"""A rank's part of a tf.data.Dataset, which gives batches of all ranks (policy `slice`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from farandole import _world
from farandole._core import InvalidArgument
from farandole.data._logical import Block
from farandole.data._same import Note


def split_dataset(
    dataset: Any,
    note: Note | None = None,
    size: int | None = None,
    rank: int | None = None,
) -> Any:
    """A dataset of this rank's parts: pairs of a batch, and [[samples of this rank, of all ranks]],
    float32 of shape (1, 2).

    It comes after whatever the dataset does, so that any of its transformations will do: repeat,
    take, zip, infinite ones, a length that nobody knows. Batches are cut by their own length.

    Args:
        dataset: a tf.data.Dataset of batches.
        note: called with the arrays of the first batch of every pass.

    Raises:
        InvalidArgument: its elements have no first dimension, or are sparse or ragged.
    """
    ranks = _world.size() if size is None else size
    me = _world.rank() if rank is None else rank
    return _split(dataset, note, Block(ranks, range(me, me + 1)), lambda parts: parts[0])


def split_dataset_in(dataset: Any, note: Note | None, block: Block | None) -> Any:
    """The same with the parts of a block: pairs of a tuple of batches, and their shares, of shape
    (parts, 2)."""
    return split_dataset(dataset, note) if block is None else _split(dataset, note, block, tuple)


def _split(dataset: Any, note: Note | None, block: Block, put: Callable[[list[Any]], Any]) -> Any:
    import tensorflow as tf

    ranks, mine = block
    _check(tf.nest.flatten(dataset.element_spec))

    def told(first: Any, tensors: list[Any]) -> Any:
        def tell() -> Any:
            def call(*arrays: Any) -> int:
                assert note is not None
                note(list(arrays))
                return 0

            return tf.numpy_function(call, tensors, tf.int64)

        return tf.cond(first, tell, lambda: tf.constant(0, tf.int64))

    def cut(first: Any, batch: Any) -> Any:
        tensors = tf.nest.flatten(batch)
        n = tf.shape(tensors[0])[0]
        before = [
            tf.debugging.assert_equal(
                tf.shape(each)[0], n, "a batch has arrays of different lengths"
            )
            for each in tensors[1:]
        ]
        if note is not None:
            before.append(told(first, tensors))
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

    # Not enumerate(), which makes a number of batches out of infinity.
    begins = tf.data.Dataset.from_tensors(True)
    begins = begins.concatenate(tf.data.Dataset.from_tensors(False).repeat())
    return tf.data.Dataset.zip((begins, dataset)).map(cut).prefetch(tf.data.AUTOTUNE)


_BATCH = "dataset.batch(B), where B is the batch of all ranks together"


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
