"""Values of variables in a program of JAX, which has them where the variables have not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

_known: list[dict[int, Any]] = [{}]


@contextmanager
def present(variables: Iterable[Any], values: Iterable[Any]) -> Iterator[None]:
    """A context in which variables have these values."""
    known = {id(variable): value for variable, value in zip(variables, values, strict=False)}
    _known.append(_known[-1] | known)
    try:
        yield
    finally:
        _known.pop()


def is_present(variable: Any) -> bool:
    return id(variable) in _known[-1]


def value_of(variable: Any) -> Any:
    """The present value; else the variable's own, if it has one."""
    return _known[-1][id(variable)] if is_present(variable) else variable.value
