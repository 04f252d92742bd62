"""Errors, as ranks tell them to each other."""

from __future__ import annotations

from typing import Any

from farandole import _core
from farandole._core import Error, RendezvousError

Words = dict[str, Any]

_FIELDS = {
    "verdict": str, "evidence": str, "advice": str, "rank": int, "pid": int, "host": str,
    "values": dict,
}  # fmt: skip


def name_of(words: Words) -> str:
    return f"rank {words['rank']} (pid {words['pid']} on {words['host']})"


def told_of(error: Error) -> Words:
    """The error as it is sent to others: only what its class does not say."""
    kind = kind_of(error)
    fields = {name: getattr(error, name) for name in _FIELDS}
    fields["values"] = dict(error.values)
    said = {name: value for name, value in fields.items() if value != getattr(kind, name)}
    return {"verdict": error.verdict, **said, "kind": kind.__name__}


def kind_of(error: Error) -> type[Error]:
    """A class of the table of errors: `error` may be of another one that is derived from it."""
    return next(each for each in type(error).__mro__ if each.__name__ in _core.error_names)


def error_in(told: Any) -> Error:
    """The error that another rank has sent; a RendezvousError if this version has no such kind."""
    words: Words = told if isinstance(told, dict) else {"verdict": str(told)}
    name = words.get("kind")
    kind: type[Error] = getattr(_core, name) if name in _core.error_names else RendezvousError
    return made(
        kind, {field: v for field, v in words.items() if isinstance(v, _FIELDS.get(field, ()))}
    )


def about(who: Words, kind: type[Error], verdict: str, advice: str = "") -> Error:
    """An error about that rank."""
    place = {name: who[name] for name in ("rank", "pid", "host")}
    return made(kind, place | {"verdict": verdict} | ({"advice": advice} if advice else {}))


def made(kind: type[Error], fields: Words) -> Error:
    """In the form that the core's errors have (base/error.cpp)."""
    evidence = f"\n  evidence: {fields['evidence']}" if fields.get("evidence") else ""
    advice = fields.get("advice", kind.advice)
    error = kind(f"{fields.get('verdict', '')}{evidence}\n  advice: {advice}")
    for name, value in fields.items():
        setattr(error, name, value)
    return error


def could_not_meet(who: Words, error: BaseException) -> Error:
    """The error that all ranks get if this one could not meet the others."""
    if isinstance(error, OSError) and not isinstance(error, Error):
        error = _core.errno_error(error.errno or 0, "a meeting's system call")
    if not isinstance(error, Error):
        error = RendezvousError(repr(error))
    verdict = f"{name_of(who)} could not meet the others: {error.verdict}"
    kind = kind_of(error)
    # An argument that is wrong on that rank is no argument of the others.
    return about(
        who, RendezvousError if issubclass(kind, ValueError) else kind, verdict, error.advice
    )
