"""Central storage: trainable variables are in memory that all ranks of the host map, and the
optimizers' state is in the process of rank 0.

Rank 0 alone updates. What it has computed becomes the value of the variable on every rank by
`publish`: it writes the values into the memory, says where, and every rank's variable gets a tensor
on that memory. TensorFlow copies a variable with such a tensor before it writes to it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops as tf_variables  # private: to derive from

from farandole import _world
from farandole._core import InvalidArgument
from farandole.common._weights import note_broadcast
from farandole.strategy import _collectives as collectives
from farandole.strategy._extended import Extended
from farandole.strategy._host_memory import Bytes, HostMemory, Zeros
from farandole.strategy._options import Packing
from farandole.strategy._variables import CLASSES, MirroredVariable, local
from farandole.tensorflow._calls import Request, run
from farandole.tensorflow._reduction import after
from farandole.tensorflow._weights import raw

_FLOATS = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
_OF_BYTES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}  # what DLPack has


class CentralVariable(MirroredVariable):
    """One of the scope of a CentralStorageStrategy."""

    is_shared = False  # its value is in memory that all ranks map
    is_state = False  # of an optimizer: its value is on rank 0 alone

    def _update_replica(self, update_fn: Any, value: Any, **options: Any) -> Any:
        """In a step that is the program's own: rank 0 writes, for all."""
        own = super()._update_replica
        central = self.distribute_strategy.extended
        if not self.is_shared or central.inside_keras_alone or central.alone:
            return own(update_fn, value, **options)
        if central.updating:
            return own(update_fn, value, **options) if central.leads or _merges(self) else None
        with central.central_update():
            if central.leads or _merges(self):
                own(update_fn, value, **options)
        central.publish([self])
        return local(self)


def _merges(variable: Any) -> bool:
    """Whether a write is one of all replicas' values, for which all take part."""
    return bool(variable.aggregation != tf.VariableAggregation.NONE)


class AbsentVariable(tf_variables.ResourceVariable):  # type: ignore[misc]  # no types
    """State of an optimizer that this process does not have: what is written to it is dropped."""

    central: Any = None

    def _read_variable_op(self, *args: Any, **kwargs: Any) -> Any:
        if self.central.updating:  # for a write that is dropped
            return super()._read_variable_op(*args, **kwargs)
        raise InvalidArgument(
            f"'{self.name}' is state of an optimizer, which a CentralStorageStrategy has on rank 0 "
            f"alone; this is rank {_world.rank()}\n  advice: read it on rank 0, or save a "
            "checkpoint, which all ranks call"
        )

    def assign(self, *_: Any, **__: Any) -> Any:
        return self

    assign_add = assign_sub = assign

    def __repr__(self) -> str:
        return f"<tf.Variable '{self.name}' shape={self.shape} on rank 0>"


class CentralExtended(Extended):
    """See there.

    Args:
        parameter_device: where the variables are: the host's memory.
    """

    def __init__(self, strategy: Any, device: str, parameter_device: str) -> None:
        super().__init__(strategy, device, Packing())
        self._place = parameter_device
        self._classes = CLASSES | {tf.VariableSynchronization.ON_WRITE: CentralVariable}
        self.leads = _world.rank() == 0
        self.updating = False  # an optimizer updates: rank 0 writes, others do nothing
        self._reduced: list[Any] = []  # meanwhile
        self._makes_state = False
        self.memory: HostMemory | None = None
        self._known: set[int] = set()  # by identity: variables that have buffers
        self._zeros = Zeros()
        with tf.init_scope(), tf.device("/cpu:0"):
            self._turn = tf.Variable(0, dtype=tf.int64, trainable=False, name="publications")

    # ---- variables ----

    @contextmanager
    def making_state(self) -> Iterator[None]:
        """Around what makes variables of an optimizer."""
        before, self._makes_state = self._makes_state, True
        try:
            yield
        finally:
            self._makes_state = before

    def _share(self, variable: Any) -> None:
        if not self._is_central(variable):
            super()._share(variable)
            return
        label, note = self._label_of_new(variable)
        if self._makes_state:
            variable.is_state = True
            collectives.from_replica_0(tf.zeros([0]), label, note)
            if not self.leads:
                self._vacate(local(variable))
            return
        variable.is_shared = True
        if self.memory is None:
            self.memory = HostMemory()
        self.publish([variable], label, note)

    def _is_central(self, variable: Any) -> bool:
        """Numbers without a dimension are in each process, and so is what replicas write by
        themselves, as layers do with their moving averages."""
        return (
            _world.size() > 1
            and isinstance(variable, CentralVariable)
            and (self._makes_state or variable.trainable)
            and variable.dtype in _FLOATS
            and bool(variable.shape.rank)
            and bool(variable.shape.num_elements())  # None where that is not known
        )

    def _vacate(self, variable: Any) -> None:
        length = variable.shape.num_elements() * variable.dtype.size
        variable.assign(_tensor_on(self._zeros.array(length), variable.dtype, variable.shape))
        variable.__class__ = AbsentVariable
        variable.central = self

    # ---- updates ----

    @property
    def inside_keras_alone(self) -> bool:
        """In a step of Keras', but not in its optimizer: what layers write is the replica's own."""
        return self.inside_keras and not self.updating

    @contextmanager
    def central_update(self, reduced: Sequence[Any] = ()) -> Iterator[None]:
        """Around an update, on all ranks, by gradients that may be reduced already. `publish`
        follows."""
        before, self.updating = self.updating, True
        self._reduced = list(reduced)
        try:
            yield
        finally:
            self.updating = before

    def _update(self, var: Any, fn: Any, args: Any, kwargs: Any, group: bool) -> Any:
        elsewhere = isinstance(var, CentralVariable) and not self.leads
        if elsewhere and (var.is_state or (var.is_shared and self.updating)):
            return None
        return super()._update(var, fn, args, kwargs, group)

    def reduce_list(self, reduce_op: Any, values: Sequence[Any], options: Any = None) -> list[Any]:
        reduced = super().reduce_list(reduce_op, values, options)
        if self.updating:
            self._reduced += reduced
        return reduced

    def publish(self, variables: Sequence[Any], label: str | None = None, note: str = "") -> None:
        """Collective: variables have rank 0's values, on every rank. In a graph, after the
        gradients of all ranks are there."""
        mine = [local(each) for each in variables if getattr(each, "is_shared", False)]
        if not mine:
            return
        dtypes = [each.dtype for each in mine]

        def written(*values: Any) -> Any:
            pairs = zip(mine, values, strict=True)
            return np.array([self._written(each, value) for each, value in pairs], np.int64)

        def found(places: Any) -> list[Any]:
            rows = zip(np.asarray(places).tolist(), mine, strict=True)
            return [self._found(begin, each) for begin, each in rows]

        with tf.device("/cpu:0"), self._after_reduced(), self._in_turn() as done:
            if self.leads:
                values = [each.read_value() for each in mine]
                places = _called(written, values, [tf.int64])[0]
                places = tf.ensure_shape(places, [len(mine)])
            else:
                places = tf.zeros([len(mine)], tf.int64)
            # A sum and no broadcast: rank 0 goes on when all ranks have come.
            places = run(Request("all_reduce", [places], label, op="sum", note=note))[0]
            for each, value in zip(mine, _called(found, [places], dtypes), strict=True):
                done.append(each.assign(tf.ensure_shape(value, each.shape), read_value=False))

    def publish_among(self, variables: Sequence[Any]) -> list[Any]:
        """Collective: publishes the shared ones of Keras' variables; returns those that are
        neither in shared memory nor on rank 0 alone."""
        of_scope = [raw(each) for each in variables]
        shared = [each for each in of_scope if getattr(each, "is_shared", False)]
        note_broadcast(shared)
        self.publish(shared)
        return [
            each
            for each, inner in zip(variables, of_scope, strict=True)
            if not (getattr(inner, "is_shared", False) or getattr(inner, "is_state", False))
        ]

    @contextmanager
    def _after_reduced(self) -> Iterator[None]:
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        with after([each for each in self._reduced if _graph_of(each) is graph]):
            yield
        self._reduced = []

    @contextmanager
    def _in_turn(self) -> Iterator[list[Any]]:
        """In a graph: publications run in the order in which they are made. Takes what ends one."""
        done: list[Any] = []
        if tf.executing_eagerly():
            yield done
            return
        with tf.control_dependencies([self._turn.read_value()]):
            yield done
            with tf.control_dependencies(done):
                self._turn.assign_add(1, read_value=False)

    def _written(self, variable: Any, value: Any) -> int:
        assert self.memory is not None
        array = np.ascontiguousarray(np.asarray(value))
        known = id(variable)
        if known not in self._known:
            self._known.add(known)
            weakref.finalize(variable, self._forget, known, array.nbytes).atexit = False
        return self.memory.write(known, array.reshape(-1).view(np.uint8))

    def _forget(self, known: int, length: int) -> None:
        assert self.memory is not None
        self._known.discard(known)
        self.memory.leave(known, length)

    def _found(self, begin: int, variable: Any) -> Any:
        assert self.memory is not None
        length = variable.shape.num_elements() * variable.dtype.size
        return _tensor_on(self.memory.array(begin, length), variable.dtype, variable.shape)


def _graph_of(tensor: Any) -> Any:
    of = tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor
    return None if hasattr(of, "numpy") else of.graph


def _tensor_on(memory: Bytes, dtype: Any, shape: Any) -> Any:
    """A tensor on memory of ours, which stays as long as the tensor. DLPack has not all dtypes."""
    words = memory.view(_OF_BYTES[dtype.size]).reshape(shape)
    return tf.bitcast(tf.experimental.dlpack.from_dlpack(words.__dlpack__()), dtype)


def _called(function: Callable[..., Any], tensors: Sequence[Any], dtypes: Sequence[Any]) -> Any:
    """A list of what a function of Python gives: now, or when the graph runs."""
    if tf.executing_eagerly():
        given = function(*tensors)
        return given if isinstance(given, list) else [tf.constant(given)]
    return tf.py_function(function, list(tensors), list(dtypes))
