"""Numbers that Keras takes as they are, and stumbles over later."""

from __future__ import annotations

import numbers
from collections.abc import Collection, Mapping
from typing import Any

from farandole._arguments import is_whole, shown
from farandole._core import InvalidArgument


def check_counts(what: str, least: int, **counts: Any) -> None:
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
    check_counts(what, 1, **{name: value for name, value in steps.items() if value is not None})


def check_fit(
    *,
    epochs: Any,
    initial_epoch: Any,
    validation_split: Any,
    validation_freq: Any,
    class_weight: Any,
    **steps: Any,
) -> None:
    """Arguments of fit(). Raises InvalidArgument."""
    check_counts("fit()", 0, epochs=epochs, initial_epoch=initial_epoch)
    check_steps("fit()", **steps)
    fraction = isinstance(validation_split, numbers.Real) and 0 <= float(validation_split) < 1
    if validation_split is not None and not fraction:
        raise InvalidArgument(
            f"fit(): validation_split is {shown(validation_split)}; it is a number from 0 to 1"
        )
    listed = isinstance(validation_freq, Collection) and not isinstance(validation_freq, str)
    if not _is_count(validation_freq, 1) and not (
        listed and all(_is_count(each, 0) for each in validation_freq)
    ):
        raise InvalidArgument(
            f"fit(): validation_freq is {shown(validation_freq)}; it is a whole number of at least "
            "1, or a list of epochs"
        )
    check_class_weight("fit()", class_weight)


def check_class_weight(what: str, class_weight: Any) -> None:
    if class_weight is None:
        return
    if not isinstance(class_weight, Mapping) or not all(
        is_whole(name) and isinstance(weight, numbers.Real) for name, weight in class_weight.items()
    ):
        raise InvalidArgument(
            f"{what}: class_weight is {shown(class_weight)}; it is a dictionary of weights by class"
        )
