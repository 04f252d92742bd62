"""A rank's part of a tf.data.Dataset, which gives batches of all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from farandole._core import InvalidArgument
from farandole.common._reduction import share as rows_of
from farandole.data._logical import Block, ranks_own
from farandole.data._moving import (
    ORDERS,
    InTheWay,
    Moving,
    checksum_of,
    movable,
    passes_are_orders,
)
from farandole.data._order import DEFAULT_SEED
from farandole.data._pipeline import (
    Step,
    chain,
    drawn_below_a_repeat,
    element_of,
    read_pipeline,
    rebuilt,
)
from farandole.data._policy import Policy, check_policy, refuse_index
from farandole.data._same import ELEMENTS, ReadBatches

_Put = Callable[[list[Any]], Any]  # the parts of a batch, as they are given


def split_dataset(
    dataset: Any,
    read: ReadBatches | None = None,
    size: int | None = None,
    rank: int | None = None,
    *,
    policy: Policy = "auto",
    seed: int = DEFAULT_SEED,
) -> Any:
    """A dataset of this rank's parts: pairs of a batch, and [[samples of this rank, of all ranks]],
    float32 of shape (1, 2).

    It comes after whatever the dataset does, so that any of its transformations will do: repeat,
    take, zip, infinite ones, a length that nobody knows. Batches are cut by their own length.

    Args:
        dataset: a tf.data.Dataset of batches.
        read: keeps checksums of the batches, for the ranks to compare.
        policy: "index": a rank runs the maps of single samples for its own samples alone. "slice":
            it makes whole batches. "auto": "index" where that can be.
        seed: of a shuffle() that has none, nor the program by tf.random.set_seed: of the first one
            from the source; the next one has ``seed + 1``.

    Raises:
        InvalidArgument: its elements have no first dimension, or are sparse or ragged; or the
            policy is "index", which cannot be: names the transformation in the way.
    """
    check_policy(policy, "split_dataset(): policy", without=("leader",))
    return _split(dataset, read, ranks_own(size, rank), policy, seed, itemgetter(0)).data


class Split(NamedTuple):
    data: Any
    how: str  # the policy, for ranks to compare
    may_be_looked_into: bool  # by a pass that is given up early


def split_dataset_in(
    dataset: Any, read: ReadBatches | None, block: Block | None, policy: Policy, seed: int
) -> Split:
    """The same, of which it tells how. With the parts of a block: pairs of a tuple of batches, and
    their shares, of shape (parts, 2)."""
    put: _Put = itemgetter(0) if block is None else tuple
    return _split(dataset, read, block or ranks_own(), policy, seed, put)


def is_to_be_split_anew(dataset: Any) -> bool:
    """Whether each pass must split it anew: Note [Orders that go on] in data/_pipeline.py."""
    return bool(drawn_below_a_repeat(read_pipeline(dataset)))


def _split(
    dataset: Any, read: ReadBatches | None, block: Block, policy: Policy, seed: int, put: _Put
) -> Split:
    import tensorflow as tf

    _check(tf.nest.flatten(dataset.element_spec))
    pipeline = read_pipeline(dataset) if tf.executing_eagerly() else Step("a graph", dataset)
    if 0 in block.mine:  # on rank 0
        _warn_of_samples(pipeline)
    looks = passes_are_orders(pipeline)
    found = InTheWay("") if policy == "slice" else movable(pipeline)
    if isinstance(found, InTheWay):
        if policy == "index":
            raise refuse_index("this tf.data.Dataset", str(found))
        first = 0 in block.mine and len(block.mine) < block.parts  # of several
        if first and found.step is not None and found.step.name == "map":
            _say_that_all_make_whole_batches(str(found))
        return Split(_slices(_in_order(rebuilt(pipeline, seed)), read, block, put), "slice", looks)
    if len(block.mine) == block.parts:  # all of it is this rank's
        return Split(_slices(_in_order(rebuilt(pipeline, seed)), read, block, put), "index", looks)
    without = _in_order(rebuilt(pipeline, seed, frozenset(found.maps)))
    parts = _own_samples(without, found, read, block, put)
    length = dataset.cardinality()
    if length != tf.data.UNKNOWN_CARDINALITY:
        parts = parts.apply(tf.data.experimental.assert_cardinality(length))
    return Split(parts, "index", looks)


def _in_order(dataset: Any) -> Any:
    """The dataset in one order on all ranks, also where the program asks for no order."""
    import tensorflow as tf

    if dataset.options().deterministic is not False:
        return dataset
    options = tf.data.Options()
    options.deterministic = True
    return dataset.with_options(options)


def _slices(dataset: Any, read: ReadBatches | None, block: Block, put: _Put) -> Any:
    """Whole batches, cut."""
    import tensorflow as tf

    def cut(*arguments: Any) -> Any:
        batch = element_of(arguments, dataset.element_spec)
        n = _samples(batch)
        parts, shares = [], []
        for part in block.mine:
            begin, count = _range_of(n, block.parts, part)
            end = begin + tf.maximum(count, 1)
            parts.append(tf.nest.map_structure(lambda a, b=begin, e=end: a[b:e], batch))
            shares.append([count, n])
        return put(parts), tf.cast(tf.stack(shares), tf.float32)

    # A number that TensorFlow tunes may be none at first, and then nothing is read ahead.
    return _noted(dataset, read).map(cut).prefetch(_AHEAD)


def _own_samples(
    dataset: Any, moving: Moving, read: ReadBatches | None, block: Block, put: _Put
) -> Any:
    """Batches of what the maps get, cut; the maps; batches again.

    Every part has room for its share of a full batch, so that batches of one size can be made of
    the samples. Of a batch that is not full, a part's last sample fills the rest, and is cut off
    again by the number of samples of the batch, which comes with each sample.
    """
    import tensorflow as tf

    rooms = [max(rows_of(moving.size, block.parts, part), 1) for part in block.mine]

    def take(*arguments: Any) -> Any:
        batch = element_of(arguments, dataset.element_spec)
        n = _samples(batch)
        rows = []
        for part, room in zip(block.mine, rooms, strict=True):
            begin, count = _range_of(n, block.parts, part)
            rows.append(begin + tf.minimum(tf.range(room), tf.maximum(count, 1) - 1))
        mine = tf.concat(rows, 0)
        samples = tf.nest.map_structure(lambda a: tf.gather(a, mine), batch)
        return samples, tf.fill([sum(rooms)], n)

    def divide(samples: Any, numbers: Any) -> Any:
        n, at = numbers[0], 0
        parts, shares = [], []
        for part, room in zip(block.mine, rooms, strict=True):
            _, count = _range_of(n, block.parts, part)
            end = at + tf.maximum(count, 1)
            parts.append(tf.nest.map_structure(lambda a, b=at, e=end: a[b:e], samples))
            shares.append([count, n])
            at += room
        return put(parts), tf.cast(tf.stack(shares), tf.float32)

    samples = _noted(dataset, read, checksum_of(moving.maps)).map(take).unbatch()
    for step in moving.maps:
        options = dict(step.options)
        if "num_parallel_calls" in options:
            options["deterministic"] = True  # else a sample could come in another batch
        function = step.function
        samples = samples.map(lambda sample, n, f=function: (f(sample), n), **options)
    return samples.batch(sum(rooms), drop_remainder=True).map(divide).prefetch(_AHEAD)


def _samples(batch: Any) -> Any:
    import tensorflow as tf

    first, *others = tf.nest.flatten(batch)
    n = tf.shape(first)[0]
    same = [
        tf.debugging.assert_equal(tf.shape(each)[0], n, "a batch has arrays of different lengths")
        for each in others
    ]
    with tf.control_dependencies(same):
        return tf.identity(n)


def _range_of(n: Any, parts: int, part: int) -> tuple[Any, Any]:
    """Where a part of n samples begins, and how many are its own: data/_share.py, of tensors."""
    import tensorflow as tf

    base, more = n // parts, n % parts
    count = base + tf.cast(part < more, n.dtype)
    return tf.where(count > 0, part * base + tf.minimum(part, more), 0), count


def _say_that_all_make_whole_batches(found: str) -> None:
    """Prints it once."""
    if not _said:
        _said.append(found)
        print(f"farandole: every rank makes whole batches of a tf.data.Dataset, as {found}")


_said: list[str] = []


def _warn_of_samples(pipeline: Step) -> None:
    """Warns of rows of arrays that come without batch(): Keras takes each for a batch, which is
    hardly meant."""
    import tensorflow as tf

    steps = list(chain(pipeline))
    as_they_are = all(each.name in (*ORDERS, "cache", "filter") for each in steps[:-1])
    if not as_they_are or steps[-1].name != "from_tensor_slices":
        return
    ranks = {spec.shape.rank for spec in tf.nest.flatten(pipeline.dataset.element_spec)}
    if ranks == {1}:
        warnings.warn(
            "a tf.data.Dataset gives the rows of arrays, each of which is taken for a batch of "
            f"numbers, since there is no batch() in it\n  advice: {_BATCH}",
            stacklevel=5,
        )


_AHEAD = 2  # batches
_CHARACTERS = 64  # of a string
_EACH = 16  # first batches that are noted, then one in as many: it takes time
_PRIME = 2**31 - 1  # below it, products are whole numbers of 64 bits
_BATCH = "dataset.batch(B), where B is the batch of all ranks together"


def _noted(dataset: Any, read: ReadBatches | None, total: int = 0) -> Any:
    """The same dataset, which notes its batches in `read`. TensorFlow makes the checksums.

    Args:
        total: the initial value of a checksum.
    """
    import tensorflow as tf

    if read is None:
        return dataset
    last = dataset.cardinality() - 1  # negative where it is unknown

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
            of_batch = tf.constant(total, tf.int64)
            for each in tf.nest.flatten(batch):
                of_batch = (of_batch * 31 + _hash(each)) % _PRIME
            return call(tell, of_pass, number, of_batch)

        due = (number < _EACH) | (number % _EACH == 0) | (number == last)
        done = tf.cond(due, told, lambda: tf.constant(0, tf.int64))
        with tf.control_dependencies([done]):
            return (of_pass, number + 1), batch

    zero = tf.constant(0, tf.int64)
    return dataset.scan((zero, zero), note)


def _hash(tensor: Any) -> Any:
    """A hash that is the same in all processes; of a part of large tensors (_same.py)."""
    import tensorflow as tf

    shape = tf.shape(tensor)
    step = tf.maximum(1, tf.size(tensor) // ELEMENTS)
    rows = tf.reshape(tensor, [shape[0], tf.reduce_prod(shape[1:])])[:, ::step]
    if tensor.dtype == tf.string:  # of long ones, as files are, the middle
        lengths = tf.strings.length(rows)
        rows = tf.strings.substr(rows, lengths // 2, tf.fill(tf.shape(rows), _CHARACTERS))
        rows = tf.strings.join([rows, tf.strings.as_string(lengths)])
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
