"""DistributedOptimizer: an optimizer whose gradients are the mean over all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from farandole._arguments import type_of
from farandole.common._groups import groups_of
from farandole.common._process_set import ProcessSet, global_process_set
from farandole.common._reduction import Adasum, Average
from farandole.common._wrapped import one_child_of
from farandole.tensorflow import _v1
from farandole.tensorflow._graph import as_written, refused
from farandole.tensorflow._reduction import Local, Reduction
from farandole.tensorflow.compression import Compression, Compressor

__all__ = ["DistributedOptimizer"]


@as_written
def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,  # noqa: ARG001 - Horovod's signature
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Makes the optimizer step with gradients averaged over all ranks.

    An optimizer of Keras 3 becomes ``farandole.keras.DistributedOptimizer(…)`` of the same
    arguments. One of ``tf.compat.v1.train`` reduces in ``compute_gradients()``; it stays the same
    object, of a child class with its class' name. With ``op=Adasum`` it steps by itself, and in
    ``apply_gradients()`` variables then move by the Adasum of all ranks' moves. For your own loop,
    see :func:`farandole.tensorflow.DistributedGradientTape`.

    Args:
        optimizer: of Keras 3, or of ``tf.compat.v1.train``.
        name: accepted as Horovod does.
        use_locking: accepted as Horovod does.
        device_dense: accepted as Horovod does.
        device_sparse: accepted as Horovod does.
        compression: see ``DistributedGradientTape``, as for all without a line of their own.
        backward_passes_per_step: gradients of so many passes are added up, and the last of them
            reduces and applies; in the others ``apply_gradients()`` does nothing.
        average_aggregated_gradients: takes the mean of the passes instead of their sum.
        scale_local_gradients: divide gradients of local variables (``register_local_var()``) by
            the number of ranks.

    Raises:
        tf.errors.InvalidArgumentError: an argument is wrong; the optimizer is as before.
    """
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        if not hasattr(optimizer, "apply_gradients"):
            raise refused(f"optimizer is {type_of(optimizer)}, not an optimizer")
        from farandole.keras import DistributedOptimizer as OfKeras  # which takes a second

        return OfKeras(
            optimizer,
            name=name,
            device_dense=device_dense,
            device_sparse=device_sparse,
            compression=compression,
            sparse_as_dense=sparse_as_dense,
            gradient_predivide_factor=gradient_predivide_factor,
            op=op,
            backward_passes_per_step=backward_passes_per_step,
            average_aggregated_gradients=average_aggregated_gradients,
            num_groups=num_groups,
            groups=groups,
            process_set=process_set,
            scale_local_gradients=scale_local_gradients,
        )
    groups = groups_of(groups, num_groups)
    reduction = Reduction(
        op, gradient_predivide_factor, compression, sparse_as_dense, process_set, groups
    )
    _distribute(optimizer, reduction, backward_passes_per_step, average_aggregated_gradients)
    optimizer._local = Local(scale_local_gradients)
    return optimizer


def _distribute(optimizer: Any, reduction: Reduction, passes: int, average: bool) -> None:
    """In place, one of TensorFlow 1."""
    if isinstance(optimizer, (_v1.Distributed, _v1.DeltaAdasum)):
        raise refused("the optimizer is a DistributedOptimizer already")
    if passes < 1:
        raise refused(f"backward_passes_per_step is {passes}")
    if reduction.horovods_op == Adasum and passes > 1:
        raise refused("op=Adasum moves the variables in every pass: backward_passes_per_step is 1")
    kind = _v1.Accumulating if passes > 1 else _v1.Distributed
    optimizer.__class__ = one_child_of(
        type(optimizer), _v1.DeltaAdasum if reduction.horovods_op == Adasum else kind
    )
    optimizer._reduction = reduction
    if passes > 1:
        optimizer._passes, optimizer._average = passes, average
