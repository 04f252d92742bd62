"""Variables whose values ranks compare, eagerly and in graphs.

First of all ranks compare their models, a line a variable, when a step runs; what waits for others
before that would wait for ever where models differ. So values are compared after it: eagerly at
once, in a graph by a call of ours behind the step's barrier. It does nothing once variables are
known to be equal, and a function that is traced later goes without: a graph that calls Python
cannot be saved, and its steps wait for the call. Where a program asks for every so many steps the
call stays. Keras compares models while it traces; there values are compared at the same time, and a
graph whose variables are equal has nothing of it.

Graphs of TensorFlow 1 have no values outside of a session; theirs are not compared.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from farandole import _core
from farandole._core import Mismatch
from farandole.common._process_set import ProcessSet, global_process_set
from farandole.common._weights import PatientWeights, patient_weights, period
from farandole.tensorflow._graph import check_place, goes_on

BROADCAST = "hvd.broadcast_variables(model.variables, root_rank=0)"


class Different(Mismatch, tf.errors.FailedPreconditionError):  # type: ignore[misc]
    """What an op says of a Mismatch, where there is no op: farandole's class and TensorFlow's."""

    def __init__(self, error: Mismatch) -> None:
        tf.errors.FailedPreconditionError.__init__(self, None, None, str(error))
        self.__dict__.update(vars(error))


@contextmanager
def compared(
    label: str,
    process_set: ProcessSet | None,
    variables: Sequence[Any],
    names: Sequence[str],
    line: str = BROADCAST,
    *,
    while_traced: bool = False,
) -> Iterator[None]:
    """Around what reduces a step's gradients. In a graph that waits for the comparison. Eagerly the
    comparison comes after it, which has found then that the ranks' models are alike.

    Args:
        while_traced: models are known to be alike while a graph is made.
        variables: the sources; those that are no variables are not compared.

    Raises:
        Different: eagerly, where they differ; in a graph its text is that of the error of an op.
    """
    check_place()
    ranks = process_set or global_process_set
    rows = [(n, raw(v)) for n, v in zip(names, variables, strict=True) if hasattr(v, "assign")]
    if not rows or not ranks.included() or _for_a_session():
        yield
        return
    held = [variable for _, variable in rows]
    known = [n for n, _ in rows]
    weights = patient_weights(label, known, line, ranks, held)
    if not tf.executing_eagerly():
        if weights.waits and while_traced and not goes_on():
            _look(weights, held)
        waits = period() is not None if goes_on() else weights.waits_in_graphs
        called = [_in_graph(label, known, line, ranks, held)] if waits else []
        with tf.control_dependencies(called):
            yield
        return
    yield
    if weights.waits:
        try:
            weights.begin_step(lambda: _checksums([tf.convert_to_tensor(v) for v in held]))
        except Mismatch as error:
            raise Different(error) from None


def _for_a_session() -> bool:
    """In a graph of TensorFlow 1, or a branch in one."""
    with tf.init_scope():
        return not tf.executing_eagerly()


def raw(variable: Any) -> Any:
    """What a variable of Keras holds its value in; others are that themselves."""
    return getattr(variable, "_value", variable)


def _checksums(tensors: Sequence[Any]) -> list[int]:
    """Of tensors with values."""
    return _core.checksums(
        [np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8) for tensor in tensors]
    )


def _look(weights: PatientWeights, variables: Sequence[Any]) -> None:
    with tf.init_scope():
        try:
            checksums = _checksums([tf.convert_to_tensor(v) for v in variables])
        except tf.errors.FailedPreconditionError:  # made by this very function
            return
    weights.look(lambda: checksums)


def _in_graph(
    label: str, names: Sequence[str], line: str, ranks: ProcessSet, variables: Sequence[Any]
) -> Any:
    """The comparison of the world that the graph then runs in."""
    refs = [weakref.ref(variable) for variable in variables]

    def begin(*values: Any) -> None:
        held = [ref() for ref in refs]
        if any(variable is None for variable in held):
            return  # the graph alone has them, and nobody's broadcast
        weights = patient_weights(label, names, line, ranks, held)
        if weights.waits:
            weights.begin_step(lambda: _checksums(values))

    return tf.py_function(begin, [tf.convert_to_tensor(v) for v in variables], [])
