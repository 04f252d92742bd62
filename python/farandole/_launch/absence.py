"""Ranks that have ended well, and for which others wait in init(): for ever, if nobody looked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from farandole._launch.place import Place, Rank
from farandole._launch.words import Meetings, Word

# How long ranks may wait in init() for one that has ended well.
_PATIENCE = 3.0


class Missed(NamedTuple):
    rank: Rank
    waiting: list[int]


class Absences:
    """Since when each is waited for."""

    def __init__(self) -> None:
        self._meetings = Meetings()
        self._since: dict[int, float] = {}

    def hear(self, word: Word) -> None:
        self._meetings.hear(word)

    def forget(self) -> None:
        self._since.clear()

    def dues(self) -> list[float]:
        return [since + _PATIENCE for since in self._since.values()]

    def look(self, places: Sequence[Place], now: float) -> Missed | None:
        """The first that will not come any more."""
        for place in places:
            for rank in place.ranks:
                waiting = [] if rank.alive else self._meetings.waiting_for(rank.number)
                if not waiting:
                    self._since.pop(rank.number, None)
                elif now < self._since.setdefault(rank.number, now) + _PATIENCE:
                    continue
                elif place.has_orphans():  # one may be the rank's program
                    self._since[rank.number] = now
                else:
                    return Missed(rank, waiting)
        return None
