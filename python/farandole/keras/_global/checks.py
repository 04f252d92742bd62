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
        if not is_count(value, least):
            raise InvalidArgument(
                f"{what}: {name} is {shown(value)}; it is a whole number of at least {least}"
            )


def is_count(value: Any, least: int) -> bool:
    return is_whole(value) and not isinstance(value, bool) and value >= least


def check_steps(what: str, **steps: Any) -> None:
    """The same, of what may be None."""
    check_counts(what, 1, **{name: value for name, value in steps.items() if value is not None})


def check_epochs_of_validation(every: Any) -> None:
    listed = isinstance(every, Collection) and not isinstance(every, str)
    if not is_count(every, 1) and not (listed and all(is_count(each, 0) for each in every)):
        raise InvalidArgument(
            f"fit(): validation_freq is {shown(every)}; it is a whole number of at least 1, or a "
            "list of epochs"
        )


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
