"""DistributedOptimizer: a Keras optimizer whose gradients are the mean over all ranks."""

from __future__ import annotations

from collections import Counter
from typing import Any, TypeVar

import keras

from farandole import _world
from farandole._arguments import checked, type_of
from farandole._core import InvalidArgument
from farandole.common._groups import groups_of, weights_of
from farandole.common._process_set import ProcessSet, global_process_set
from farandole.common._reduction import Average, check_passes
from farandole.keras._accumulated import inner_of
from farandole.keras._copies import make_distributed
from farandole.keras._exchange import OF_STEP, Exchange, backend
from farandole.keras._reduction import Reduction
from farandole.keras._wrapped import State, distributed_in
from farandole.keras.compression import Compression, Compressor

_Optimizer = TypeVar("_Optimizer")

_wrapped: Counter[str] = Counter()  # how many of a name there have been


@checked
def DistributedOptimizer(
    optimizer: _Optimizer,
    name: str | None = None,
    device_dense: str | None = "",
    device_sparse: str | None = "",
    compression: Compressor | type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> _Optimizer:
    """Makes a Keras optimizer step with gradients averaged over all ranks.

    The optimizer stays the same object, of a child class with its class' name: its variables,
    learning-rate schedule, ``isinstance`` and what is saved stay as they are. Gradients are reduced
    before they are clipped, and before a ``LossScaleOptimizer`` looks for infinities. Works in
    ``fit``, ``train_on_batch`` and custom training steps, on each backend of Keras.

    Args:
        optimizer: a Keras 3 optimizer, or a ``LossScaleOptimizer`` around one.
        name: in errors and traces; the same on all ranks. Default: "Distributed" and the class'
            name.
        device_dense: Horovod's; tensors are reduced where they lie.
        device_sparse: likewise.
        compression: what is sent: ``Compression.none``, ``.fp16``, ``.bf16``, or your own class or
            object.
        sparse_as_dense: reduce sparse gradients (of embeddings, TensorFlow) as dense ones.
        gradient_predivide_factor: divides gradients before they are summed, and multiplies the
            sum, so that halves do not overflow; with ``Average`` only.
        op: ``Average`` or ``Sum``.
        backward_passes_per_step: the optimizer accumulates gradients over that many passes
            (``gradient_accumulation_steps`` of Keras), reduces, and updates once.
        average_aggregated_gradients: divide what was accumulated by the number of passes.
        num_groups: the older name of a number of ``groups``.
        groups: gradients that are reduced together: a number of groups, or lists of variables.
        process_set: the ranks that take part; elsewhere the optimizer steps by itself.
        scale_local_gradients: gradients of variables given to ``register_local_var()``, which are
            not reduced, are divided by the number of ranks.

    Raises:
        InvalidArgument: an argument is wrong; the optimizer is as before.
        NotInitialized: before ``init()``.
        Mismatch: in the first step: the ranks' variables, options or gradients differ; says which
            variable.

    Examples:
        >>> import farandole.keras as hvd, keras
        >>> hvd.init()
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    """
    del device_dense, device_sparse
    _check_optimizer(optimizer)
    check_passes(backward_passes_per_step)
    exchange = backend()
    reduction = Reduction(
        op,
        gradient_predivide_factor,
        compression,
        sparse_as_dense,
        process_set,
        groups_of(groups, num_groups),
        1.0 if average_aggregated_gradients else float(backward_passes_per_step),
        scale_local_gradients,
    )
    exchange.prepare()
    _accumulate(optimizer, backward_passes_per_step)
    label = name or f"Distributed{type(optimizer).__name__}"
    make_distributed(optimizer, _state(label, reduction, exchange))
    return optimizer


def _state(label: str, reduction: Reduction, exchange: type[Exchange]) -> State:
    _wrapped[label] += 1
    return State(label, _wrapped[label], reduction, exchange)


def state_of_step(op: int, **options: Any) -> State:
    """Returns the state of no optimizer, but of a training step that reduces gradients itself.

    Args:
        options: some of ``DistributedOptimizer``'s.
    """
    groups = options.pop("num_groups", 0)
    return _state(OF_STEP, Reduction(op, groups=groups, **options), backend().of_steps())


@checked
def PartialDistributedOptimizer(
    optimizer: _Optimizer,
    name: str | None = None,
    device_dense: str | None = "",
    device_sparse: str | None = "",
    compression: Compressor | type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> _Optimizer:
    """A ``DistributedOptimizer`` that leaves the gradients of some layers to each rank.

    Args:
        local_layers: a built layer, or several. More variables may follow by
            ``optimizer.register_local_var(variable)``, until the first step.

    The other arguments, errors: as ``DistributedOptimizer``.
    """
    weights = weights_of(local_layers)
    wrapped = DistributedOptimizer(
        optimizer, name, device_dense, device_sparse, compression, sparse_as_dense,
        gradient_predivide_factor, op, backward_passes_per_step, average_aggregated_gradients, 0,
        groups, process_set, scale_local_gradients,
    )  # fmt: skip
    for variable in weights:
        wrapped.register_local_var(variable)  # type: ignore[attr-defined]
    return wrapped


def _check_optimizer(optimizer: Any) -> None:
    if distributed_in(optimizer) is not None:
        raise InvalidArgument("the optimizer is a DistributedOptimizer already")
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise InvalidArgument(
            f"optimizer is {type_of(optimizer)}, not a Keras 3 optimizer; pass one, as in "
            "DistributedOptimizer(keras.optimizers.SGD(0.1))"
        )
    _world.size()  # raises before init(), as Horovod does
    for name in ("_var_key", "_clip_gradients", "_backend_apply_gradients"):
        if not hasattr(optimizer, name):
            raise InvalidArgument(
                f"Keras {keras.__version__} has no Optimizer.{name}; farandole knows Keras 3.15"
            )


def _accumulate(optimizer: Any, passes: int) -> None:
    """Keras accumulates; its accumulators are made when the optimizer is built."""
    base = inner_of(optimizer)
    steps = base.gradient_accumulation_steps
    if passes == 1 or steps == passes:
        return
    if steps is not None:
        raise InvalidArgument(
            f"backward_passes_per_step is {passes}, and the optimizer has "
            f"gradient_accumulation_steps={steps}; give one of them"
        )
    if base.built:
        raise InvalidArgument(
            f"backward_passes_per_step={passes} on an optimizer that is built already has no "
            "accumulators; wrap it before the first step"
        )
    base.gradient_accumulation_steps = passes
