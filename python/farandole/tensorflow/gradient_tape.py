"""DistributedGradientTape: a tape whose gradients are the mean over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from farandole._arguments import type_of
from farandole.common._groups import groups_of, weights_of
from farandole.common._process_set import ProcessSet, global_process_set
from farandole.common._reduction import Average
from farandole.common._wrapped import one_child_of
from farandole.tensorflow._graph import as_written, refused
from farandole.tensorflow._reduction import Local, Reduction, names_of
from farandole.tensorflow.compression import Compression, Compressor

__all__ = ["DistributedGradientTape", "PartialDistributedGradientTape"]


class _Distributed:
    """The mixin that stands before the tape's own class."""

    _reduction: Reduction
    _local: Local

    @as_written
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
        use_generic_names: bool = False,
    ) -> Any:
        """The tape's gradient, reduced over the ranks. Gradients of local sources stay this rank's
        own, divided by the number of ranks unless ``scale_local_gradients=False``.

        ``use_generic_names``: sources are compared by place, not by name.
        """
        own = super().gradient(  # type: ignore[misc]
            target, sources, output_gradients, unconnected_gradients
        )
        flat = tf.nest.flatten(sources)
        names = [f"source {i}" for i in range(len(flat))] if use_generic_names else names_of(flat)
        gradients = self._local.reduce_others(
            self._reduction, list(tf.nest.flatten(own)), flat, names
        )
        return tf.nest.pack_sequence_as(own, gradients)

    @as_written
    def register_local_source(self, source: Any) -> None:
        """The gradients of this variable stay this rank's own."""
        self._local.add(source)

    @as_written
    def get_local_and_global_gradients(
        self, target: Any, sources: Any, **how: Any
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """(source, gradient) of local sources, and of those that are reduced."""
        flat = tf.nest.flatten(sources)
        gradients = self.gradient(target, flat, **how)
        rows = list(zip(flat, gradients, strict=True))
        return (
            [row for row in rows if row[0] in self._local],
            [row for row in rows if row[0] not in self._local],
        )


@as_written
def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",  # noqa: ARG001 - Horovod's signature
    device_sparse: str = "",  # noqa: ARG001
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> tf.GradientTape:
    """Makes the tape's ``gradient()`` return what is averaged over all ranks.

    In a ``tf.function`` gradients are reduced while others are still computed. The tape stays the
    same object, of a child class with its class' name.

    Args:
        gradtape: a ``tf.GradientTape``, persistent or not, before or after it has recorded.
        compression: what is sent: ``Compression.none``, ``.fp16``, ``.bf16``, or your own class.
        sparse_as_dense: reduce ``tf.IndexedSlices`` as dense gradients; else they are gathered.
        op: ``Average``, ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum`` (of dense gradients).
        gradient_predivide_factor: divides gradients before they are summed, and multiplies the
            sum, so that halves do not overflow; with ``Average`` only.
        num_groups: the older name of a number of ``groups``.
        groups: gradients that are one operation: a number of groups, or lists of variables.
        process_set: the ranks that take part.
        scale_local_gradients: divide gradients of local sources by the number of ranks.

    Raises:
        tf.errors.InvalidArgumentError: an argument is wrong; the tape is as before.
        tf.errors.FailedPreconditionError: from ``gradient()`` (in a graph, when that runs): the
            ranks' variables or gradients differ; names the first that does.

    Examples:
        >>> import tensorflow as tf, farandole.tensorflow as hvd
        >>> hvd.init()
        >>> x = tf.Variable(3.0)
        >>> with tf.GradientTape() as tape:
        ...     y = x * x
        >>> hvd.DistributedGradientTape(tape).gradient(y, [x])[0].numpy().item()
        6.0
    """
    groups = groups_of(groups, num_groups)
    reduction = Reduction(
        op, gradient_predivide_factor, compression, sparse_as_dense, process_set, groups
    )
    if not isinstance(gradtape, tf.GradientTape):
        raise refused(f"gradtape is {type_of(gradtape)}, not a tf.GradientTape")
    if isinstance(gradtape, _Distributed):
        raise refused("the tape is a DistributedGradientTape already")
    gradtape.__class__ = one_child_of(type(gradtape), _Distributed)
    tape: Any = gradtape
    tape._reduction, tape._local = reduction, Local(scale_local_gradients)
    return gradtape


@as_written
def PartialDistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",  # noqa: ARG001 - Horovod's signature
    device_sparse: str = "",  # noqa: ARG001
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Sequence[Any] | Any | None = None,
    scale_local_gradients: bool = True,
) -> tf.GradientTape:
    """:func:`DistributedGradientTape`, where the gradients of some layers stay this rank's own.

    Args:
        local_layers: Keras layers, built already.
    """
    weights = weights_of(local_layers)
    tape: Any = DistributedGradientTape(
        gradtape, "", "", compression, sparse_as_dense, op, gradient_predivide_factor, num_groups,
        groups, process_set, scale_local_gradients,
    )  # fmt: skip
    for weight in weights:
        tape.register_local_source(weight)
    return gradtape
