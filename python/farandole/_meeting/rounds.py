"""The words of all ranks, in a store that may still hold those of ranks that met there before.

A store of torchrun's outlives the processes of a round, and nothing that all ranks know tells one
round from the next: each agent counts its own restarts. So rank 0 opens a round under a random
number. The others write their words under it, each with a random number of its own. An answer
counts for a rank only if it repeats that rank's number. Whatever else is there is of the past.
"""

from __future__ import annotations

import json
import secrets
import time
from functools import partial
from typing import NamedTuple, Protocol

from farandole import _json
from farandole._core import Error, RendezvousError
from farandole._meeting.errors import Words, error_in, told_of
from farandole._meeting.meeting import FAREWELL, GRACE, Check, Meeting, Reminder
from farandole._meeting.members import checked
from farandole._tables import listed

_PAUSE = 0.01  # seconds between two looks at the store
_RANKS_OF_A_PAUSE = 64  # more of them look less often: one process answers them all


class KeyValueStore(Protocol):
    """The part of torch.distributed's store that is used here. ``get`` waits for the key."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


class Round(NamedTuple):
    """The result of meet_in()."""

    key: str  # what belongs to this round in the store begins like this
    table: list[Words]  # by rank


def meet_in(store: KeyValueStore, name: str, meeting: Meeting, mine: Words, check: Check) -> Round:
    """`name`: the same on all ranks; others may have met under it before.

    Raises:
        RendezvousError: ranks are missing at the deadline, or the store is gone.
        Error: what ``check`` says.
    """
    mine = mine | {"number": secrets.token_hex(8)}
    try:
        if meeting.rank == 0:
            return _Leader(store, name, meeting, mine, check).gather()
        return _follow(store, name, meeting, mine)
    except (RuntimeError, OSError, ValueError) as error:  # torch's DistStoreError is the first
        if isinstance(error, Error):
            raise
        raise RendezvousError(
            f"rank {meeting.rank} did not meet all others in torch.distributed's store: {error}"
        ) from error


class _Leader:
    """Rank 0's part."""

    def __init__(
        self, store: KeyValueStore, name: str, meeting: Meeting, mine: Words, check: Check
    ) -> None:
        self._store = store
        self._meeting = meeting
        self._check = check
        self._mine = mine
        self._key = f"{name}/{mine['number']}"
        self._words = {0: mine}
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
        return Round(self._key, table)

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
        return [rank for rank in self._meeting.ranks if rank not in self._words]

    def _arrivals(self, missing: list[int]) -> list[int]:
        """The missing ranks whose words are there now. Sleeps as long as this took, so that the
        store has time for others."""
        began = time.monotonic()
        came = [rank for rank in missing if self._store.check([f"{self._key}/{rank}"])]
        for rank in came:
            self._words[rank] = checked(_json.read(self._store.get(f"{self._key}/{rank}")))
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
        self._store.set(self._key, json.dumps({"refused": refusal, "ranks": table}))
        for words in table:
            self._store.set(_answer_of(self._key, words["rank"]), words["number"])

    def _refuse(self, refusal: Words) -> None:
        """Refuses the ranks of this round, and those that come soon."""
        self._answer(refusal)
        until = min(self._meeting.until, time.monotonic() + FAREWELL)
        while (missing := self._missing()) and time.monotonic() < until:
            if self._arrivals(missing):
                self._answer(refusal)


def _follow(store: KeyValueStore, name: str, meeting: Meeting, mine: Words) -> Round:
    """The part of the others."""
    key = ""
    reminder = Reminder(meeting)
    until = meeting.until + GRACE
    pause = _PAUSE * max(1.0, len(meeting.ranks) / _RANKS_OF_A_PAUSE)
    while True:
        # Before the look for an answer: rank 0 answers in this round before it opens another one.
        newest = f"{name}/{_text(store, _round_of(name))}"
        if key and (answer := _answer_to(store, key, mine)) is not None:
            if answer["refused"]:
                raise error_in(answer["refused"])
            return Round(key, answer["ranks"])
        if newest != key and newest != f"{name}/":
            key = newest
            store.set(f"{key}/{meeting.rank}", json.dumps(mine))
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


def _answer_to(store: KeyValueStore, key: str, mine: Words) -> Words | None:
    if _text(store, _answer_of(key, mine["rank"])) != mine["number"]:
        return None
    return answer_in(store.get(key))


def answer_in(text: bytes) -> Words:
    """Rank 0's answer. Raises ValueError for what no rank 0 says."""
    answer = _json.read(text)
    if not isinstance(answer, dict) or not isinstance(answer.get("ranks"), list):
        raise ValueError("no answer of rank 0")
    return {"refused": answer.get("refused"), "ranks": [checked(each) for each in answer["ranks"]]}


def _text(store: KeyValueStore, key: str) -> str:
    """The key's value; empty where there is none."""
    return store.get(key).decode() if store.check([key]) else ""


def _round_of(name: str) -> str:
    return f"{name}/round"


def _answer_of(key: str, rank: int) -> str:
    return f"{key}/{rank}/answer"
