"""Where an operation is being made: eagerly or in a graph, and whether it can run there."""

from __future__ import annotations

import inspect
import re
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

from farandole._core import InvalidArgument
from farandole.common._process_set import number_of

_F = TypeVar("_F", bound=Callable[..., Any])


def as_written(function: _F) -> _F:
    """Decorates what users call: AutoGraph, which would rewrite it and all that it calls while a
    function is traced (some seconds, for nothing), leaves it alone."""
    plain: _F = tf.autograph.experimental.do_not_convert(function)
    return plain


class Refused(InvalidArgument, tf.errors.InvalidArgumentError):  # type: ignore[misc]
    """Bad input, seen on this rank before anything was sent: farandole's class and TensorFlow's."""

    def __init__(self, node_def: Any, op: Any, message: str, *args: Any) -> None:
        # AutoGraph makes it again, with its own message, by exactly these names.
        tf.errors.InvalidArgumentError.__init__(self, node_def, op, message, *args)


def refused(message: str) -> Refused:
    return Refused(None, None, message)


def set_number(process_set: object) -> int:
    """Of a process set that this rank may use. Raises Refused."""
    try:
        return number_of(process_set)
    except InvalidArgument as error:
        raise refused(str(error)) from None


def check_place() -> None:
    """Raises Refused where our ops cannot run."""
    if tf.distribute.has_strategy():
        raise refused(
            "farandole's operations were called in the scope of a tf.distribute strategy, which "
            "would reduce a second time\n  advice: use one of the two; with farandole every rank "
            "is a process of its own (farandole run)"
        )
    if not tf.executing_eagerly() and _is_compiled():
        raise refused(
            "farandole's operations cannot be compiled by XLA\n  advice: set jit_compile=False on "
            "the tf.function around them, or in Keras' model.compile(); functions that they are "
            "not in may keep jit_compile=True"
        )


def _is_compiled() -> bool:
    try:
        from tensorflow.python.ops import control_flow_util  # private
    except ImportError:
        return False  # TensorFlow then says it, in more words
    asks = getattr(control_flow_util, "GraphOrParentsInXlaContext", None)
    return asks is not None and bool(asks(tf.compat.v1.get_default_graph()))


# ---- names ----

_used: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
_scopes: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def is_part(graph: Any) -> bool:
    """Of a function (or graph of TensorFlow 1): a branch or a loop."""
    return type(graph).__name__.lstrip("_").startswith(("Cond", "While"))


def function_of(graph: Any) -> Any:
    """The function (or graph of TensorFlow 1) that the graph is a part of, or is."""
    while is_part(graph):
        graph = graph.outer_graph
    return graph


def unique_name(name: str | None, kind: str) -> str:
    """What an operation is called: on every rank the same, as long as all make the same graph.

    In a graph a name is made unique ("x", "x_1", …), and a nameless operation is called by its
    place. The name of a function stands before those of its operations: it may be traced by
    itself or in another function, and runs beside that one's own operations. Eagerly a name is
    taken as it is; for a nameless one the core counts.
    """
    if tf.executing_eagerly():
        return name or ""
    # Branches and bodies of loops have numbers in their names that differ between ranks.
    graph = function_of(tf.compat.v1.get_default_graph())
    scope = _scope_of(graph)
    wanted = f"{scope}/{name or kind}" if scope else name or f"graph/{kind}"
    used = _used.setdefault(graph, set())
    called, count = wanted, 0
    while called in used:
        count += 1
        called = f"{wanted}_{count}"
    used.add(called)
    return called


def _scope_of(graph: Any) -> str:
    if not is_function(graph):
        return ""
    if graph not in _scopes:
        _scopes[graph] = _qualified_name(graph) or _plain(graph.name)
    return _scopes[graph]


def _plain(name: str) -> str:
    """Without the number of a function that TensorFlow makes for gradients."""
    return re.sub(r"^__(forward|backward)_(.*)_\d+$", r"\1 of \2", name)


def _qualified_name(graph: Any) -> str:
    """What its class or maker calls the function that is traced into the graph: many are called
    "call", and one may call another. Empty where TensorFlow's frames do not tell."""
    called, frame = graph.name, inspect.currentframe()
    while frame is not None:
        if (
            frame.f_code.co_name == "func_graph_from_py_func"
            and frame.f_locals.get("func_graph") is graph
        ):
            function = frame.f_locals.get("original_func")
            parts = str(getattr(function, "__qualname__", "")).split(".")
            named = [part for part in parts if part != "<locals>"]
            return ".".join(named[-2:]) if named[-1] == called else ""
        frame = frame.f_back
    return ""


def in_tensorflow_1() -> bool:
    """Whether a graph is made whose ops somebody runs by hand, in a session."""
    return not tf.executing_eagerly() and not is_function(tf.compat.v1.get_default_graph())


def is_function(graph: Any) -> bool:
    return hasattr(graph, "control_outputs")


def keep(results: list[Any]) -> None:
    """An operation runs in every call of the function, also where nobody uses its results: the
    other ranks do not know that."""
    outputs = getattr(tf.compat.v1.get_default_graph(), "control_outputs", None)
    if outputs is not None and results:
        outputs.append(results[0] if isinstance(results[0], tf.Operation) else results[0].op)


# ---- the order of what blocks ----

_last_finish: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()  # by its name


def after_other_finishes() -> Any:
    """A context: ops that block a thread of TensorFlow's do so one after the other, in the order in
    which the graph was made, which is the same on all ranks. Else few threads could deadlock. Not
    in graphs of TensorFlow 1, where what a session runs must not need what it does not run."""
    if tf.executing_eagerly() or in_tensorflow_1():
        return tf.control_dependencies([])
    graph = tf.compat.v1.get_default_graph()
    last = _last_finish.get(graph)
    return tf.control_dependencies([] if last is None else [graph.get_operation_by_name(last)])


def note_finish(op: Any) -> None:
    if not tf.executing_eagerly():
        _last_finish[tf.compat.v1.get_default_graph()] = op.name
