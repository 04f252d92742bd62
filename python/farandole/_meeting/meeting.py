"""Which ranks meet, by what secret, and until when; and what they tell each other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from farandole._core import Error
from farandole._meeting.errors import Words
from farandole._meeting.line import Line

Check = Callable[[list[Words]], Error | None]  # of some ranks' words, or of all: the first's count

GRACE = 4.0  # seconds that who receives may need after its deadline to say what is wrong
FAREWELL = 5.0  # seconds in which a rank that cannot join tells the others why
_REMIND = 60.0  # seconds between two warnings that ranks are missing


@dataclass(frozen=True)
class Meeting:
    """Of which ranks, by what secret, and until when (time.monotonic)."""

    rank: int
    ranks: Sequence[int]  # of all who meet, ascending; the first one receives the others
    until: float
    secret: bytes = b""
    # Of a world of some of the job's ranks: which ones, as all of them say it. Whoever of them gets
    # hold of the place receives.
    among: str = ""
    warn: Callable[[str], None] = lambda _: None
    warn_after: float = 10.0  # seconds
    look: Callable[[], None] = lambda: None  # now and then; raises Error where it is called off

    @property
    def first(self) -> int:
        return self.ranks[0]

    def receives(self) -> bool:
        return self.rank == self.first or bool(self.among)

    def others(self) -> str:
        """Whom this rank looks for, as a person reads it."""
        receiver = self.first != self.rank and not self.among
        return f"rank {self.first}" if receiver else "the others"

    def said_among(self) -> str:
        return f" of a world of {self.world()}" if self.among else ""

    def world(self) -> str:
        return f"ranks {self.among.partition(':')[0]}" if self.among else "all ranks"


class Met(NamedTuple):
    """What comes of it."""

    table: list[Words]  # by rank
    line: Line
    descriptors: Sequence[int] = ()  # that who received has handed to all; the caller's


class Reminder:
    """Says what a rank waits for, when it has waited for long, and now and then."""

    def __init__(self, meeting: Meeting) -> None:
        self._warn = meeting.warn
        self._since = time.monotonic()
        self._next = self._since + meeting.warn_after

    def warn_in_time(self, text: Callable[[], str]) -> None:
        if (now := time.monotonic()) >= self._next:
            self._next = now + _REMIND
            self._warn(f"after {now - self._since:.0f} s {text()}")
