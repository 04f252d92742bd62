"""Datasets of batches of all replicas together, of which each replica gets its part."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import input_util

from farandole import _world
from farandole._arguments import type_of
from farandole._core import InvalidArgument
from farandole.common._objects import agree
from farandole.common._reduction import share as rows_of
from farandole.data import ReadBatches, split_dataset
from farandole.data._same import compares_after

_SEED = (
    "give every rank the same batches: pass a seed to what shuffles or draws at random, as in "
    "dataset.shuffle(1000, seed=42), or call tf.random.set_seed(42) before the dataset is made; "
    "distribute_datasets_from_function() takes a dataset of each rank's own"
)


class Read(ReadBatches):
    """Compares the batches of one dataset between ranks, as the program reads them.

    Args:
        length: its batches, as TensorFlow tells: -1 for infinitely many, -2 if it does not know.
    """

    name = "a distributed dataset"

    def __init__(self, length: int) -> None:
        super().__init__()
        self._lock = Lock()  # threads of TensorFlow call
        self._length: int | None = length  # None: compared
        self._batches = 0  # that the program has got
        self._ends = 0  # of passes, which it has come to

    def got(self, found: bool) -> None:
        """Notes that the program has got a batch, or has come to the end of a pass. Collective in
        the first, second, fourth, eighth, … batch, and at each end: ranks compare how far they are
        and the batches so far, and once the number of batches.

        Raises:
            Mismatch: they differ; on every rank.
        """
        with self._lock:
            self._got(found)

    def _got(self, found: bool) -> None:
        self._batches += found
        self._ends += not found
        if found and self._batches > 1 and not compares_after(self._batches):
            return
        at = f"batch {self._batches}" if found else f"the end of the data, after {self._batches}"
        rows = [f"{at}, pass {self._ends + found}"]
        if self._length is not None:
            words = {-1: "infinitely many", -2: "nobody knows how many"}
            rows.insert(0, f"{words.get(self._length, self._length)} batches")
            self._length = None
        agree(self.name, rows, advice=_SEED)
        self.compare(self.name, _SEED)


def check(dataset: Any, options: Any) -> None:
    """Raises InvalidArgument for what cannot be distributed."""
    if not isinstance(dataset, tf.data.Dataset):
        raise InvalidArgument(
            f"experimental_distribute_dataset() takes a tf.data.Dataset, not {type_of(dataset)}"
        )
    policy = dataset.options().experimental_distribute.auto_shard_policy.name
    if policy in ("OFF", "HINT"):
        raise InvalidArgument(
            f"AutoShardPolicy.{policy}: farandole splits every batch by sample, whatever the "
            "dataset does before\n  advice: distribute_datasets_from_function() takes a dataset "
            "of each rank's own"
        )
    check_options(options)


def check_options(options: Any) -> None:
    mode = tf.distribute.InputReplicationMode
    if options is not None and options.experimental_replication_mode == mode.PER_REPLICA:
        raise InvalidArgument(
            "InputOptions: PER_REPLICA is what happens anyway, as each process has one replica\n"
            "  advice: leave out experimental_replication_mode"
        )


def record_of(dataset: Any) -> Read:
    return Read(
        int(dataset.cardinality()) if tf.executing_eagerly() else tf.data.UNKNOWN_CARDINALITY
    )


def part_of_each_batch(dataset: Any, read: Read) -> Any:
    """The parts of this replica, which may have no sample."""
    shapes = [spec.shape for spec in tf.nest.flatten(dataset.element_spec)]
    split = split_dataset(dataset, read if _world.size() > 1 else None)

    def counted(batch: Any, of_samples: Any) -> Any:
        count = tf.cast(of_samples[0, 0], tf.int32)
        tensors = [each[:count] for each in tf.nest.flatten(batch)]
        for tensor, shape in zip(tensors, shapes, strict=True):
            tensor.set_shape([_part_of(shape[0]), *shape[1:]])
        return tf.nest.pack_sequence_as(batch, tensors)

    return split.map(counted)


def _part_of(batch: int | None) -> int | None:
    return None if batch is None else rows_of(batch, _world.size(), _world.rank())


def made_by(function: Callable[[Any], Any], context: Any) -> Any:
    """A replica's own dataset. Raises InvalidArgument where the function gives something else."""
    made = function(context)
    if not isinstance(made, tf.data.Dataset):
        raise InvalidArgument(
            f"distribute_datasets_from_function(): dataset_fn returned {type_of(made)}, and not a "
            "tf.data.Dataset"
        )
    return made


def from_function(function: Callable[[Any], Any], workers: Any, strategy: Any, options: Any) -> Any:
    """A dataset that this replica makes by itself."""
    context = tf.distribute.InputContext(
        num_input_pipelines=_world.size(),
        input_pipeline_id=_world.rank(),
        num_replicas_in_sync=_world.size(),
    )
    return input_util.get_distributed_datasets_from_function(
        lambda given: made_by(function, given), workers, [context], strategy, options=options
    )
