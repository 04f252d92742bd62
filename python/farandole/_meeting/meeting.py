"""The ranks of a meeting, their secret and deadline, and the result."""

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
    """The ranks that meet, their secret, and their deadline (time.monotonic)."""

    rank: int
    ranks: Sequence[int]  # of all who meet, ascending; the first one receives the others
    until: float
    secret: bytes = b""
    # The ranks of a world of some of the job's, in the same words on each. The rank that gets hold
    # of the place receives.
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
        """The ranks that this one looks for, in words."""
        receiver = self.first != self.rank and not self.among
        return f"rank {self.first}" if receiver else "the others"

    def said_among(self) -> str:
        return f" of a world of {self.world()}" if self.among else ""

    def world(self) -> str:
        return f"ranks {self.among.partition(':')[0]}" if self.among else "all ranks"


class Met(NamedTuple):
    """The result of a meeting."""

    table: list[Words]  # by rank
    line: Line
    descriptors: Sequence[int] = ()  # from the receiving rank, the same for all; the caller's


class Reminder:
    """Warns what a rank waits for, when it has waited for long, and then now and then."""

    def __init__(self, meeting: Meeting) -> None:
        self._warn = meeting.warn
        self._since = time.monotonic()
        self._next = self._since + meeting.warn_after

    def warn_in_time(self, text: Callable[[], str]) -> None:
        if (now := time.monotonic()) >= self._next:
            self._next = now + _REMIND
            self._warn(f"after {now - self._since:.0f} s {text()}")
