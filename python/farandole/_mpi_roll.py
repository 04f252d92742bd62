"""Finds the ranks of a communicator that have not called init(), once another will wait no longer.

Ranks talk in a duplicate of it, which MPI makes when all have called. So these words alone go
through the program's own communicator, and only where the world has failed.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any, NoReturn

from farandole._core import RendezvousError
from farandole._mpi_words import Talk, finish
from farandole._tables import listed

_TAG = 32029  # of few programs; every MPI has tags to 32767
_ANSWERS = 1.0  # seconds: a rank that waits in init() looks every millisecond
_RANK_0 = 4.0  # seconds


class Roll:
    """A roll call: rank 0 asks all others, and tells them which have not answered."""

    def __init__(self, talk: Talk, rank: int, size: int) -> None:
        self._talk = talk
        self._rank = rank
        self._others = [r for r in range(size) if r != rank]
        self._sent: list[Any] = []

    def look(self) -> None:
        """Answers the roll call.

        Raises:
            RendezvousError: who is missing, as rank 0 has found.
        """
        while (heard := self._hear(0)) is not None:
            rank, words = heard
            if words["is"] == "late":
                self._call({rank})
            if words["is"] == "asked":
                self._tell(0, "here")
            if words["is"] == "missing":
                raise RendezvousError(words["why"])

    def give_up(self) -> NoReturn:
        """This rank will wait no longer: raises RendezvousError, with who is missing."""
        if self._rank == 0:
            self._call(set())
        self._tell(0, "late")
        until = time.monotonic() + _RANK_0
        while time.monotonic() < until:
            self.look()
            time.sleep(0.01)
        raise RendezvousError(_missing([0]))

    def _call(self, came: set[int]) -> NoReturn:
        for rank in self._others:
            self._tell(rank, "asked")
        until = time.monotonic() + _ANSWERS
        while came != set(self._others) and (heard := self._hear(until)) is not None:
            came.add(heard[0])
        absent = [r for r in self._others if r not in came]
        why = _missing(absent) if absent else "MPI made no duplicate of the communicator in time"
        for rank in self._others:
            self._tell(rank, "missing", why)
        for telling in self._sent:  # but to who is missing: it may take it when it comes
            with suppress(RendezvousError):
                finish(telling, until, "")
        raise RendezvousError(why)

    def _hear(self, until: float) -> tuple[int, dict[str, Any]] | None:
        return self._talk.hear(None if self._rank == 0 else 0, _TAG, until)

    def _tell(self, rank: int, what: str, why: str = "") -> None:
        self._sent.append(self._talk.begin({"is": what, "why": why}, rank, _TAG))


def _missing(ranks: list[int]) -> str:
    return f"{listed('rank', ranks)} of the communicator did not call init() in time"
