"""Distributed datasets that ranks compare where they read them: in a loop of Python, and in one
that is part of a ``tf.function``.

TensorFlow takes datasets and iterators apart where they are arguments of a function, and makes
others of the parts inside. So which record belongs to them is one of the parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import input_lib  # private, as is all of `extended`

from farandole.strategy._data import Read

_numbers = itertools.count(1)
_records: WeakValueDictionary[int, Read] = WeakValueDictionary()
_NUMBER = tf.TensorSpec([], tf.int64)


def compared(dataset: Any, read: Read, anew: Callable[[], Any] | None) -> Any:
    """The same distributed dataset, whose batches ranks compare.

    Args:
        anew: makes what a loop of Python goes over, from the second on, if that is another one.
    """
    number = next(_numbers)
    read.name = f"distributed dataset {number}"
    _records[number] = read
    with tf.device("/cpu:0"):
        known = _known(dataset, ReadDataset, tf.constant(number, tf.int64), read)
    known.anew = anew
    return known


def _known(thing: Any, kind: type, number: Any, read: Read | None = None) -> Any:
    thing.__class__ = kind
    thing.number, thing.read = number, read  # as long as it is there, so is its record
    return thing


class ReadDataset(input_lib.DistributedDataset):  # type: ignore[misc]  # no types
    """As TensorFlow's."""

    number: Any
    read: Read | None
    anew: Callable[[], Any] | None = None  # Note [Orders that go on] in data/_pipeline.py
    _read_before = False

    def __iter__(self) -> Any:
        anew = self.anew if self._read_before and tf.executing_eagerly() else None
        self._read_before = True
        iterator = super().__iter__() if anew is None else iter(anew())
        return _known(iterator, ReadIterator, self.number, self.read)

    @property
    def _type_spec(self) -> Any:
        return _known_spec(super()._type_spec, _DatasetSpec)


class ReadIterator(input_lib.DistributedIterator):  # type: ignore[misc]
    """As TensorFlow's."""

    number: Any
    read: Read | None

    def get_next(self, name: Any = None) -> Any:
        try:
            batch = super().get_next(name)
        except tf.errors.OutOfRangeError:  # at once; an op of a function fails later
            _got(self.number, False)
            raise
        with tf.control_dependencies(tf.nest.flatten(batch, expand_composites=True)):
            told = _got(self.number, True)  # once it is there: its checksum is, too
        with tf.control_dependencies(told):
            return tf.nest.map_structure(_in_order, batch, expand_composites=True)

    def get_next_as_optional(self) -> Any:
        batch = super().get_next_as_optional()
        with tf.control_dependencies(_got(self.number, batch.has_value())):
            return tf.nest.map_structure(_in_order, batch, expand_composites=True)

    @property
    def _type_spec(self) -> Any:
        return _known_spec(super()._type_spec, _IteratorSpec)


def _known_spec(spec: Any, kind: type) -> Any:
    spec.__class__ = kind
    return spec


class _Numbered:
    """A spec of TensorFlow's, with the record's number as the last component."""

    @property
    def _component_specs(self) -> Any:
        return [*super()._component_specs, _NUMBER]  # type: ignore[misc]

    def _to_components(self, value: Any) -> Any:
        return [*super()._to_components(value), value.number]  # type: ignore[misc]

    def _from_components(self, components: Any) -> Any:
        *own, number = components
        made = super()._from_components(own)  # type: ignore[misc]
        return _known(made, self.value_type, number)  # type: ignore[attr-defined]


class _DatasetSpec(_Numbered, input_lib.DistributedDatasetSpec):  # type: ignore[misc]
    value_type = property(lambda _: ReadDataset)


class _IteratorSpec(_Numbered, input_lib.DistributedIteratorSpec):  # type: ignore[misc]
    value_type = property(lambda _: ReadIterator)


def _got(number: Any, found: Any) -> list[Any]:
    """A batch, or the end. In a function, whenever that runs; returns what it then waits for."""
    if tf.executing_eagerly():
        _tell(number, found)
        return []
    with tf.device("/cpu:0"):
        return [tf.numpy_function(_tell, [number, found], tf.int64)]


def _tell(number: Any, found: Any) -> Any:
    _records[int(number)].got(bool(found))
    return np.int64(0)


def _in_order(tensor: Any) -> Any:
    return tensor if tf.executing_eagerly() else tf.identity(tensor)
