"""Variables whose values ranks compare, eagerly and in graphs.

A graph has no room for what is done once. So variables are compared while it is traced, and where
they are equal then, as they mostly are, nothing is added to the graph. Where they are not, or there
are no values yet, or FARANDOLE_CHECK_WEIGHTS=k asks for more, a step of the graph calls us.

Graphs of TensorFlow 1 have no values outside of a session; theirs are not compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from farandole import _core
from farandole._core import Mismatch
from farandole.common._process_set import ProcessSet, global_process_set
from farandole.common._weights import PatientWeights, patient_weights
from farandole.tensorflow._graph import check_place

BROADCAST = "hvd.broadcast_variables(model.variables, root_rank=0)"


class Different(Mismatch, tf.errors.FailedPreconditionError):  # type: ignore[misc]
    """What an op says of a Mismatch, where there is no op: farandole's class and TensorFlow's."""

    def __init__(self, error: Mismatch) -> None:
        tf.errors.FailedPreconditionError.__init__(self, None, None, str(error))
        self.__dict__.update(vars(error))


def compared(
    label: str,
    process_set: ProcessSet | None,
    variables: Sequence[Any],
    names: Sequence[str],
    line: str = BROADCAST,
) -> Any:
    """As a step begins: a context for what reduces its gradients, which waits for the comparison.

    Args:
        variables: the sources; those that are no variables are not compared.

    Raises:
        Different: eagerly, where they differ; in a graph its text is that of the error of an op.
    """
    check_place()
    ranks = process_set or global_process_set
    rows = [(n, raw(v)) for n, v in zip(names, variables, strict=True) if hasattr(v, "assign")]
    nothing = tf.control_dependencies([])
    if not rows or not ranks.included():
        return nothing
    held = [variable for _, variable in rows]
    weights = patient_weights(label, [n for n, _ in rows], line, ranks, held)
    if not weights.waits or _for_a_session():
        return nothing
    if tf.executing_eagerly():
        try:
            weights.begin_step(lambda: _checksums([tf.convert_to_tensor(v) for v in held]))
        except Mismatch as error:
            raise Different(error) from None
        return nothing
    _look(weights, held)
    return tf.control_dependencies([_in_graph(weights, held)] if weights.waits else [])


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


def _in_graph(weights: PatientWeights, variables: Sequence[Any]) -> Any:
    def begin(*values: Any) -> None:
        if weights.waits:
            weights.begin_step(lambda: _checksums(values))

    return tf.py_function(begin, [tf.convert_to_tensor(v) for v in variables], [])
