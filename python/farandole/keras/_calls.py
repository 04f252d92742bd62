"""The arguments of Keras' methods, as a program gives them: a signature stands once."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any, NamedTuple

from farandole._arguments import shown
from farandole._core import InvalidArgument
from farandole.keras._global.checks import (
    check_class_weight,
    check_counts,
    check_epochs_of_validation,
    check_steps,
)


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
        check_counts("fit()", 0, epochs=self.epochs, initial_epoch=self.initial_epoch)
        names = "steps_per_epoch", "validation_steps", "validation_batch_size"
        check_steps("fit()", **{name: getattr(self, name) for name in names})
        split = self.validation_split
        is_fraction = isinstance(split, numbers.Real) and 0 <= float(split) < 1
        if split is not None and not is_fraction:
            raise InvalidArgument(
                f"fit(): validation_split is {shown(split)}; it is a number from 0 to 1"
            )
        check_epochs_of_validation(self.validation_freq)
        check_class_weight("fit()", self.class_weight)


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
