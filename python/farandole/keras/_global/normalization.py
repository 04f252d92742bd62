"""Layers that look at other samples of a batch: each rank has its own."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np

from farandole import _core, _world
from farandole._core import InvalidArgument
from farandole.common._objects import allgather_object
from farandole.data._logical import Block
from farandole.data._share import FEW
from farandole.keras import _host


def refuse_synchronized(model: Any) -> None:
    for layer in _layers(model):
        if getattr(layer, "synchronized", False):
            raise InvalidArgument(
                f"layer '{layer.name}' has synchronized=True, by which Keras looks for the ranks "
                "of tf.distribute or torch.distributed, and finds none\n"
                "  advice: synchronized=False, which takes each rank's own statistics"
            )


def warn_of_few_samples(model: Any, batch: int | None, block: Block | None = None) -> None:
    """On rank 0. `batch`: samples of all ranks together, where that is known."""
    parts = _world.size() if block is None else block.parts
    few = (batch or 0) / parts
    layers = [layer for layer in _layers(model) if not getattr(layer, "synchronized", False)]
    if parts == 1 or _world.rank() != 0 or not layers or not 0 < few < FEW:
        return
    warnings.warn(
        f"layer '{layers[0].name}' normalizes by the statistics of each rank's own samples, which "
        f"are {few:g} of a batch of {batch}: the result is not that of one process. A larger batch "
        f"helps (at least {FEW * parts} here), or a layer that does not look at other "
        "samples, as keras.layers.LayerNormalization",
        stacklevel=3,
    )


def _layers(model: Any) -> list[Any]:
    kind = keras.layers.BatchNormalization
    return [layer for layer in model._flatten_layers() if isinstance(layer, kind)]


def average_statistics(model: Any) -> None:
    """Collective: what layers have gathered of their own rank's samples (the moving averages of
    BatchNormalization) becomes the mean over ranks, where it differs."""
    if _world.size() == 1:
        return
    floating = keras.backend.is_float_dtype
    found = {id(v): v for v in model.non_trainable_weights if floating(v.dtype)}
    variables = list(found.values())
    if not variables:
        return
    values = [np.array(keras.ops.convert_to_numpy(v), order="C") for v in variables]
    sums = np.array(allgather_object(_core.checksums(values), "moving averages"), np.uint64)
    for i in np.flatnonzero((sums != sums[0]).any(axis=0)).tolist():
        mean = _host.all_reduce(values[i].astype(np.float64), "mean", f"moving average {i}")
        variables[i].assign(mean.astype(values[i].dtype))
