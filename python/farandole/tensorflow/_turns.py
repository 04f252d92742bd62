"""Calls of traced functions with our operations take turns.

A function has the names of its operations once, so two calls of it in another function must not be
under way together. TensorFlow orders calls that touch the same resource. It is told of one that all
of these calls touch, and that is not there: a variable would do as well (and does, where TensorFlow
cannot be told), but a SavedModel would have to have it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import tensorflow as tf

from farandole.tensorflow._graph import function_of, is_function, is_part, refuse_in_dataset

# All that TensorFlow asks of a resource: a name of its own, and what op it comes from.
_RESOURCE = SimpleNamespace(_id="farandole's turn", op=SimpleNamespace(type="None"))


@functools.cache
def are_known() -> bool:
    """Registers our resolver with TensorFlow; False where that is not possible."""
    try:
        # Private, and the same in 2.16 and 2.21.
        from tensorflow.python.framework import auto_control_deps

        auto_control_deps.register_acd_resource_resolver(_farandole_turns)
        return True
    except (ImportError, AttributeError):
        return False


def take() -> None:
    """The function that is traced has operations of ours."""
    if not are_known():
        _write_variable(function_of(tf.compat.v1.get_default_graph()))


def _farandole_turns(op: Any, reads: Any, writes: Any) -> bool:  # noqa: ARG001
    """TensorFlow asks this of every op of a function: whether it touches more than its inputs."""
    if _RESOURCE in writes or not _calls_ours(op):
        return False
    refuse_in_dataset(op.graph)  # where one that was traced before is called
    writes.add(_RESOURCE)
    return True


def _calls_ours(op: Any) -> bool:
    """Whether functions with our operations are called. What is in a branch or a loop itself
    belongs to the function that this is a part of."""
    return any(
        any(map(_calls_ours, graph.get_operations())) if is_part(graph) else _has_ours(graph)
        for graph in _graphs_of(op)
    )


_known: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def _has_ours(graph: Any) -> bool:
    if graph not in _known:
        _known[graph] = any(
            op.type.startswith("Farandole") or any(map(_has_ours, _graphs_of(op)))
            for op in graph.get_operations()
        )
    return _known[graph]


def _graphs_of(op: Any) -> Iterator[Any]:
    """The functions that an op calls, branches and loops among them."""
    for attribute in _function_attributes(op.type, op):
        value = op.get_attr(attribute)
        for each in value if isinstance(value, list) else [value]:
            function = op.graph._get_function(each.name)
            if function is not None:
                yield function.graph


_attributes: dict[str, list[str]] = {}  # by type of op: most have none, and they are many


def _function_attributes(kind: str, op: Any) -> list[str]:
    if kind not in _attributes:
        attributes = op.op_def.attr
        _attributes[kind] = [a.name for a in attributes if a.type in ("func", "list(func)")]
    return _attributes[kind]


# ---- where TensorFlow cannot be told ----

_variable: tf.Variable | None = None  # written by every function with operations in it
_writers: weakref.WeakSet[Any] = weakref.WeakSet()


def _write_variable(function: Any) -> None:
    global _variable
    if function in _writers or not is_function(function):
        return
    _writers.add(function)
    with tf.init_scope():
        if not tf.executing_eagerly():
            return  # in a graph of TensorFlow 1 variables wait for an initializer
        if _variable is None:
            _variable = tf.Variable(0, trainable=False, dtype=tf.int64, name="farandole_turn")
    with function.as_default():
        _variable.assign_add(1, read_value=False)
