"""The words of all ranks, in a store that may still hold those of ranks that met there before.

A store of torchrun's outlives the processes of a round, and nothing that all ranks know tells one
round from the next: each agent counts its own restarts. So rank 0 opens a round under a random
number. The others write their words under it, each with a random number of its own. An answer
counts for a rank only if it repeats that rank's number. Whatever else is there is of the past.
All of it is sealed (sealed.py).
"""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

from farandole._core import AuthError, Error, RendezvousError
from farandole._meeting.connection import POLITE
from farandole._meeting.errors import Words, error_in, told_of
from farandole._meeting.meeting import FAREWELL, GRACE, Check, Meeting, Reminder
from farandole._meeting.members import checked
from farandole._meeting.sealed import opened, sealed
from farandole._tables import listed

_PAUSE = 0.01  # seconds between two looks at the store
_RANKS_OF_A_PAUSE = 64  # more of them look less often: one process answers them all


class KeyValueStore(Protocol):
    """The part of torch.distributed's store that is used here. ``get`` waits for the key."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


class SealedStore:
    """A store in which ranks know what others of their job have set."""

    def __init__(self, store: KeyValueStore, secret: bytes) -> None:
        self._store = store
        self._secret = secret

    def set(self, key: str, words: Any) -> None:
        self._store.set(key, sealed(self._secret, key, words))

    def find(self, key: str, rank: int | None) -> Any:
        """What that rank, or any, has set there; None where there is nothing. Raises AuthError."""
        if not self._store.check([key]):
            return None
        return opened(self._secret, key, self._store.get(key), rank)


class Round(NamedTuple):
    """The result of meet_in()."""

    store: SealedStore
    key: str  # what belongs to this round in the store begins like this
    table: list[Words]  # by rank


def meet_in(store: KeyValueStore, name: str, meeting: Meeting, mine: Words, check: Check) -> Round:
    """`name`: the same on all ranks; others may have met under it before.

    Raises:
        RendezvousError: ranks are missing at the deadline, or the store is gone.
        Error: what ``check`` says.
    """
    mine = mine | {"number": secrets.token_hex(8)}
    its = SealedStore(store, meeting.secret)
    try:
        if meeting.rank == 0:
            return _Leader(its, name, meeting, mine, check).gather()
        return _follow(its, name, meeting, mine)
    except (RuntimeError, OSError, ValueError) as error:  # torch's DistStoreError is the first
        if isinstance(error, Error):
            raise
        raise RendezvousError(
            f"rank {meeting.rank} did not meet all others in torch.distributed's store: {error}"
        ) from error


class _Leader:
    """Rank 0's part."""

    def __init__(
        self, store: SealedStore, name: str, meeting: Meeting, mine: Words, check: Check
    ) -> None:
        self._store = store
        self._meeting = meeting
        self._check = check
        self._mine = mine
        self._key = f"{name}/{mine['number']}"
        self._words = {0: mine}
        self._unproved: set[int] = set()  # ranks whose words somebody else may have written
        store.set(_round_of(name), mine["number"])

    def gather(self) -> Round:
        try:
            self._look_at(self._mine)
            self._receive()
            table = [self._words[rank] for rank in self._meeting.ranks]
            if why := self._check(table):
                raise why
        except Error as error:
            refusal = told_of(error)
            self._refuse(refusal)
            raise error_in(refusal) from error  # in the words of all
        self._answer(None)
        return Round(self._store, self._key, table)

    def _receive(self) -> None:
        reminder = Reminder(self._meeting)
        while missing := self._missing():
            why = (
                f"{len(self._words)} of {len(self._meeting.ranks)} ranks came to "
                f"torch.distributed's store; missing: {listed('rank', missing)}"
            )
            if time.monotonic() >= self._meeting.until:
                raise RendezvousError(why)
            self._meeting.look()
            reminder.warn_in_time(partial(str, why))
            for rank in self._arrivals(missing):
                self._look_at(self._words[rank])

    def _missing(self) -> list[int]:
        known = self._words.keys() | self._unproved
        return [rank for rank in self._meeting.ranks if rank not in known]

    def _arrivals(self, missing: list[int]) -> list[int]:
        """The missing ranks whose words are there now. Sleeps as long as this took, so that the
        store has time for others."""
        began = time.monotonic()
        came = []
        for rank in missing:
            try:
                words = self._store.find(f"{self._key}/{rank}", rank)
            except AuthError:
                self._unproved.add(rank)
                raise
            if words is not None:
                self._words[rank] = checked(words)
                came.append(rank)
        if not came:
            time.sleep(max(_PAUSE, time.monotonic() - began))
        return came

    def _look_at(self, words: Words) -> None:
        """Reports what is wrong with one rank before the others have come."""
        if why := self._check([self._mine] if words is self._mine else [self._mine, words]):
            raise why

    def _answer(self, refusal: Words | None) -> None:
        """All of it once, then to each rank its own number: a rank reads no more of a round that is
        of the past."""
        table = [self._words[rank] for rank in sorted(self._words)]
        self._store.set(self._key, {"refused": refusal, "ranks": table})
        for words in table:
            self._store.set(_answer_of(self._key, words["rank"]), words["number"])

    def _refuse(self, refusal: Words) -> None:
        """Refuses the ranks of this round, and those that come soon."""
        self._answer(refusal)
        until = min(self._meeting.until, time.monotonic() + FAREWELL)
        while (missing := self._missing()) and time.monotonic() < until:
            with suppress(AuthError):  # the first one was told
                if self._arrivals(missing):
                    self._answer(refusal)


def _follow(store: SealedStore, name: str, meeting: Meeting, mine: Words) -> Round:
    """The part of the others."""
    key = ""
    reminder = Reminder(meeting)
    until = meeting.until + GRACE
    polite = time.monotonic() + POLITE  # meanwhile it may find what is of the past
    pause = _PAUSE * max(1.0, len(meeting.ranks) / _RANKS_OF_A_PAUSE)
    while True:
        # Before the look for an answer: rank 0 answers in this round before it opens another one.
        newest = ""
        try:
            newest = f"{name}/{store.find(_round_of(name), 0) or ''}"
        except AuthError:
            if time.monotonic() >= polite:
                raise
        if key and (answer := _answer_to(store, key, mine)) is not None:
            if answer["refused"]:
                raise error_in(answer["refused"])
            return Round(store, key, answer["ranks"])
        if newest not in (key, f"{name}/", ""):
            key = newest
            store.set(f"{key}/{meeting.rank}", mine)
            continue
        said = "has opened no round" if not key else "has not answered"
        why = f"rank 0 {said} in torch.distributed's store"
        if time.monotonic() >= until:
            raise RendezvousError(
                f"rank {meeting.rank} did not meet all others: {why}; look at rank 0's log"
            )
        meeting.look()
        reminder.warn_in_time(partial(str, why))
        time.sleep(pause)


def _answer_to(store: SealedStore, key: str, mine: Words) -> Words | None:
    if store.find(_answer_of(key, mine["rank"]), 0) != mine["number"]:
        return None
    return checked_answer(store.find(key, 0))


def checked_answer(answer: Any) -> Words:
    """Rank 0's answer. Raises ValueError for what no rank 0 says."""
    if not isinstance(answer, dict) or not isinstance(answer.get("ranks"), list):
        raise ValueError("no answer of rank 0")
    return {"refused": answer.get("refused"), "ranks": [checked(each) for each in answer["ranks"]]}


def _round_of(name: str) -> str:
    return f"{name}/round"


def _answer_of(key: str, rank: int) -> str:
    return f"{key}/{rank}/answer"
