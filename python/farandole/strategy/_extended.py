"""The implementation of our strategies, in the interface of TensorFlow's: one replica in each
process, and collectives between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_utils, one_device_strategy
from tensorflow.python.distribute import values as tf_values

from farandole import _world
from farandole.common._labels import without_numbers
from farandole.data._tensorflow import is_to_be_split_anew
from farandole.strategy import _collectives as collectives
from farandole.strategy import _data, _keras, _reading
from farandole.strategy._checks import check_call
from farandole.strategy._collectives import MEAN, SUM
from farandole.strategy._eagerly import EagerSteps
from farandole.strategy._options import Packing
from farandole.strategy._presence import Presence
from farandole.strategy._variables import (
    CLASSES,
    POLICIES,
    is_counter,
    local,
    local_tree,
    refuse_symbolic,
    require_of,
)
from farandole.tensorflow._calls import tensor_from


def as_is(function: Any) -> Any:
    """AutoGraph calls it without rewriting it, and goes on with the user's functions inside."""
    function.autograph_info__ = {}
    return function


class ReplicaContext(tf.distribute.ReplicaContext):  # type: ignore[misc]
    """The context of this process' replica."""

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy, replica_id_in_sync_group=_world.rank())

    @as_is
    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """As TensorFlow's; a list's values are reduced as soon as each is there."""
        flat = tf.nest.flatten(value)
        extended = self.strategy.extended
        return tf.nest.pack_sequence_as(value, extended.reduce_list(reduce_op, flat, options))

    @as_is
    def merge_call(self, merge_fn: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As TensorFlow's."""
        check_call("merge_call()", merge_fn, args, kwargs)
        return super().merge_call(merge_fn, args, kwargs)


class OneOfManyExtended(one_device_strategy.OneDeviceExtended):  # type: ignore[misc]
    """The base of all our strategies: one device in each process, and files by rank 0."""

    @property
    def should_checkpoint(self) -> bool:
        return _world.rank() == 0

    @property
    def should_save_summary(self) -> bool:
        return _world.rank() == 0


class Extended(OneOfManyExtended):
    """See TensorFlow's ``StrategyExtended``, which says what the methods are for."""

    one_process_a_replica = True  # our ops ask for it (farandole.tensorflow)

    def __init__(self, strategy: Any, device: str, packing: Packing) -> None:
        super().__init__(strategy, device)
        self.presence = Presence()
        self.inside_keras = False
        self.alone = False  # the other ranks do not read now
        self.packing = packing
        self.eager = EagerSteps(strategy, device, lambda: ReplicaContext(strategy))
        self._made = 0  # variables
        self._place = device  # of them
        self._classes = CLASSES

    # ---- who there is ----

    @property
    def _num_replicas_in_sync(self) -> int:
        """One in a step of Keras', which computes losses as one process does: see _model.py."""
        return 1 if self.inside_keras else _world.size()

    def _in_multi_worker_mode(self) -> bool:
        return False  # Keras and tf.data have ways of their own there, which are not ours

    def _get_local_replica_id(self, replica_id_in_sync_group: Any) -> int:  # noqa: ARG002
        return 0

    # ---- variables ----

    def _create_variable(self, next_creator: Any, **options: Any) -> Any:
        def create(**given: Any) -> list[Any]:
            colocate = given.pop("colocate_with", None)
            with tf.device(self._place if colocate is None else colocate.device):
                return [next_creator(**given)]

        refuse_symbolic(options)
        with tf.init_scope():  # also in a function, whose first call has replica 0's value then
            variable = distribute_utils.create_mirrored_variable(
                self._container_strategy(), create, self._classes, POLICIES, **options
            )
            self._share(variable)
        return variable

    def _share(self, variable: Any) -> None:
        """Collective: a new variable has the value of replica 0. One that this rank makes alone is
        its own."""
        if self.alone:
            return
        label, note = self._label_of_new(variable)
        if _world.size() == 1 or variable.dtype not in collectives.SENT:
            return
        mine = local(variable)
        mine.assign(collectives.from_replica_0(mine, label, note))

    def _label_of_new(self, variable: Any) -> tuple[str, str]:
        """The operation that gives a new variable its value, by name; and the note to compare."""
        self._made += 1
        name = without_numbers(variable.name.partition(":")[0])
        note = f"variable '{name}' {variable.dtype.name} {variable.shape}"
        return f"variable {self._made} of the strategy", note

    def publish_among(self, variables: Sequence[Any]) -> list[Any]:
        """Collective: gives all ranks rank 0's values of some; returns those that are left."""
        return list(variables)

    def _validate_colocate_with_variable(self, colocate_with_variable: Any) -> None:
        require_of(self._container_strategy(), colocate_with_variable)

    def _update(self, var: Any, fn: Any, args: Any, kwargs: Any, group: bool) -> Any:
        require_of(self._container_strategy(), var)
        return self._update_non_slot(
            None, fn, (local(var), *local_tree(args)), local_tree(kwargs or {}), group
        )

    def _update_non_slot(
        self, colocate_with: Any, fn: Any, args: Any, kwargs: Any, group: bool
    ) -> Any:
        del colocate_with
        with tf.device(self._place), _update_context():
            result = fn(*args, **kwargs)
        return result if group else tf.nest.map_structure(self._local_results, result)

    def read_var(self, replica_local_var: Any) -> Any:
        return tf.identity(replica_local_var)

    def value_container(self, value: Any) -> Any:
        return distribute_utils.value_container(value)

    # ---- steps ----

    def call_for_each_replica(self, fn: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Stays in the scope that `run` has entered, since to enter it again takes time."""
        inside = tf.distribute.in_cross_replica_context()
        if inside and tf.distribute.get_strategy() is self._container_strategy():
            return self._call_for_each_replica(fn, args, kwargs)
        return super().call_for_each_replica(fn, args, kwargs)

    def _call_for_each_replica(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        strategy = self._container_strategy()
        with tf.device(self._device), ReplicaContext(strategy):
            return fn(*local_tree(args), **local_tree(kwargs or {}))

    @contextmanager
    def keras(self) -> Iterator[None]:
        """A context for a step of Keras, which itself keeps metrics and moving averages, and
        weights the results of this rank's samples."""
        before, self.inside_keras = self.inside_keras, True
        try:
            yield
        finally:
            self.inside_keras = before

    @contextmanager
    def by_itself(self) -> Iterator[None]:
        """A context for work of this rank alone, which reads its own values."""
        before, self.alone = self.alone, True
        try:
            yield
        finally:
            self.alone = before

    # ---- values of all replicas ----

    def reduce_list(self, reduce_op: Any, values: Sequence[Any], options: Any = None) -> list[Any]:
        """Collective: the sum or mean of each value over the replicas."""
        op = collectives.op_of(reduce_op)
        if self.alone:
            return [tf.convert_to_tensor(value) for value in values]
        tensors = [
            v if isinstance(v, tf.IndexedSlices) else tensor_from(v, "the value to reduce")
            for v in values
        ]
        packing = self.packing.merged(options)
        kept = self.presence.kept(tensors)
        if op == SUM or self.presence.certain_of_all:
            return self.presence.received(collectives.reduce_all(op, kept, packing.of(kept)))
        # The mean of those replicas that have samples.
        kept.append(self.presence.count())
        *sums, count = collectives.reduce_all(SUM, kept, packing.of(kept))
        sums = self.presence.received(sums)
        return [self.presence.divided(each, count) for each in sums]

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        del destinations
        flat = tf.nest.flatten(value)
        if reduce_op == MEAN and all(distribute_utils.is_mirrored(each) for each in flat):
            return value
        reduced = self.reduce_list(reduce_op, [local(each) for each in flat], options)
        return tf.nest.pack_sequence_as(value, reduced)

    def _batch_reduce_to(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> Any:
        values = [local(value) for value, _ in value_destination_pairs]
        return self.reduce_list(reduce_op, values, options)

    def _gather_to_implementation(
        self, value: Any, destinations: Any, axis: Any, options: Any
    ) -> Any:
        del destinations
        self.packing.merged(options)  # or what it refuses
        rows = self.presence.rows(local(value))
        return self.presence.received([collectives.gather(rows, axis)])[0]

    def _broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """The value that aggregation ONLY_FIRST_REPLICA assigns."""
        if isinstance(tensor, float | int) or (
            destinations is not None and hasattr(destinations, "dtype") and is_counter(destinations)
        ):
            return tensor
        return collectives.from_replica_0(tensor)

    def _local_results(self, value: Any) -> Any:
        if isinstance(value, tf_values.DistributedValues):
            return (local(value),)
        return (local_tree(value),)

    # ---- data ----

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        distribute = super()._experimental_distribute_dataset
        if _keras.are_shared(dataset):
            return distribute(dataset, options)
        _data.check(dataset, options)
        read = _data.record_of(dataset)

        def made() -> Any:
            return distribute(_data.part_of_each_batch(dataset, read), options)

        if _world.size() == 1:
            return made()
        anew = tf.executing_eagerly() and is_to_be_split_anew(dataset)
        return _reading.compared(made(), read, made if anew else None)

    def _distribute_datasets_from_function(self, dataset_fn: Any, options: Any) -> Any:
        _data.check_options(options)
        return _data.from_function(
            dataset_fn, self._input_workers_with_options(options), self._container_strategy(),
            options,
        )  # fmt: skip

    def _experimental_distribute_values_from_function(self, value_fn: Any) -> Any:
        context = tf.distribute.experimental.ValueContext(_world.rank(), _world.size())
        return tf_values.PerReplica((value_fn(context),))


def _update_context() -> Any:
    from tensorflow.python.distribute import distribute_lib

    return distribute_lib.UpdateContext(0)
