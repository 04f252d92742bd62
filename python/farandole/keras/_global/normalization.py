"""Layers that look at other samples of a batch: each rank has its own, or all ranks' together.

There a rank's statistics are its count, mean and variance per channel. All ranks get those of all,
and join them in rank order: a variance is made of distances from means, never of the difference of
two large numbers. They get them as the sum of tables in which each rank has filled its own row,
since the gradient of a sum is the one that all backends agree on.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import keras
import numpy as np

from farandole import _core, _world
from farandole._core import InvalidArgument
from farandole.common._objects import allgather_object
from farandole.data._logical import ranks_own
from farandole.data._share import FEW
from farandole.keras import _host
from farandole.keras._global.saying import say_once
from farandole.keras._global.steps import Steps
from farandole.keras._global.sums import sum_over_ranks

_ADVICE = (
    "Model(sync_batch_norm=True), or on TensorFlow the layer's synchronized=True, takes those of "
    "all ranks"
)
_HOOK = "_moments"  # by which a BatchNormalization gets its statistics


class Normalization:
    """The normalization layers of one model.

    Args:
        every: all layers take the statistics of all ranks' samples; else those that say so, by
            Keras' own ``synchronized=True`` or as a ``SyncBatchNormalization``.
    """

    def __init__(self, model: Any, steps: Steps, *, every: bool) -> None:
        self._model, self._steps, self._every = model, steps, every

    def layers(self) -> list[Any]:
        """BatchNormalization layers, found anew each time: a user's class may make some late."""
        kind = keras.layers.BatchNormalization
        found = {id(layer): layer for layer in self._model._flatten_layers()}
        return [layer for layer in found.values() if isinstance(layer, kind)]

    def joint(self) -> list[Any]:
        """The layers that normalize over all ranks' samples."""
        return [each for each in self.layers() if self._every or _asks(each)]

    def joint_variables(self) -> set[int]:
        """Ids of variables that are equal on all ranks even if a rank has no samples: statistics of
        these layers, and those of SpectralNormalization, which follow from weights."""
        if _world.size() == 1:
            return set()
        layers = [*self.joint(), *spectral_layers(self._model)]
        return {id(v) for layer in layers for v in layer.non_trainable_variables}

    def row(self) -> str:
        """A line that ranks compare."""
        return f"{len(self.joint())} layers that normalize over all ranks' samples"

    def check(self) -> None:
        """Raises InvalidArgument for layers whose statistics cannot be joined."""
        block = self._steps.block
        for layer in self.joint():
            if block is not None:
                why = "sync_batch_norm=True" if self._every else f"layer '{layer.name}'"
                raise InvalidArgument(
                    f"Model(logical_ranks={block.parts}): {why} asks for the statistics of all "
                    "samples of a batch, which are never computed at once\n  advice: "
                    "BatchNormalization as it is, whose statistics are those of each logical "
                    "rank's samples; or no logical_ranks"
                )
            _require_hook(layer)

    @contextmanager
    def joined(self) -> Iterator[None]:
        """A context for a step on this rank's part of a batch, in which statistics are joined."""
        layers = self.joint() if _world.size() > 1 else []
        for i, layer in enumerate(layers):
            # By position: ranks that have made other models before have other names for a layer.
            name = f"statistics of BatchNormalization {i}"
            vars(layer)[_HOOK] = partial(_moments_of_all_ranks, layer, self._steps, name)
        try:
            yield
        finally:
            for layer in layers:
                vars(layer).pop(_HOOK, None)

    def warn_of_few_samples(self, batch: int | None) -> None:
        """Warns on rank 0. `batch`: samples of all ranks together, where that is known."""
        block = self._steps.block
        parts = (block or ranks_own()).parts
        few = (batch or 0) / parts
        if parts == 1 or _world.rank() != 0 or not 0 < few < FEW:
            return
        joint = set(map(id, self.joint()))
        # A frozen layer normalizes by its moving averages.
        own = [each for each in self.layers() if id(each) not in joint and each.trainable]
        if not own:
            return
        whose, advice = (
            ("each rank's", _ADVICE)
            if block is None
            else ("each logical rank's", f"at least {FEW * parts} samples in a batch help")
        )
        warnings.warn(
            f"layer '{own[0].name}' normalizes by the statistics of {whose} own samples, which are "
            f"{few:g} of a batch of {batch}: the result is not that of one process\n"
            f"  advice: {advice}; or a layer that does not look at other samples, as "
            "keras.layers.LayerNormalization",
            stacklevel=3,
        )


def _asks(layer: Any) -> bool:
    return bool(getattr(layer, "synchronized", False) or getattr(layer, "over_all_ranks", False))


def _require_hook(layer: Any) -> None:
    """Raises InvalidArgument for a layer that would not take our statistics, or has its own."""
    kind = keras.layers.BatchNormalization
    own = getattr(type(layer), _HOOK, None)
    if own is not getattr(kind, _HOOK, None) and not hasattr(layer, "over_all_ranks"):
        raise _cannot_join(layer, f"{type(layer).__name__} has statistics of its own, by {_HOOK}()")
    arguments = [] if own is None else list(inspect.signature(own).parameters)
    if arguments != ["self", "inputs", "mask"] or not _calls(kind, _HOOK):
        raise _cannot_join(layer, f"that of Keras {keras.__version__} asks no {_HOOK}() for them")
    if type(layer).call is not kind.call and not _calls(type(layer), _HOOK, "super"):
        raise _cannot_join(layer, f"{type(layer).__name__}.call() asks no {_HOOK}() for them")


def _calls(kind: Any, *names: str) -> bool:
    return bool(set(names) & set(inspect.unwrap(kind.call).__code__.co_names))


def _cannot_join(layer: Any, why: str) -> InvalidArgument:
    return InvalidArgument(
        f"layer '{layer.name}' is to take the statistics of all ranks' samples, and cannot: {why}\n"
        "  advice: keras.layers.BatchNormalization itself; or Model(sync_batch_norm=False) and "
        "synchronized=False, which take each rank's own"
    )


def average_statistics(model: Any) -> None:
    """Collective: averages statistics of each rank's own samples (the moving averages of
    BatchNormalization) over the ranks, where they differ."""
    if _world.size() == 1:
        return
    floating = keras.backend.is_float_dtype
    found = {id(v): v for v in model.non_trainable_weights if floating(v.dtype)}
    variables = list(found.values())
    if not variables:
        return
    values = [np.array(keras.ops.convert_to_numpy(v), order="C") for v in variables]
    sums = np.array(allgather_object(_core.checksums(values), "moving averages"), np.uint64)
    apart = np.flatnonzero((sums != sums[0]).any(axis=0)).tolist()
    _tell_of_own_states(model, {id(variables[i]) for i in apart})
    for i in apart:
        mean = _host.all_reduce(values[i].astype(np.float64), "mean", f"moving average {i}")
        variables[i].assign(mean.astype(values[i].dtype))


def spectral_layers(model: Any) -> list[Any]:
    """Layers that change their kernel, and a state, as they are called, by the kernel alone."""
    kind = keras.layers.SpectralNormalization
    return [each for each in model._flatten_layers() if isinstance(each, kind)]


def own_states(model: Any) -> set[int]:
    """Ids of the variables of layers of the user's own. They may count steps as well as follow
    samples, so they change as in any other step where a rank has no samples of a batch."""
    return {id(v) for layer in _own_layers(model) for v in layer._non_trainable_variables}


def _own_layers(model: Any) -> Iterator[Any]:
    for layer in model._flatten_layers():
        is_keras = type(layer).__module__.startswith("keras.")
        if not is_keras and not isinstance(layer, keras.layers.BatchNormalization):
            yield layer


def _tell_of_own_states(model: Any, apart: set[int]) -> None:
    """Says once of a layer of the user's own that it trains with another state on each rank."""
    for layer in _own_layers(model):
        mine = [v for v in layer._non_trainable_variables if id(v) in apart]
        if mine:
            say_once(
                f"layer '{layer.name}' of class {type(layer).__name__} has a state that follows "
                f"the samples of a batch ('{mine[0].path}'): each rank trained with that of its "
                "own samples, and they have become their mean now; in one process there is one\n"
                "  advice: compute it from sums over all ranks, by allreduce(…, op=Sum) in call()"
            )


# ---- moments of all ranks ----


def _moments_of_all_ranks(
    layer: Any, steps: Steps, name: str, inputs: Any, mask: Any = None
) -> Any:
    """As Keras' ``BatchNormalization._moments``, whose place it takes, with its epsilon in the
    count that a mask leaves. A rank's sample that does not count is in neither."""
    ops = keras.ops
    count, mean, variance = _of_this_rank(inputs, mask, layer._reduction_axes)
    count = ops.where(steps.counts, count, ops.zeros_like(count))
    table = _rows_of_all_ranks(ops.stack([count, mean, variance]), name)
    counts, means, variances = table[:, 0], table[:, 1], table[:, 2]
    total = ops.sum(counts, 0)
    weights = counts / (ops.maximum(total, 1) if mask is None else total + keras.config.epsilon())
    mean = ops.sum(weights * means, 0)
    return mean, ops.sum(weights * (variances + ops.square(means - mean)), 0)


def _of_this_rank(inputs: Any, mask: Any, axes: list[int]) -> tuple[Any, Any, Any]:
    """Count, mean, variance: a number per channel each."""
    ops = keras.ops
    if mask is None:
        mean, variance = ops.moments(inputs, axes)
        shape, count = ops.shape(inputs), 1
        for axis in axes:
            count = count * shape[axis]
        return ops.ones_like(mean) * ops.cast(count, mean.dtype), mean, variance
    there = ops.cast(ops.broadcast_to(ops.expand_dims(mask, -1), ops.shape(inputs)), "bool")
    count = ops.sum(ops.cast(there, inputs.dtype), axes, keepdims=True)
    least = ops.maximum(count, 1)
    mean = ops.sum(ops.where(there, inputs, 0), axes, keepdims=True) / least
    distance = ops.where(there, inputs - mean, 0)
    variance = ops.sum(ops.square(distance), axes, keepdims=True) / least
    return ops.reshape(count, (-1,)), ops.reshape(mean, (-1,)), ops.reshape(variance, (-1,))


def _rows_of_all_ranks(mine: Any, name: str) -> Any:
    others = keras.ops.zeros_like(mine)
    rows = [mine if rank == _world.rank() else others for rank in range(_world.size())]
    return sum_over_ranks(keras.ops.stack(rows), name)
