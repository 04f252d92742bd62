"""Where an operation is being made: eagerly or in a graph, and whether it can run there."""

from __future__ import annotations

import functools
import inspect
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import tensorflow as tf

from farandole import _elastic
from farandole._arguments import encodable, explained_by
from farandole._core import InvalidArgument

_F = TypeVar("_F", bound=Callable[..., Any])


def as_written(function: _F) -> _F:
    """Decorates functions that users call. Errors are Refused, which names a wrong argument.
    AutoGraph leaves the function alone: to rewrite it and all that it calls would take some
    seconds of tracing, for nothing."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except InvalidArgument as error:
            if isinstance(error, Refused):
                raise
            raise refused(str(error)) from None

    plain: _F = tf.autograph.experimental.do_not_convert(explained_by(refused, {}, call))
    return plain


class Refused(InvalidArgument, tf.errors.InvalidArgumentError):  # type: ignore[misc]
    """Bad input, seen on this rank before anything was sent: farandole's class and TensorFlow's."""

    def __init__(self, node_def: Any, op: Any, message: str, *args: Any) -> None:
        # AutoGraph makes it again, with its own message, by exactly these names.
        tf.errors.InvalidArgumentError.__init__(self, node_def, op, message, *args)


def refused(message: str) -> Refused:
    return Refused(None, None, encodable(message))


class Unsupported(Refused, NotImplementedError):
    """Input that is valid in itself, and has no meaning here."""


def unsupported(message: str) -> Unsupported:
    return Unsupported(None, None, message)


def check_place() -> None:
    """Raises Refused where our ops cannot run."""
    if tf.distribute.has_strategy():
        _check_strategy(tf.distribute.get_strategy())
    if not tf.executing_eagerly():
        refuse_in_dataset(tf.compat.v1.get_default_graph())
    if not tf.executing_eagerly() and _is_compiled():
        raise refused(
            "farandole's operations cannot be compiled by XLA\n  advice: set jit_compile=False on "
            "the tf.function around them, or in Keras' model.compile(); functions that they are "
            "not in may keep jit_compile=True"
        )


def goes_on() -> bool:
    """Whether the graph that is made runs in later worlds, too. Then it contains nothing of this
    world, such as its size. Nor does a rank wait for others while it makes the graph, since ranks
    of an earlier world have made theirs."""
    return _elastic.is_elastic() and not tf.executing_eagerly()


_in_dataset: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
# One call after the other, when it is asked for: AutoGraph's loops over a dataset are these.
_IN_ORDER = re.compile(r"(Dataset|tf_data_experimental)_(scan|reduce|take_while)_")


def refuse_in_dataset(graph: Any) -> None:
    """Raises Refused while a function of tf.data is made, or one that it calls.

    These run ahead of the program, several at once, and in an order of each rank's own: elements
    would be reduced with the wrong ones. An iterator that ends waits for calls under way, and
    these wait for ranks whose iterators have ended."""
    while graph is not None:
        if graph not in _in_dataset:
            _in_dataset[graph] = _is_of_dataset(graph)
        if _in_dataset[graph]:
            raise refused(
                "farandole's operations cannot be in a function of tf.data "
                f"('{graph.name}'): ranks would run them in different orders\n"
                "  advice: reduce what the dataset gives, in the training step"
            )
        graph = getattr(graph, "outer_graph", None)


def _is_of_dataset(graph: Any) -> bool:
    module = str(getattr(_function_traced_into(graph), "__module__", ""))
    ours = module == "tensorflow.python.data.ops.structured_function"
    return ours and _IN_ORDER.match(graph.name) is None


def _check_strategy(strategy: Any) -> None:
    """Raises Refused unless this process has one replica, which computes as without a strategy."""
    if getattr(strategy.extended, "one_process_a_replica", False):  # farandole.strategy
        return
    # Coordinators count the replicas of one worker, and run our operations in other processes.
    elsewhere = any("ParameterServer" in base.__name__ for base in type(strategy).__mro__)
    replicas = strategy.num_replicas_in_sync
    if replicas == 1 and not elsewhere:
        return
    raise refused(
        f"farandole's operations were called in the scope of a tf.distribute."
        f"{type(strategy).__name__} ({replicas} {'replica' if replicas == 1 else 'replicas'}), "
        "which would reduce a second time\n  advice: leave the strategy out, and start a process "
        f"a replica: farandole run -np {max(replicas, 2)} -- python train.py"
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
    """Whether a graph is a branch or a loop of a function (or graph of TensorFlow 1)."""
    return type(graph).__name__.lstrip("_").startswith(("Cond", "While"))


def function_of(graph: Any) -> Any:
    """The function (or graph of TensorFlow 1) that the graph is a part of, or is."""
    while is_part(graph):
        graph = graph.outer_graph
    return graph


def unique_name(name: str | None, kind: str) -> str:
    """The name of an operation: the same on every rank, as long as all make the same graph.

    In a graph a name is made unique ("x", "x_1", …), and an operation without one is named by its
    kind. The name of a function stands before those of its operations: it may be traced by
    itself or in another function, and runs beside that one's own operations. Eagerly a name is
    taken as it is, and the core numbers operations without one.
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
    """The name without the number that TensorFlow gives to a function for gradients."""
    return re.sub(r"^__(forward|backward)_(.*)_\d+$", r"\1 of \2", name)


def _qualified_name(graph: Any) -> str:
    """The name of the function that is traced into the graph, after that of its class or maker:
    many are called "call", and one may call another. Empty if TensorFlow's frames do not tell."""
    function = _function_traced_into(graph)
    parts = str(getattr(function, "__qualname__", "")).split(".")
    named = [part for part in parts if part != "<locals>"]
    return ".".join(named[-2:]) if named[-1] == graph.name else ""


def _function_traced_into(graph: Any) -> Any:
    """The user's function; None where TensorFlow's frames do not tell."""
    frame = inspect.currentframe()
    while frame is not None:
        if (
            frame.f_code.co_name == "func_graph_from_py_func"
            and frame.f_locals.get("func_graph") is graph
        ):
            return frame.f_locals.get("original_func")
        frame = frame.f_back
    return None


def in_tensorflow_1() -> bool:
    """Whether a graph of TensorFlow 1 is made, whose ops run in a session."""
    return not tf.executing_eagerly() and not is_function(tf.compat.v1.get_default_graph())


def is_function(graph: Any) -> bool:
    return hasattr(graph, "control_outputs")


_only_if_used: list[None] = []


@contextmanager
def only_if_used() -> Iterator[None]:
    """A context for making operations that run only where the function uses their results."""
    _only_if_used.append(None)
    try:
        yield
    finally:
        _only_if_used.pop()


def keep(results: list[Any]) -> None:
    """Makes an operation run in every call of the function, even if its results are not used: the
    other ranks do not know that."""
    outputs = getattr(tf.compat.v1.get_default_graph(), "control_outputs", None)
    if outputs is not None and results and not _only_if_used:
        outputs.append(results[0] if isinstance(results[0], tf.Operation) else results[0].op)


# ---- where gradients end ----

# Where the graph knows the shape, TensorFlow makes constants in their place.
_WITHOUT_GRADIENT = ("OnesLike", "ZerosLike")


def is_constant(tensor: tf.Tensor) -> bool:
    """Whether no gradient flows through a tensor of a graph to a variable or an argument.

    Tapes do not tell: they record ``tf.ones_like(x)`` only where the graph does not know the shape
    of `x`, which one rank's may know and another's not."""
    waiting, seen = [tensor], set()
    while waiting:
        tensor = waiting.pop()
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if tensor.op.type == "Placeholder":
            captured = _captured(tensor)
            if captured is None:
                return False
            waiting.append(captured)
        elif tensor.op.type not in _WITHOUT_GRADIENT:
            inputs = tensor.op.inputs
            if any(each.dtype in (tf.resource, tf.variant) for each in inputs):
                return False  # a variable, an iterator, a list
            waiting += [each for each in inputs if each.dtype.is_floating or each.dtype.is_complex]
    return True


def _captured(placeholder: tf.Tensor) -> tf.Tensor | None:
    """The tensor of the outer graph that it stands for; None for an argument."""
    for outer, inner in getattr(placeholder.graph, "captures", ()):
        if inner is placeholder:
            return outer if hasattr(outer, "graph") else None  # eager tensors have none
    return None


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


def after(results: list[list[Any]]) -> Any:
    """A context, for the gradients of these: the same in a graph of TensorFlow 1, where what blocks
    is not in order otherwise."""
    made = [each for few in results for each in few]
    return tf.control_dependencies(made if in_tensorflow_1() else [])


def note_finish(op: Any) -> None:
    if not tf.executing_eagerly():
        _last_finish[tf.compat.v1.get_default_graph()] = op.name
