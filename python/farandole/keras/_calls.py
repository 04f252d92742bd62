"""The arguments of Keras' methods, as a program gives them: a signature stands once. Numbers that
Keras takes as they are, and stumbles over later, are checked."""

from __future__ import annotations

import numbers
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from farandole._arguments import is_whole, shown
from farandole._core import InvalidArgument


def _check_counts(what: str, least: int, **counts: Any) -> None:
    """Raises InvalidArgument for what is no whole number of at least that."""
    for name, value in counts.items():
        if not _is_count(value, least):
            raise InvalidArgument(
                f"{what}: {name} is {shown(value)}; it is a whole number of at least {least}"
            )


def _is_count(value: Any, least: int) -> bool:
    return is_whole(value) and not isinstance(value, bool) and value >= least


def check_steps(what: str, **steps: Any) -> None:
    """The same, of what may be None."""
    _check_counts(what, 1, **{name: value for name, value in steps.items() if value is not None})


def is_due(epoch: int, every: Any) -> bool:
    """Whether to validate after this epoch, from 0."""
    return (epoch + 1) % every == 0 if isinstance(every, int) else epoch + 1 in every


def check_class_weight(what: str, class_weight: Any) -> None:
    if class_weight is None:
        return
    if not isinstance(class_weight, Mapping) or not all(
        is_whole(name) and isinstance(weight, numbers.Real) for name, weight in class_weight.items()
    ):
        raise InvalidArgument(
            f"{what}: class_weight is {shown(class_weight)}; it is a dictionary of weights by class"
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
        _check_counts("fit()", 0, epochs=self.epochs, initial_epoch=self.initial_epoch)
        names = "steps_per_epoch", "validation_steps", "validation_batch_size"
        check_steps("fit()", **{name: getattr(self, name) for name in names})
        split = self.validation_split
        is_fraction = isinstance(split, numbers.Real) and 0 <= float(split) < 1
        if split is not None and not is_fraction:
            raise InvalidArgument(
                f"fit(): validation_split is {shown(split)}; it is a number from 0 to 1"
            )
        every = self.validation_freq
        listed = isinstance(every, Collection) and not isinstance(every, str)
        if not _is_count(every, 1) and not (listed and all(_is_count(each, 0) for each in every)):
            raise InvalidArgument(
                f"fit(): validation_freq is {shown(every)}; it is a whole number of at least 1, or "
                "a list of epochs"
            )
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
