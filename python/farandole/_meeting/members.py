"""A rank's words about itself, and the facts that must be equal on all ranks."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from typing import Any

from farandole import _core
from farandole._core import Error, RendezvousError, VersionMismatch
from farandole._meeting.errors import Words, about, error_in, name_of
from farandole._tables import in_runs

# The fields that every rank sends, and those that only some send.
_ALWAYS = {"rank": int, "size": int, "pid": int, "host": str, "among": str}
_PERHAPS = {
    "version": str, "python": str, "wire": dict, "split": str, "settings": dict, "agree": str,
    "identity": str, "job": str, "named": str, "failed": dict, "cpus": list, "number": str,
    "addresses": str, "world": str, "key": str, "secrets": list, "tuning": str, "post": dict,
    "boot": str, "threads": str, "of MPI": bool,
}  # fmt: skip
_MOST = 2**31
_HEXADECIMAL = ("addresses", "world", "key")


def checked(words: Any) -> Words:
    """The words that another rank has sent. Raises ValueError if no rank sends such words."""
    if not isinstance(words, dict):
        raise ValueError("no words of a rank")
    whole: Words = {"among": "", **words}
    for name, kind in (_ALWAYS | {n: kind for n, kind in _PERHAPS.items() if n in words}).items():
        if not isinstance(whole.get(name), kind):
            raise ValueError(f"no words of a rank: {name}")
    for digits in [*(words.get(name, "") for name in _HEXADECIMAL), *words.get("secrets", [])]:
        if not isinstance(digits, str):
            raise ValueError("no words of a rank: its secrets")
        bytes.fromhex(digits)
    numbers = [whole[name] for name in ("rank", "size", "pid")] + words.get("cpus", [])
    if not all(isinstance(number, int) and abs(number) < _MOST for number in numbers):
        raise ValueError("no words of a rank: its numbers")
    return whole


def who(rank: int, size: int) -> Words:
    return {
        "rank": rank,
        "size": size,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "version": _core.__version__,
        "python": _interpreter(),
    }


def _interpreter() -> str:
    return f"{sys.implementation.name} {sys.version_info.major}.{sys.version_info.minor}"


def alike(agree: str) -> Words:
    """Facts that must be equal on all ranks. `agree`: a word of the program's own."""
    return {
        "wire": dict(_core.wire_format()),
        "split": os.environ.get("FARANDOLE_SPLIT_HOSTS", ""),
        "settings": dict(each.split("=", 1) for each in _core.agreed_settings().split(", ")),
        "agree": agree,
    }


def objection(table: list[Words]) -> Error | None:
    """Why some of these ranks cannot be in a world with the first of them."""
    first = table[0]
    for words in table:
        if why := words.get("failed"):
            return error_in(why)
        for both, kind in ((_of_the_build, VersionMismatch), (_of_the_job, RendezvousError)):
            for what, theirs, ours in _pairs(both(words), both(first)):
                if theirs != ours:
                    return kind(
                        f"{name_of(words)} has {what} [{theirs}], {name_of(first)} has [{ours}]"
                    )
    # Once all have come, so that each value has all its ranks.
    return _other_settings(table) if len(table) == first["size"] else None


_Facts = Iterator[tuple[str, Any]]


def _pairs(theirs: _Facts, ours: _Facts) -> Iterator[tuple[str, Any, Any]]:
    """The facts that both have, with both values: another version may lack some."""
    known = dict(ours)
    return ((what, value, known[what]) for what, value in theirs if what in known)


def _of_the_build(words: Words) -> _Facts:
    """Facts of the build that must be equal on all ranks, in the order of comparison."""
    yield "farandole", words.get("version")
    yield "the Python", words.get("python")  # what one pickles, another may not read
    yield from ((f"the {what}", value) for what, value in words.get("wire", {}).items())


def _of_the_job(words: Words) -> _Facts:
    """Facts of the job that must be equal. A rank leaves out those that it does not know."""
    yield "a world of", words["size"]
    yield "FARANDOLE_SPLIT_HOSTS", words.get("split")
    yield "agree", words.get("agree")
    if words.get("named"):
        yield "the job", words["named"]


def _other_settings(table: list[Words]) -> Error | None:
    """Every setting that is not the same for all, each value with the ranks that have it."""
    of_each = {words["rank"]: words["settings"] for words in table if "settings" in words}
    found = []
    odd: set[int] = set()
    for name in dict.fromkeys(name for settings in of_each.values() for name in settings):
        givers: dict[str, list[int]] = {}
        for rank, settings in of_each.items():
            givers.setdefault(str(settings.get(name)), []).append(rank)
        if len(givers) > 1:
            values = (f"{value} on {_named(ranks)}" for value, ranks in givers.items())
            found.append(f"{name}: {'; '.join(values)}")
            fewest = min(givers.values(), key=len)
            odd.update(fewest if len(givers) == 2 and len(of_each) > 2 else of_each)
    if not found:
        return None
    verdict = "ranks disagree on " + "; on ".join(found)
    if len(odd) > 1:
        return RendezvousError(verdict)
    return about(next(words for words in table if words["rank"] in odd), RendezvousError, verdict)


def _named(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {in_runs(sorted(ranks))}"
