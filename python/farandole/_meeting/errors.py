"""Errors, as ranks tell them to each other."""

from __future__ import annotations

from typing import Any

from farandole import _core
from farandole._core import Error, RendezvousError

Words = dict[str, Any]

_FIELDS = {"verdict": str, "advice": str, "rank": int, "pid": int, "host": str, "values": dict}


def name_of(words: Words) -> str:
    return f"rank {words['rank']} (pid {words['pid']} on {words['host']})"


def told_of(error: Error) -> Words:
    """As it is told to others."""
    fields = {name: getattr(error, name) for name in _FIELDS}
    kind = kind_of(error).__name__
    return fields | {"kind": kind, "text": str(error), "values": dict(error.values)}


def kind_of(error: Error) -> type[Error]:
    """A class of the table of errors: `error` may be of another one that is derived from it."""
    return next(each for each in type(error).__mro__ if each.__name__ in _core.error_names)


def error_in(told: Any) -> Error:
    """The error that others have told; a RendezvousError where this version has no such kind."""
    words: Words = told if isinstance(told, dict) else {"text": told}
    name = words.get("kind")
    kind: type[Error] = getattr(_core, name) if name in _core.error_names else RendezvousError
    error = kind(str(words.get("text")))
    for field, of in _FIELDS.items():
        if isinstance(value := words.get(field), of):
            setattr(error, field, value)
    return error


def about(who: Words, kind: type[Error], verdict: str, advice: str = "") -> Error:
    """Of that rank, in the form that the core's errors have."""
    error = kind(f"{verdict}\n  advice: {advice or kind.advice}")
    error.advice = advice or kind.advice
    error.rank, error.pid, error.host = who["rank"], who["pid"], who["host"]
    return error


def could_not_meet(who: Words, error: BaseException) -> Error:
    """What went wrong on one rank, as all are told it."""
    if isinstance(error, OSError) and not isinstance(error, Error):
        error = _core.errno_error(error.errno or 0, "a meeting's system call")
    if not isinstance(error, Error):
        error = RendezvousError(repr(error))
    verdict = f"{name_of(who)} could not meet the others: {error.verdict}"
    kind = kind_of(error)
    # An argument that is wrong there is none of the others'.
    return about(
        who, RendezvousError if issubclass(kind, ValueError) else kind, verdict, error.advice
    )
