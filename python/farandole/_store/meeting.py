"""Which ranks meet, where, by what secret, and until when."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from farandole._core import Error, RendezvousError, VersionMismatch
from farandole._store.line import Line

Words = dict[str, Any]
Check = Callable[[list[Words]], Error | None]  # of some ranks' words, or of all: the first's count

GRACE = 4.0  # seconds that rank 0 may need after its deadline to say what is wrong
FAREWELL = 5.0  # seconds in which a rank that cannot join tells the others why
_REMIND = 60.0  # seconds between two warnings that ranks are missing


@dataclass(frozen=True)
class Meeting:
    """Of which ranks, where, by what secret, and until when (time.monotonic)."""

    rank: int
    size: int
    address: str
    port: int
    secret: bytes
    until: float
    # Of a world of some of the job's ranks: which ones, as all of them say it. Whoever of them gets
    # hold of the place receives.
    among: str = ""
    at: Sequence[str] = ()  # addresses at which to receive; none: those of the name above
    warn: Callable[[str], None] = lambda _: None
    warn_after: float = 10.0  # seconds
    look: Callable[[], None] = lambda: None  # now and then; raises Error where it is called off

    @property
    def place(self) -> str:
        return f"{self.address}:{self.port}"


def name_of(words: Words) -> str:
    return f"rank {words['rank']} (pid {words['pid']} on {words['host']})"


def refusal(error: Error | None) -> Words:
    """As it is told to others."""
    if error is None:
        return {"refused": None}
    return {"refused": str(error), "of versions": isinstance(error, VersionMismatch)}


def refused(told: Words) -> Error:
    """The error that others have told."""
    kind = VersionMismatch if told.get("of versions") else RendezvousError
    return kind(told["refused"])


class Met(NamedTuple):
    """What comes of it."""

    table: list[Words]  # by rank
    line: Line


class Reminder:
    """Says what a rank waits for, when it has waited for long, and now and then."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._since = time.monotonic()
        self._next = self._since + meeting.warn_after

    def warn_in_time(self, text: str) -> None:
        if (now := time.monotonic()) >= self._next:
            self._next = now + _REMIND
            self._meeting.warn(f"after {now - self._since:.0f} s {text}")


def said_among(meeting: Meeting) -> str:
    return f" of a world of {ranks_of(meeting.among)}" if meeting.among else ""


def ranks_of(among: str) -> str:
    return f"ranks {among.partition(':')[0]}" if among else "all ranks"
