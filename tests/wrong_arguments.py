"""Calls public functions with wrong arguments and checks that they raise farandole's errors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

import farandole as fd

WRONG = {
    "none": None, "an_object": object(), "text": "2", "bytes": b"\xff", "a_surrogate": "\ud800",
    "large": 2**40, "larger": -(2**70), "half": 1.5, "nan": float("nan"), "a_list": [object()],
    "a_dict": {}, "a_function": len,
}  # fmt: skip


def outcome(call: Callable[[], Any], also: tuple[type[Exception], ...] = ()) -> str:
    """The problem with the call's end, or "". `also`: errors of others that it may raise."""
    try:
        call()
    except fd.Error as error:
        str(error).encode()  # not every terminal accepts a surrogate
    except also:
        pass
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
    return ""


def problems_of(
    function: Callable[..., Any],
    signature: inspect.Signature,
    right: Mapping[str, Any],
    also: tuple[type[Exception], ...] = (),
) -> list[str]:
    """The problems of calls with one wrong argument each. `right`: arguments by name, or functions
    that make them; parameters that it lacks are 0."""
    named = {
        p: of
        for p, of in signature.parameters.items()
        if p != "self" and of.kind not in (of.VAR_POSITIONAL, of.VAR_KEYWORD)
    }
    problems = []
    for parameter in named:
        for word, value in WRONG.items():
            needed = {p: right.get(p, 0) for p, of in named.items() if of.default is of.empty}
            made = {p: v() if inspect.isfunction(v) else v for p, v in needed.items()}
            arguments = made | {parameter: value}
            problem = outcome(lambda arguments=arguments: function(**arguments), also)  # type: ignore[misc]
            if problem:
                problems.append(f"{parameter}={word}: {problem}")
    return problems


def callables(of: ModuleType, apart: Iterable[str] = ()) -> list[str]:
    """Names of all public functions and classes of a module, but errors and those `apart`."""
    names = []
    for name in of.__all__:
        value = getattr(of, name)
        error = inspect.isclass(value) and issubclass(value, Exception)
        if callable(value) and not error and name not in apart:
            names.append(name)
    return names


def problems_in(
    module: ModuleType,
    right: Mapping[str, Any],
    *,
    apart: Iterable[str] = (),
    also: Mapping[str, tuple[type[Exception], ...]] | None = None,
    settle: Callable[[str, Any], Any] = lambda _, __: None,
) -> list[str]:
    """The problems of all functions and classes of a module but those `apart`. `also`: other errors
    that they may raise, by name. `settle(name, result)`: ends operations that a call has begun."""
    problems = []
    for name in callables(module, apart):
        function = getattr(module, name)

        try:
            signature = inspect.signature(function)
        except ValueError as error:
            problems.append(f"{name}: {error}")
            continue
        found = problems_of(
            _settled(function, name, settle), signature, right, (also or {}).get(name, ())
        )
        problems += [f"{name}({problem}" for problem in found]
    return problems


def _settled(
    function: Callable[..., Any], of: str, settle: Callable[[str, Any], Any]
) -> Callable[..., Any]:
    return lambda **arguments: settle(of, function(**arguments))
