"""The arguments of Keras' methods, as a program gives them: a signature stands once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from farandole.keras._global.checks import check_fit


class Fit(NamedTuple):
    x: Any = None
    y: Any = None
    batch_size: int | None = None
    epochs: int = 1
    verbose: Any = "auto"
    callbacks: Any = None
    validation_split: float = 0.0
    validation_data: Any = None
    shuffle: Any = True
    class_weight: Mapping[int, float] | None = None
    sample_weight: Any = None
    initial_epoch: int = 0
    steps_per_epoch: int | None = None
    validation_steps: int | None = None
    validation_batch_size: int | None = None
    validation_freq: Any = 1

    def check(self) -> None:
        """Raises InvalidArgument for numbers that Keras stumbles over later."""
        check_fit(
            epochs=self.epochs, initial_epoch=self.initial_epoch,
            validation_split=self.validation_split, validation_freq=self.validation_freq,
            class_weight=self.class_weight, steps_per_epoch=self.steps_per_epoch,
            validation_steps=self.validation_steps,
            validation_batch_size=self.validation_batch_size,
        )  # fmt: skip


class TrainOnBatch(NamedTuple):
    x: Any
    y: Any = None
    sample_weight: Any = None
    class_weight: Mapping[int, float] | None = None
    return_dict: bool = False


class Evaluate(NamedTuple):
    x: Any = None
    y: Any = None
    batch_size: int | None = None
    verbose: Any = "auto"
    sample_weight: Any = None
    steps: int | None = None
    callbacks: Any = None
    return_dict: bool = False
