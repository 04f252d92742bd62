"""A replica whose part of a batch is empty takes part with nothing.

No framework computes on an empty batch. So `run` hands such a replica one sample of zeros, and
here is what keeps that sample from counting: what the replica adds to reductions is zero, its rows
are left out of what is gathered and returned, and its metrics stay as they were. Gradients flow
back through reductions, so those of such a replica are zero there, too.

A step may be traced long before a part is empty, and functions call functions. So that a replica
has samples is a variable, which graphs read when they run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from farandole import _world


class Presence:
    """Whether this replica has samples in the step that runs."""

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("/cpu:0"):
            self._variable = tf.Variable(True, trainable=False, name="has_samples")
        self._now = True  # the same, for what runs eagerly
        self._in_step = False  # eagerly, of arguments that may be empty on some replica
        self.needed = _world.size() > 1  # one replica has all samples
        self.writes_alike = False  # what is written is of all replicas' samples
        self._counts_all = False  # what is reduced has nothing of the sample of zeros

    @contextmanager
    def of(self, has_samples: Any) -> Iterator[None]:
        """A context for a step that runs, or is traced. None: it has samples in any case."""
        if has_samples is None:
            yield
            return
        if tf.executing_eagerly():
            self._in_step, self._now = True, bool(has_samples)
        if has_samples is not True:
            self._variable.assign(has_samples)
        try:
            yield
        finally:
            self._in_step, self._now = False, True
            if has_samples is not True:
                self._variable.assign(True)

    @contextmanager
    def writing_alike(self) -> Iterator[None]:
        """A context in which variables are assigned equal values on all replicas, which stay."""
        before, self.writes_alike = self.writes_alike, True
        try:
            yield
        finally:
            self.writes_alike = before

    @contextmanager
    def updating(self) -> Iterator[None]:
        """A context in which an optimizer works with gradients that kept() gave: what it writes is
        equal on all replicas, and its sums count as they are."""
        before, self._counts_all = self._counts_all, True
        try:
            with self.writing_alike():
                yield
        finally:
            self._counts_all = before

    def _is_there(self) -> Any:
        return self._now if tf.executing_eagerly() else self._variable.read_value()

    def kept(self, values: Sequence[Any]) -> list[Any]:
        """The tensors and slices, or zeros in their place if this replica has no samples."""
        if self.certain:
            return list(values)
        return _kept(self._is_there(), values)

    def received(self, values: Sequence[Any]) -> list[Any]:
        """Tensors and slices that a collective gives. Gradients by them are kept, too: the other
        replicas add them to their own."""
        if self.certain:
            return list(values)
        there = self._is_there()  # gradients may be computed after the step

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def received(*given: tf.Tensor) -> Any:
            return [tf.identity(each) for each in given], lambda *flows: _kept(there, flows)

        return _with_dense(values, received(*_dense(values)))

    def count(self) -> tf.Tensor:
        """1, or 0 for a replica without samples."""
        return tf.cast(self._is_there(), tf.float32)

    @staticmethod
    def divided(value: Any, count: Any) -> Any:
        """A sum over replicas, by how many have samples."""
        if isinstance(value, tf.IndexedSlices):
            rows = value.values / tf.cast(count, value.dtype)
            return tf.IndexedSlices(rows, value.indices, value.dense_shape)
        return tf.cast(value / tf.cast(count, value.dtype), value.dtype)

    def returned(self, outputs: Any) -> Any:
        """A step's outputs. Without samples, rows are left out, and other numbers become zero."""
        if self.certain:
            return outputs
        return tf.nest.map_structure(self._one_returned, outputs)

    def rows(self, value: Any) -> Any:
        """The same for a value that is gathered."""
        if self.certain:
            return value
        return self._one_returned(value)

    def _one_returned(self, value: Any) -> Any:
        if not isinstance(value, tf.Tensor) or value.dtype in (tf.resource, tf.variant):
            return value
        batch = 1 if tf.executing_eagerly() else None
        there = self._is_there()
        if value.shape.rank and value.shape[0] == batch:
            count = tf.shape(value)[0]
            return value[: tf.where(there, count, 0)]
        if value.dtype == tf.string:
            return value
        return _choose(there, [value], [tf.zeros_like(value)])[0]

    def restore(self, variable: Any, before: tf.Tensor) -> None:
        """Undoes a write of a replica without samples."""
        if tf.executing_eagerly():
            if not self._now:
                variable.assign(before)
            return
        variable.assign(_choose(self._is_there(), [variable.read_value()], [before])[0])

    @property
    def certain(self) -> bool:
        """Whether all values of this replica count, as it has samples for certain."""
        if not self.needed or self._counts_all:
            return True
        return tf.executing_eagerly() and self._now

    @property
    def certain_of_all(self) -> bool:
        """The same for all replicas; all of them give the same answer."""
        if not self.needed or self._counts_all:
            return True
        return tf.executing_eagerly() and not self._in_step


def _kept(there: Any, values: Sequence[Any]) -> list[Any]:
    dense = _dense(values)
    return _with_dense(values, _choose(there, dense, [tf.zeros_like(each) for each in dense]))


def _dense(values: Sequence[Any]) -> list[Any]:
    return [each.values if isinstance(each, tf.IndexedSlices) else each for each in values]


def _with_dense(values: Sequence[Any], dense: Sequence[Any]) -> list[Any]:
    """Tensors, or slices of the same indices as `values`."""
    return [
        tf.IndexedSlices(each, value.indices, value.dense_shape)
        if isinstance(value, tf.IndexedSlices)
        else each
        for value, each in zip(values, dense, strict=True)
    ]


def _choose(there: Any, values: list[Any], others: list[Any]) -> list[Any]:
    if isinstance(there, bool):
        return values if there else others
    chosen = tf.cond(there, lambda: values, lambda: others)
    for each, value in zip(chosen, values, strict=True):
        each.set_shape(value.shape)
    return list(chosen)


# ---- parts ----


def filled(arguments: Any) -> tuple[Any, Any]:
    """The arguments of a step, with one sample of zeros where this replica's part is empty; and
    whether it has samples: None if nothing of it can be empty, on any replica."""
    flat = tf.nest.flatten(arguments)
    if tf.executing_eagerly():
        return _filled_eagerly(arguments, flat)
    places = [i for i, value in enumerate(flat) if _may_be_empty(value)]
    if not places:
        return arguments, None
    has = tf.reduce_all([tf.shape(flat[i])[0] > 0 for i in places])
    parts = [flat[i] for i in places]
    whole = tf.cond(has, lambda: parts, lambda: [_one_of_zeros(each) for each in parts])
    for i, each, part in zip(places, whole, parts, strict=True):
        each.set_shape([None, *part.shape[1:]])  # also where a function is traced for an empty part
        flat[i] = each
    return tf.nest.pack_sequence_as(arguments, flat), has


def _filled_eagerly(arguments: Any, flat: list[Any]) -> tuple[Any, Any]:
    # In every step, for which a tensor's `shape` takes long.
    lengths = [
        (i, shape[0])
        for i, value in enumerate(flat)
        if isinstance(value, tf.Tensor) and (shape := value._shape_tuple())
    ]
    places = [i for i, length in lengths if length == 0]
    if not places:
        return arguments, True if lengths else None
    for i in places:
        flat[i] = _one_of_zeros(flat[i])
    return tf.nest.pack_sequence_as(arguments, flat), False


def _may_be_empty(value: Any) -> bool:
    """Whether a tensor of a graph may have no rows."""
    if not isinstance(value, tf.Tensor) or not value.shape.rank:
        return False
    return value.shape[0] in (0, None)


def _one_of_zeros(value: tf.Tensor) -> tf.Tensor:
    return tf.zeros(tf.concat([[1], tf.shape(value)[1:]], 0), value.dtype)
