"""How the ranks of a communicator meet, in a duplicate of it that nobody else uses, and where their
data go afterwards.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from farandole import _core, _mpi
from farandole._core import AuthError, Error, RendezvousError
from farandole._meeting import GRACE, Meeting, Met, could_not_meet, error_in, line, told_of
from farandole._meeting.places import state_of
from farandole._mpi import Ranks
from farandole._mpi_words import LOOK, Talk, Words, finish
from farandole._tables import listed

Check = Callable[[list[Words]], Error | None]

_TOLD, _ANSWERED, _LATER = 1, 2, 3  # tags of words; the core has tags of its own
_ROLL = 32029  # a tag of few programs; every MPI has tags to 32767
_ANSWERS = 1.0  # seconds: a rank that waits in init() looks every millisecond
_LIVES = 0.1  # seconds between two looks at the processes of this host

_keys: list[int] = []  # one, under which communicators keep their duplicate


@contextmanager
def abandoning(ranks: Ranks | None) -> Iterator[None]:
    """Where this rank fails alone, others will not come to MPI_Finalize, or not with it: then this
    process does not wait there. Another meeting takes another duplicate of the communicator."""
    try:
        yield
    except BaseException as error:
        if ranks is not None:
            _mpi.binding()
            why = error.verdict if isinstance(error, Error) else repr(error)
            _core.abandon_mpi(f"its ranks did not meet: {why}")
            if _keys and ranks.given.Get_attr(_keys[0]) is not None:
                ranks.given.Delete_attr(_keys[0])
        raise


def exchange(
    ranks: Ranks, meeting: Meeting, mine: Words, check: Check, before: Met | None = None
) -> Met:
    """Every rank's words, by rank. Rank 0 refuses all of them if ``check`` finds an error.
    ``before``: of ranks that have met, and meet again; they notice the end of one.

    Raises:
        RendezvousError: ranks do not come, or ``check`` refuses.
        AuthError: words have no seal of the job's secret.
    """
    until = meeting.until
    mine = mine | {"number": secrets.token_hex(8)}
    with abandoning(ranks):
        _mpi.binding()  # a rank that has met watches for the end of MPI
        talk = Talk(_own(ranks, meeting), meeting.secret)
        if before is not None:
            talk = talk._replace(look=before.line.look)
        if ranks.rank == 0:
            answer = _gather(talk, ranks.size, mine, check, until)
        else:
            finish(talk.begin(mine, 0, _TOLD), until, "rank 0 does not take this rank's words")
            heard = talk.hear(0, _ANSWERED, until + GRACE, mine["number"])
            answer = heard[1] if heard else {"missing": [0]}
        if missing := answer["missing"]:
            who = f"{listed('rank', missing)} of the communicator"
            raise RendezvousError(f"{who} did not come in time; look at the logs")
    if answer["refused"]:
        raise error_in(answer["refused"])
    until += GRACE if ranks.rank == 0 else 2 * GRACE  # rank 0 says who is late
    plain = talk._replace(look=lambda: None)
    return Met(answer["ranks"], _Line(plain, answer["ranks"], ranks.rank, until))


def open_port(ranks: Ranks, world: int, secret: bytes) -> _core.MpiPort:
    """The port for the data of ranks that have met. ``world``: the same on all ranks, and another
    one each time. ``secret``: the job's."""
    handle = _mpi.handle_of(ranks.given.Get_attr(_keys[0]))
    level = _mpi.threads()["threads"]
    return _core.MpiPort(_mpi.binding(), handle, ranks.rank, ranks.size, world, secret, level)


def _own(ranks: Ranks, meeting: Meeting) -> Any:
    """The duplicate, made once: kept with the communicator."""
    mpi = _mpi.module()
    if not _keys:
        _keys.append(mpi.Comm.Create_keyval())
    ours = ranks.given.Get_attr(_keys[0])
    if ours is None:
        ours, duplicating = ranks.given.Idup()
        roll = _Roll(Talk(ranks.given, meeting.secret), ranks.rank, ranks.size)
        while not duplicating.Test():
            roll.look()
            if time.monotonic() >= meeting.until:
                roll.give_up()
            time.sleep(LOOK)
        ours.Set_errhandler(mpi.ERRORS_RETURN)
        ranks.given.Set_attr(_keys[0], ours)
    return ours


def _gather(talk: Talk, size: int, mine: Words, check: Check, until: float) -> Words:
    told = {0: mine}
    why: Error | None = None
    while len(told) < size:
        try:
            heard = talk.hear(None, _TOLD, until)
        except AuthError as error:  # all are to hear of it
            why, heard = error, (error.rank or 0, {})
        if heard is None:
            break
        told[heard[0]] = heard[1]
    missing = [r for r in range(size) if r not in told]
    table = [words for _, words in sorted(told.items())]
    if why is None and not missing:
        why = check(table)
    answer = {"refused": why and told_of(why), "missing": missing, "ranks": table}
    answering = [
        talk.begin(answer, r, _ANSWERED, words.get("number", ""))
        for r, words in told.items()
        if r != 0
    ]
    for each in answering:
        finish(each, until + GRACE, "a rank does not take what rank 0 has found")
    return answer


class _Line:
    """The line that stays while ranks connect to each other (_meeting/line.py). A rank that fails
    calls nothing of MPI any more but for these words. MPI tells nobody of a death: processes of
    this host are looked at."""

    def __init__(self, talk: Talk, table: list[Words], rank: int, until: float) -> None:
        self._talk = talk
        self._table = table
        self._rank = rank
        self._until = until
        self._others = list(range(1, len(table)) if rank == 0 else [0])  # that listen
        self._awaited = set(self._others)  # that have not said yet that they are connected
        self._over = False
        self._gone: Words | None = None  # as the last look has found
        self._next_look = 0.0  # at processes

    def look(self) -> None:
        while not self._over and (heard := self._hear()) is not None:
            rank, words = heard
            self._awaited.discard(rank)
            if why := words["failed"]:
                self._others.remove(rank)
                if self._rank == 0:
                    self._tell(why)
                self._over = True
                raise error_in(why)
        if not self._over and time.monotonic() >= self._next_look:
            self._look_at_processes()

    def fail(self, why: BaseException) -> Error:
        error = could_not_meet(self._table[self._rank], why)
        self._give_up_with(error)
        return error

    def end(self, look: line.Look = lambda: None) -> None:
        if self._rank != 0:
            self._tell(None)
        while self._awaited:
            self.look()
            look()
            if self._awaited and time.monotonic() >= self._until:
                self._give_up(line.is_silent(sorted(self._awaited)))
            time.sleep(LOOK)
        if self._rank == 0:
            self._tell(None)
        self._over = True

    def _look_at_processes(self) -> None:
        """Looks twice, since a process that is done may end before its last words have come."""
        before, self._gone = self._gone, next(filter(_has_ended, self._of_this_host()), None)
        self._next_look = time.monotonic() + _LIVES
        if self._gone is not None and self._gone is before:
            self._others = [rank for rank in self._others if rank != self._gone["rank"]]
            self._give_up(line.ended(self._gone))

    def _of_this_host(self) -> Iterator[Words]:
        here = self._table[self._rank]["identity"]
        return (words for words in self._table if words["identity"] == here)

    def _give_up(self, why: Error) -> None:
        self._give_up_with(why)
        raise why

    def _give_up_with(self, why: Error) -> None:
        if not self._over:
            self._tell(told_of(why))
        self._over = True

    def _hear(self) -> tuple[int, Words] | None:
        return self._talk.hear(None, _LATER, 0, self._table[0]["number"])

    def _tell(self, why: Words | None) -> None:
        number = self._table[0]["number"]
        telling = {
            rank: self._talk.begin({"failed": why}, rank, _LATER, number) for rank in self._others
        }
        until = time.monotonic() + GRACE
        while telling and time.monotonic() < until:
            telling = {rank: each for rank, each in telling.items() if not each.Test()}
            # One that has found the same by itself takes nothing any more.
            if why and (heard := self._hear()) and heard[1]["failed"]:
                telling.pop(heard[0], None)
            time.sleep(LOOK)


def _has_ended(words: Words) -> bool:
    """Whether that process of this host is gone, or a zombie."""
    return state_of(words["pid"]) in ("Z", "X")


class _Roll:
    """A roll call: rank 0 asks all others, and tells them which have not answered. It finds the
    ranks of a communicator that have not called init(), once another will wait no longer.

    Ranks talk in a duplicate of it, which MPI makes when all have called. So these words alone go
    through the program's own communicator, and only where the world has failed."""

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
        until = time.monotonic() + GRACE
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
        return self._talk.hear(None if self._rank == 0 else 0, _ROLL, until)

    def _tell(self, rank: int, what: str, why: str = "") -> None:
        self._sent.append(self._talk.begin({"is": what, "why": why}, rank, _ROLL))


def _missing(ranks: list[int]) -> str:
    return f"{listed('rank', ranks)} of the communicator did not call init() in time"
