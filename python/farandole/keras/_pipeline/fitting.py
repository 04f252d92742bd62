"""Epochs, batches and callbacks, as Keras' own fit has them."""

from __future__ import annotations

import warnings
from typing import Any

import keras

from farandole import _world
from farandole._core import InvalidArgument
from farandole.data._share import FEW
from farandole.keras._global.callbacks import listed, listening
from farandole.keras._global.how import How, Source
from farandole.keras._global.sources import are_arrays, held_out, source_of, unpacked


def sources_of(
    data: Any, how: How, fraction: float, validation: Any, held: tuple[int | None, int | None]
) -> list[Source]:
    """The data that fit() reads: those for training, and those for validation, if there are any.

    Args:
        data: inputs, targets, weights.
        fraction: of the data, held out for validation.
        held: of the validation data, the batch size and the number of batches.

    Raises:
        InvalidArgument: something cannot be read.
    """
    if fraction and validation is None:
        data, validation = held_out(data, fraction)
    found = [source_of(data, how)]
    if validation is not None:
        size = held[0] or (how.batch_size if are_arrays(validation) else None)
        there = How("fit(validation_data)", how.seed, size, held[1], block=how.block)
        found.append(source_of(unpacked(validation), there))
    return found


# They would save this rank's stage alone.
_SAVE = ("BackupAndRestore", "ModelCheckpoint", "OrbaxCheckpoint")


def callbacks_of(given: Any, module: Any, *, epochs: int, steps: int | None, verbose: Any) -> Any:
    """A CallbackList. Raises InvalidArgument."""
    asked = listed(given)
    refused = tuple(getattr(keras.callbacks, n) for n in _SAVE if hasattr(keras.callbacks, n))
    for each in asked:
        if isinstance(each, refused):
            raise InvalidArgument(
                f"{type(each).__name__} would save this rank's stage alone\n  advice: a "
                "LambdaCallback whose on_epoch_end, on every rank, calls get_weights() of the "
                "Pipeline, and saves what rank 0 gets"
            )
    mine = verbose if _world.rank() == 0 else 0
    return listening(asked, module, epochs=epochs, steps=steps, verbose=mine)


def warn_of_few_samples(module: Any, samples: int | None) -> None:
    """Warns of layers that normalize by the statistics of each micro-batch.

    Args:
        samples: of a micro-batch; None where that is not known.
    """
    kind = keras.layers.BatchNormalization
    names = [each.name for each in module._flatten_layers() if isinstance(each, kind)]
    if names and samples is not None and samples < FEW:
        warnings.warn(
            f"layer '{names[0]}' normalizes by the statistics of each micro-batch, which has "
            f"{samples} samples: the result is not that of the whole batch\n  advice: larger "
            "batches, fewer micro-batches, or a layer like keras.layers.LayerNormalization",
            stacklevel=3,
        )
