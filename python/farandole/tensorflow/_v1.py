"""Optimizers of ``tf.compat.v1.train``: the classes that are put before theirs.

``compute_gradients()`` returns what is reduced over the ranks, so that clipping between it and
``apply_gradients()`` sees that. With passes to be added up, what it returns counts in the last pass
only, and the others' ``apply_gradients()`` does nothing. With Adasum it is not gradients but what
the optimizer makes of them that is reduced, so there ``apply_gradients()`` does all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from farandole.tensorflow._finite import scales_losses
from farandole.tensorflow._graph import as_written, refused
from farandole.tensorflow._reduction import Local, Reduction, names_of


class Distributed:
    """Reduces in every pass."""

    _reduction: Reduction
    _local: Local

    @as_written
    def compute_gradients(self, *arguments: Any, **others: Any) -> list[tuple[Any, Any]]:
        """The optimizer's own gradients, reduced over the ranks."""
        rows = super().compute_gradients(*arguments, **others)  # type: ignore[misc]
        variables = [variable for _, variable in rows]
        return list(zip(self._reduced([g for g, _ in rows], variables), variables, strict=True))

    def _reduced(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        names = names_of(variables)
        return self._local.reduce_others(self._reduction, gradients, variables, names)

    @as_written
    def register_local_var(self, var: Any) -> None:
        """The gradients of this variable stay this rank's own."""
        self._local.add(var)


class Accumulating(Distributed):
    """Adds up the gradients of some passes, and reduces and applies them in the last one."""

    _passes: int
    _average: bool
    _sums: list[tf.Variable | None] | None = None  # None for a variable without a gradient
    _count: tf.Variable

    def _reduced(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        gradients = [self._dense(*row) for row in zip(gradients, names_of(variables), strict=True)]
        sums = self._sums_for(gradients, variables)
        count = self._count.assign_add(1, read_value=True)
        added = [
            None if to is None else to.assign_add(gradient, read_value=True)
            for to, gradient in zip(sums, gradients, strict=True)
        ]
        due = tf.equal(count % self._passes, 0)
        some = tf.cond(due, lambda: self._emptied(added, sums, variables), lambda: _there(added))
        rest = iter(some)
        return [None if to is None else next(rest) for to in sums]

    @as_written
    def apply_gradients(self, grads_and_vars: Any, *arguments: Any, **others: Any) -> Any:
        """The optimizer's own, in the last of the passes; before it, nothing."""
        rows = list(grads_and_vars)
        if self._sums is None:
            raise refused("apply_gradients() comes after compute_gradients()")

        def apply() -> tf.Tensor:
            done = super(Accumulating, self).apply_gradients(rows, *arguments, **others)  # type: ignore[misc]
            with tf.control_dependencies([] if done is None else [done]):
                return tf.constant(True)

        with tf.control_dependencies([g for g, _ in rows if g is not None]):
            due = tf.equal(self._count.read_value() % self._passes, 0)
        return tf.cond(due, apply, lambda: tf.constant(False))

    def _dense(self, gradient: Any, name: str) -> Any:
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient
        if self._reduction.sparse_as_dense:
            return tf.convert_to_tensor(gradient)
        raise refused(
            f"'{name}' has tf.IndexedSlices; backward_passes_per_step={self._passes} adds up dense "
            "gradients: sparse_as_dense=True makes them"
        )

    def _sums_for(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The sums, made at the first call, outside of any function. Later calls must be alike."""
        if self._sums is None:
            with tf.init_scope():
                self._count = tf.Variable(0, trainable=False, dtype=tf.int64, name="passes")
                self._sums = [
                    None
                    if gradient is None
                    else tf.Variable(tf.zeros(v.shape, gradient.dtype), trainable=False)
                    for gradient, v in zip(gradients, variables, strict=True)
                ]
        for to, gradient, name in zip(self._sums, gradients, names_of(variables), strict=True):
            if (to is None) != (gradient is None):
                raise refused(
                    f"'{name}' has {'a' if to is None else 'no'} gradient, other than in the first "
                    f"pass; backward_passes_per_step={self._passes} adds up the same ones"
                )
        return self._sums

    def _emptied(self, added: list[Any], sums: list[Any], variables: list[Any]) -> list[tf.Tensor]:
        """The sums, reduced; the next pass begins at zero."""
        factor = 1 / self._passes if self._average else 1.0
        totals = [None if a is None else a * tf.cast(factor, a.dtype) for a in added]
        with tf.control_dependencies([total for total in totals if total is not None]):
            cleared = [to.assign(tf.zeros_like(to)) for to in sums if to is not None]
        with tf.control_dependencies(cleared):
            return _there(super()._reduced(totals, variables))


class DeltaAdasum:
    """Every rank steps by itself; its variables then move by the Adasum of all ranks' moves."""

    _reduction: Reduction

    @as_written
    def apply_gradients(self, grads_and_vars: Any, *arguments: Any, **others: Any) -> Any:
        """The optimizer's own, and then the ranks' moves folded into one."""
        rows = list(grads_and_vars)
        variables = [variable for gradient, variable in rows if gradient is not None]
        before = [tf.raw_ops.DeepCopy(x=variable) for variable in variables]
        with tf.control_dependencies(before):
            done = super().apply_gradients(rows, *arguments, **others)  # type: ignore[misc]
        with tf.control_dependencies([] if done is None else [done]):
            moves = [
                variable.read_value() - was for variable, was in zip(variables, before, strict=True)
            ]
        with tf.control_dependencies(moves):  # none has moved where a rank is lost meanwhile
            back = [v.assign(was) for v, was in zip(variables, before, strict=True)]
        with tf.control_dependencies(back):
            moves = [tf.identity(move) for move in moves]
        names, finite = names_of(variables), not scales_losses()  # gradients that are not move so
        moved = self._reduction.reduce(moves, variables, names, finite=finite)
        ends = [
            variable.assign(was + move)
            for variable, was, move in zip(variables, before, moved, strict=True)
        ]
        return tf.group(*ends)


def _there(values: list[Any]) -> list[tf.Tensor]:
    return [tf.identity(value) for value in values if value is not None]
