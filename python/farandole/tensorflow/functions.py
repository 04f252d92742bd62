"""One rank's variables and objects for all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from farandole import _unreduced
from farandole.common import _objects
from farandole.common._process_set import ProcessSet, global_process_set, number_of
from farandole.common._weights import note_broadcast
from farandole.tensorflow._calls import Request, run, variable_from
from farandole.tensorflow._graph import as_written, in_tensorflow_1, refused
from farandole.tensorflow._reduction import names_of
from farandole.tensorflow._weights import raw

__all__ = [
    "BroadcastGlobalVariablesHook",
    "allgather_object",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
]

if TYPE_CHECKING:
    SessionRunHook = object  # TensorFlow has no types
else:
    SessionRunHook = tf.compat.v1.train.SessionRunHook


@as_written
def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,  # noqa: ARG001 - Horovod's signature: it is always in place
) -> Any:
    """Assigns the root's values to variables, as one operation.

    Args:
        variables: ``tf.Variable`` or Keras variables that have been built, on every rank the same
            in the same order: ``model.variables``, ``optimizer.variables``.
        root_rank: whose values; a rank of the world.
        process_set: the ranks that take part.

    Returns:
        In a graph of TensorFlow 1, the op that assigns; else None.

    Raises:
        tf.errors.InvalidArgumentError: a variable is not built, or of a dtype that cannot be sent.
        tf.errors.FailedPreconditionError: the ranks' variables differ; names the first that does.

    Examples:
        >>> import tensorflow as tf, farandole.tensorflow as hvd
        >>> hvd.init()
        >>> hvd.broadcast_variables([tf.Variable([1.0, 2.0])], root_rank=0)
    """
    listed = list(variables)
    names = names_of(listed)
    values = [variable_from(v, name) for v, name in zip(listed, names, strict=True)]
    note = "\n".join(
        f"'{name}' {value.dtype.name} {value.shape}"
        for name, value in zip(names, values, strict=True)
    )
    # An empty broadcast if there is no variable, so that ranks which have some get an error.
    sent, number = values or [tf.zeros([0])], number_of(process_set)
    request = Request("broadcast", sent, "variables", number, root=root_rank, note=note)
    note_broadcast(map(raw, listed))
    _unreduced.note_broadcast("broadcast_variables")
    assigned = [v.assign(value) for v, value in zip(listed, run(request), strict=False)]
    return tf.group(*assigned) if in_tensorflow_1() else None


@as_written
def broadcast_global_variables(root_rank: int) -> Any:
    """In a graph of TensorFlow 1: the op that gives all global variables the root's values.

    Raises:
        RuntimeError: eagerly there are no global variables.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "broadcast_global_variables() is for graphs of TensorFlow 1; call "
            "broadcast_variables(model.variables, root_rank)"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(SessionRunHook):
    """For sessions of TensorFlow 1: gives all global variables the root's values at the start."""

    def __init__(self, root_rank: int, device: str = "") -> None:  # noqa: ARG002
        self._root = root_rank
        self._op: Any = None
        self._graph: Any = None

    def begin(self) -> None:
        graph = tf.compat.v1.get_default_graph()
        if self._graph is not graph:
            self._graph, self._op = graph, broadcast_global_variables(self._root)

    def after_create_session(self, session: Any, coord: Any) -> None:  # noqa: ARG002
        session.run(self._op)


def _require_program(what: str) -> None:
    """Not while a function is traced, which ranks may do differently often."""
    if tf.compat.v1.get_default_graph().building_function:
        raise refused(f"{what} is for programs, and does not work inside tf.function")


@as_written
def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,  # noqa: ARG001 - Horovod's; objects travel without one
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the root's object on every rank, eagerly and beside graphs of TensorFlow 1; it is
    pickled."""
    _require_program("broadcast_object")
    return _objects.broadcast_object(obj, root_rank, name, process_set)


@as_written
def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """A function that does what :func:`broadcast_object` does."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


@as_written
def allgather_object(
    obj: Any,
    session: Any = None,  # noqa: ARG001
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Every rank's object, in rank order, eagerly and beside graphs of TensorFlow 1; they are
    pickled."""
    _require_program("allgather_object")
    return _objects.allgather_object(obj, name, process_set)
