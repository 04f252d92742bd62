"""Receives the other ranks: the first rank does, in one loop over all clients."""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from farandole._core import Error, RendezvousError
from farandole._meeting.connection import (
    LOOK,
    POLITE,
    Changed,
    Connection,
    close_all,
    lacks_descriptors,
)
from farandole._meeting.errors import Words, about, could_not_meet, error_in, name_of, told_of
from farandole._meeting.line import OnConnections
from farandole._meeting.meeting import FAREWELL, GRACE, Check, Meeting, Met, Reminder
from farandole._meeting.places import Place
from farandole._meeting.translated import seen_at
from farandole._meeting.visitor import Visitor
from farandole._tables import in_runs

_MOST_WARNINGS = 8  # of strangers
_MOST_HALF_OPEN = 256  # of those that have not said who they are
_PROMPT = 0.5  # seconds in which a rank has said something, also on a busy host
_PAUSE = 0.01  # seconds
_AT_ONCE = 64  # that are let in before others are heard
_FIND = (
    "look at the logs of the missing ranks, or raise FARANDOLE_START_TIMEOUT; where ranks are on "
    "several hosts, LOCAL_WORLD_SIZE says how many each has"
)

# Makes the descriptors that all ranks get from each rank's own, by rank.
Share = Callable[[list[list[int]]], list[int]]


class Table:
    """The words that have come for one world, and the connections that wait for the others'."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = ranks
        self.words: dict[int, Words] = {}
        self.guests: dict[int, Connection] = {}
        self.waiting: list[Connection] = []  # guests', and that of one who is refused

    def is_full(self) -> bool:
        return len(self.words) == len(self.ranks)

    def in_order(self) -> list[Words]:
        return [self.words[rank] for rank in self.ranks]

    def missing(self) -> list[int]:
        return [rank for rank in self.ranks if rank not in self.words]

    def seat(self, words: Words) -> None:
        """Raises RendezvousError if there is no such rank, or another process has its place."""
        rank: int = words["rank"]
        if rank not in self.ranks:
            raise RendezvousError(f"{name_of(words)} does not exist in a world of {words['size']}")
        first = self.words.get(rank, words)
        if (first["pid"], first["host"]) != (words["pid"], words["host"]):
            raise RendezvousError(
                f"two processes are rank {rank}: pid {first['pid']} on {first['host']} and pid "
                f"{words['pid']} on {words['host']}"
            )
        self.words[rank] = words

    def rank_at(self, descriptor: int) -> int | None:
        return next((r for r, guest in self.guests.items() if guest.fileno() == descriptor), None)

    def leave(self, rank: int) -> None:
        del self.words[rank]
        connection = self.guests.pop(rank)
        self.waiting.remove(connection)
        connection.close()

    def tell_all(self, words: Words) -> None:
        for connection in self.waiting:
            _tell(connection, words)
        self.waiting.clear()
        self.guests.clear()


def _tell(connection: Connection, words: Words) -> None:
    """Sends the last words on a connection, and closes it."""
    with suppress(OSError):
        connection.send(words)
    connection.close()


class Reception:
    """Receives the ranks of this rank's world, and meanwhile those of others of the job."""

    def __init__(
        self, meeting: Meeting, place: Place, mine: Words, check: Check,
        listeners: list[socket.socket],
    ) -> None:  # fmt: skip
        self._meeting = meeting
        self._place = place
        self._mine = mine
        self._check = check
        self._listeners = {listener.fileno(): listener for listener in listeners}
        self._poll = select.poll()  # which needs no descriptor
        for listener in listeners:
            self._poll.register(listener, select.POLLIN)
        self._own = Table(meeting.ranks)
        self._came = {meeting.rank}  # seated or refused
        self._foreign = False  # some of those are not of this world: there are more ranks than its
        self._others: dict[str, Table] = {}
        self._visitors: dict[int, Visitor] = {}  # by descriptor, the oldest first
        self._strangers: list[tuple[str, str]] = []  # from where, what they lacked
        self._told = 0  # how many of them have been told of
        self._turned_away = 0  # how many brought descriptors that could not be had
        self._is_called_off = False  # by who has told all ranks: nobody comes late

    def receive_all(self, own: Sequence[int], share: Share) -> Met:
        """`own`: this rank's descriptors."""
        try:
            self._look_at(self._mine)
            self._own.seat(self._mine)
            self._receive()
            table = self._own.in_order()
            if why := self._check(table):
                raise why
            return self._hand_out(table, own, share)
        except (Error, OSError) as error:
            ours = error if isinstance(error, Error) else could_not_meet(self._mine, error)
            refusal = told_of(ours)
            self._refuse_all(refusal)
            raise error_in(refusal) from error  # in the words of all
        except BaseException as error:
            self._own.tell_all({"refused": told_of(could_not_meet(self._mine, error))})
            raise
        finally:
            self._end()

    # ---- who comes ----

    def _receive(self) -> None:
        reminder = Reminder(self._meeting)
        while not self._own.is_full():
            if time.monotonic() >= self._meeting.until:
                raise self._missing()
            self._look()
            for words, connection in self._arrivals():
                self._seat(words, connection)
            self._tell_of_strangers()
            reminder.warn_in_time(self._who_is_missing)

    def _look(self) -> None:
        try:
            self._meeting.look()
        except Error:
            self._is_called_off = True
            raise

    def _arrivals(self) -> Iterator[tuple[Words, Connection]]:
        """Yields ranks of this world that have come by now; notices those that have gone."""
        ready = [descriptor for descriptor, _ in self._poll.poll(1000 * LOOK)]
        # Known clients are read before others are let in, perhaps in the place of one.
        for descriptor in sorted(ready, key=self._listeners.__contains__):
            if (listener := self._listeners.get(descriptor)) is not None:
                self._let_in(listener)
            elif (visitor := self._visitors.get(descriptor)) is not None:
                if (words := self._heard(visitor)) is None:
                    continue
                if words["among"] == self._meeting.among:
                    yield words, visitor.connection
                else:
                    self._seat_other(words, visitor.connection)
            else:
                self._poll.unregister(descriptor)
                if (rank := self._own.rank_at(descriptor)) is not None:
                    self._lose(rank)
        self._drop_the_silent()

    def _let_in(self, listener: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            if len(self._visitors) == _MOST_HALF_OPEN and not self._makes_room():
                time.sleep(_PAUSE)
                return
            try:
                its, address = listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:
                if lacks_descriptors(error) and self._makes_room():
                    continue
                raise
            connection = Connection(its)
            if not self._place.admits(connection):
                connection.close()
                continue
            visitor = Visitor(connection, address[0] if address else "", self._meeting.secret)
            self._visitors[connection.fileno()] = visitor
            self._poll.register(connection, select.POLLIN)

    def _makes_room(self) -> bool:
        """Drops the client that is silent longest: a rank has more time than it needs."""
        unproved = (visitor for visitor in self._visitors.values() if not visitor.has_proved)
        oldest = next(unproved, None)
        if oldest is None or oldest.until - time.monotonic() > POLITE - _PROMPT:
            return False
        self._drop(oldest)
        return True

    def _heard(self, visitor: Visitor) -> Words | None:
        try:
            if (words := visitor.hear()) is None:
                return None
            words = seen_at(words, visitor.address)
            del self._visitors[visitor.connection.fileno()]
            return words
        except (OSError, ValueError) as error:
            if lacks_descriptors(error):
                del self._visitors[visitor.connection.fileno()]
                self._own.waiting.append(visitor.connection)  # it is told
                self._turned_away += 1
                raise
            changed = isinstance(error, Changed)
            self._drop(visitor, "with words that were changed on their way" if changed else None)
            return None

    def _drop_the_silent(self) -> None:
        now = time.monotonic()
        for visitor in [each for each in self._visitors.values() if now >= each.until]:
            self._drop(visitor)

    def _drop(self, visitor: Visitor, why: str | None = None) -> None:
        self._poll.unregister(visitor.connection)
        del self._visitors[visitor.connection.fileno()]
        visitor.connection.close()
        if (stranger := (visitor.whence, why or visitor.lacks)) not in self._strangers:
            self._strangers.append(stranger)

    # ---- seats ----

    def _seat(self, words: Words, connection: Connection) -> None:
        """Takes in a rank, and reports what is wrong with it before the others have come. A rank
        that has ended leaves its place to a process that is started in its stead."""
        rank: int = words["rank"]
        before = self._own.guests.get(rank)
        if before is not None and before.has_hung_up():
            self._own.leave(rank)
            self._came.remove(rank)
        self._foreign |= rank in self._came or rank not in self._own.ranks
        self._came.add(rank)
        self._own.waiting.append(connection)
        self._look_at(words)
        self._own.seat(words)
        self._own.guests[rank] = connection

    def _look_at(self, words: Words) -> None:
        if why := self._check([self._mine] if words is self._mine else [self._mine, words]):
            raise why

    def _lose(self, rank: int) -> None:
        """Frees a place. Where no process can be started for it, the meeting fails."""
        if not self._own.guests[rank].has_hung_up():
            return  # it has said more than it should, which is heard when all have come
        words = self._own.words[rank]
        self._own.leave(rank)
        self._came.remove(rank)
        if not self._place.others_may_come:
            verdict = f"{name_of(words)} left while the ranks met"
            raise about(words, RendezvousError, verdict, "look at that rank's log")

    def _seat_other(self, words: Words, connection: Connection) -> None:
        among: str = words["among"]
        table = self._others.setdefault(among, Table(range(words["size"])))
        for rank in [rank for rank, guest in table.guests.items() if guest.has_hung_up()]:
            table.leave(rank)
        table.waiting.append(connection)
        try:
            table.seat(words)
            table.guests[words["rank"]] = connection
            if not table.is_full():
                return
            whole = table.in_order()
            if why := self._check(whole):
                raise why
            table.tell_all({"ranks": whole, "by": None})
        except Error as error:
            table.tell_all({"refused": told_of(error)})
        del self._others[among]

    # ---- the end ----

    def _hand_out(self, table: list[Words], own: Sequence[int], share: Share) -> Met:
        """Sends the table to the ranks of this world; their connections stay open."""
        guests = self._own.guests
        of_each = {rank: guest.take_descriptors() for rank, guest in guests.items()}
        try:
            ranks = self._meeting.ranks
            shared = share([of_each.get(rank, list(own)) for rank in ranks])
        except BaseException as error:
            for theirs in of_each.values():
                close_all(theirs)
            if isinstance(error, Error):
                raise could_not_meet(self._mine, error) from error
            raise
        words = json.dumps({"ranks": table, "by": self._mine["rank"]}).encode()
        until = max(self._meeting.until, time.monotonic() + GRACE)
        for connection in guests.values():
            with suppress(OSError):  # who has gone is found to have
                connection.send(words, shared, until)
        self._own.waiting.clear()
        end = self._meeting.until + GRACE
        return Met(table, OnConnections(self._mine, guests, table, end, keeps=True), shared)

    def _refuse_all(self, why: Words) -> None:
        refusal = {"refused": why}
        self._own.tell_all(refusal)
        if not self._is_called_off:
            self._refuse_late(refusal)

    def _refuse_late(self, refusal: Words) -> None:
        """Refuses ranks that come soon, too: they need not look for this one in vain."""
        until = min(self._meeting.until, time.monotonic() + FAREWELL)
        awaited = set(self._meeting.ranks) - self._came
        more = len(self._meeting.ranks) if self._foreign else 0  # another job's may come, too
        while len(awaited) + more > self._count_told_otherwise() and time.monotonic() < until:
            try:
                for words, connection in self._arrivals():
                    more -= words["rank"] not in awaited and more > 0
                    awaited.discard(words["rank"])  # one that tries again takes nobody's place
                    _tell(connection, refusal)
            except OSError:  # descriptors may be what this rank lacks
                self._own.tell_all(refusal)
                time.sleep(_PAUSE)

    def _count_told_otherwise(self) -> int:
        """Ranks, as far as is known: without the secret they only knock."""
        return self._turned_away + sum("secret" in lacks for _, lacks in self._strangers)

    def _end(self) -> None:
        for listener in self._listeners.values():
            listener.close()
        late = self._others.setdefault("late", Table(()))
        for visitor in self._visitors.values():
            if visitor.is_greeted:
                late.waiting.append(visitor.connection)
            else:  # it would take what it is told for a greeting
                visitor.connection.close()
        for table in self._others.values():
            table.tell_all({"closed": f"a world of {self._meeting.world()}"})

    # ---- what is said meanwhile ----

    def _tell_of_strangers(self) -> None:
        """Warns once of each stranger."""
        for whence, lacks in self._strangers[self._told : _MOST_WARNINGS]:
            self._meeting.warn(
                f"somebody {whence} has knocked {self._place} {lacks}: if it is a rank of this "
                f"job, look at its log; {self._who_is_missing()}"
            )
        self._told = len(self._strangers)

    def _who_is_missing(self) -> str:
        return (
            f"{len(self._own.words)} of {len(self._own.ranks)} ranks arrived {self._place}; "
            f"missing: {in_runs(self._own.missing())}{self._meeting.said_among()}"
        )

    def _missing(self) -> RendezvousError:
        unknown = dict.fromkeys(whence for whence, lacks in self._strangers if "secret" in lacks)
        places = ", ".join(list(unknown)[:_MOST_WARNINGS])
        strangers = f"; somebody {places} did not know the job's secret" if unknown else ""
        error = RendezvousError(f"{self._who_is_missing()}{strangers}")
        error.advice = _FIND
        error.values = {"missing": self._own.missing()}
        return error
