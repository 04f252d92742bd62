"""What a public function says of an argument of a wrong type.

Nothing is checked before the call, which would cost every right one: when a call has failed with an
error that is not ours, its arguments are held against the function's annotations.
"""

from __future__ import annotations

import functools
import inspect
import numbers
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

from farandole._core import Error, Group, InvalidArgument

_P = ParamSpec("_P")
_R = TypeVar("_R")


def explained(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function, of which a wrong argument raises InvalidArgument that names it."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except Error:
            raise
        except (TypeError, AttributeError, ValueError, OverflowError, RuntimeError) as error:
            why = _wrong(function.__name__, signature, args, kwargs)
            if why is None:
                raise
            raise InvalidArgument(why) from error

    return call


def is_text(value: Any) -> bool:
    """Text that UTF-8 has: no surrogates, as of bytes that are none."""
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and -(2**31) <= int(value) < 2**31


def _are_whole(value: Any) -> bool:
    return isinstance(value, Sequence) and all(map(_is_whole, value))


_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "str": ("text, of characters that UTF-8 has", is_text),
    "int": ("a whole number of 32 bits", _is_whole),
    "Sequence[Any]": ("a list", lambda v: isinstance(v, Iterable)),
    "os.PathLike[str]": ("a path", lambda v: isinstance(v, (str, os.PathLike))),
    "float": ("a number", lambda v: isinstance(v, numbers.Real)),
    "Sequence[int]": ("a list of whole numbers", _are_whole),
    "Group": ("a group, as of farandole.split()", lambda v: isinstance(v, Group)),
}


def _wrong(
    name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str | None:
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError:
        return None  # Python's own words are the right ones
    for parameter, value in given.items():
        words = str(signature.parameters[parameter].annotation).split(" | ")
        if words[0] not in _KINDS or (value is None and "None" in words):
            continue
        what, fits = _KINDS[words[0]]
        if not fits(value):
            return f"{name}(): {parameter} is {shown(value)}; it is {what}"
    return None


def shown(value: Any) -> str:
    """In a message: short, and of characters that every terminal has."""
    text = repr(value).encode("ascii", "backslashreplace").decode()
    return text if len(text) <= 60 else f"{text[:57]}..."
