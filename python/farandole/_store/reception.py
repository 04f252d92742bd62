"""Rank 0 receives the others."""

from __future__ import annotations

import errno
import hmac
import queue
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

from farandole._core import Error, RendezvousError
from farandole._store.line import Keeper
from farandole._store.meeting import (
    FAREWELL,
    GRACE,
    Check,
    Meeting,
    Met,
    Reminder,
    Words,
    name_of,
    ranks_of,
    refusal,
    said_among,
)
from farandole._store.talk import (
    LOOK,
    MAGIC,
    NONCE,
    POLITE,
    PROOF,
    has_hung_up,
    hear,
    proof,
    send,
    take,
)

_MOST_WARNINGS = 8  # of strangers


class _Table:
    """The words that have come for one world, and the connections that wait for the others'."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.words: dict[int, Words] = {}
        self.guests: list[socket.socket] = []

    def is_full(self) -> bool:
        return len(self.words) == self.size

    def seat(self, words: Words) -> None:
        rank: int = words["rank"]
        if not 0 <= rank < self.size:
            raise RendezvousError(
                f"rank {rank} (pid {words.get('pid')}) does not exist in a world of {self.size}"
            )
        first, second = self.words.get(rank, words), words
        if (first["pid"], first["host"]) != (second.get("pid"), second.get("host")):
            raise RendezvousError(
                f"two processes are rank {rank}: pid {first['pid']} on {first['host']} and pid "
                f"{second.get('pid')} on {second.get('host')}"
            )
        self.words[rank] = words

    def checked(self, check: Check) -> list[Words]:
        """Raises what ``check`` says."""
        table = [self.words[r] for r in range(self.size)]
        if why := check(table):
            raise why
        return table

    def tell_all(self, words: Words) -> None:
        for connection in self.guests:
            _tell(connection, words)


def _checked(words: Any) -> Words:
    """Raises ValueError for what no rank says."""
    kinds = {"rank": int, "size": int, "pid": int, "host": str, "among": str}
    if isinstance(words, dict):
        whole: Words = {"among": "", **words}
        if all(isinstance(whole.get(name), kind) for name, kind in kinds.items()):
            return whole
    raise ValueError("no words of a rank")


def _tell(connection: socket.socket, words: Words) -> None:
    """The last that is said there."""
    with suppress(OSError):
        send(connection, words)
    connection.close()


class Reception:
    """Receives the ranks of this rank's world, and meanwhile those of others of the job. One thread
    for each who connects: who is silent holds nobody up."""

    def __init__(
        self, meeting: Meeting, mine: Words, check: Check, listeners: list[socket.socket]
    ) -> None:
        self._meeting = meeting
        self._mine = mine
        self._check = check
        self._listeners = listeners
        self._own = _Table(meeting.size)
        self._seated: dict[int, socket.socket] = {}
        self._came: set[int] = set()  # seated or refused
        self._foreign = False  # some of those are not of this world: there are more ranks than its
        self._others: dict[str, _Table] = {}
        self._heard: queue.Queue[tuple[Words, socket.socket]] = queue.Queue()
        self._knocked: queue.Queue[tuple[str, str]] = queue.Queue()  # from where, what they lacked
        self._strangers: list[tuple[str, str]] = []
        self._is_called_off = False  # by who has told all ranks: nobody comes late
        self._lock = threading.Lock()  # guards what follows
        self._over = False

    def receive_all(self) -> Met:
        with ExitStack() as stack:
            selector = stack.enter_context(selectors.DefaultSelector())
            for listener in self._listeners:
                selector.register(stack.enter_context(listener), selectors.EVENT_READ)
            stack.callback(self._end)
            try:
                self._seat(self._mine)
                self._receive(selector)
                table = self._own.checked(self._check)
                return Met(table, self._line(table))
            except Error as error:
                self._own.tell_all(refusal(error))
                if not self._is_called_off:
                    self._refuse_late(selector, error)
                raise

    def _receive(self, selector: selectors.BaseSelector) -> None:
        reminder = Reminder(self._meeting)
        while not self._own.is_full():
            if time.monotonic() >= self._meeting.until:
                raise self._missing()
            self._look()
            for words, connection in self._arrivals(selector):
                self._own.guests.append(connection)
                self._seat(words)
                self._seated[words["rank"]] = connection
            self._tell_of_strangers()
            reminder.warn_in_time(self._who_is_missing())

    def _look(self) -> None:
        try:
            self._meeting.look()
        except Error:
            self._is_called_off = True
            raise

    def _line(self, table: list[Words]) -> Keeper:
        """Those of this world get the table, and stay."""
        for connection in self._seated.values():
            with suppress(OSError):  # who has gone is found to have
                send(connection, {"ranks": table, "by": self._mine["rank"]})
        names = {words["rank"]: name_of(words) for words in table}
        return Keeper(names[self._mine["rank"]], self._seated, names, self._meeting.until + GRACE)

    def _refuse_late(self, selector: selectors.BaseSelector, why: Error) -> None:
        """Whoever comes soon is told, too, and does not look for this rank in vain."""
        until = min(self._meeting.until, time.monotonic() + FAREWELL)
        awaited = self._meeting.size - len(self._came)
        if self._foreign:  # another job's may come, too
            awaited += self._meeting.size
        while awaited > self._knocked.qsize() and time.monotonic() < until:
            for _, connection in self._arrivals(selector):
                awaited -= 1
                _tell(connection, refusal(why))

    def _end(self) -> None:
        with self._lock:
            self._over = True
        late = self._others.setdefault("late", _Table(0))
        with suppress(queue.Empty):
            while True:
                late.guests.append(self._heard.get_nowait()[1])
        for table in self._others.values():
            table.tell_all({"closed": self._whose()})

    def _whose(self) -> str:
        return f"a world of {ranks_of(self._meeting.among)}"

    def _arrivals(self, selector: selectors.BaseSelector) -> Iterator[tuple[Words, socket.socket]]:
        """Those of this rank's world who have come by now."""
        for key, _ in selector.select(LOOK):
            self._let_in(key.fileobj)
        with suppress(queue.Empty):
            while True:
                words, connection = self._heard.get_nowait()
                if words["among"] == self._meeting.among:
                    yield words, connection
                else:
                    self._seat_other(words, connection)

    def _seat(self, words: Words) -> None:
        """What is wrong with one rank is said before the others have come. One that has ended
        leaves its place to whoever is started in its stead."""
        rank: int = words["rank"]
        before = self._seated.get(rank)
        if before is not None and has_hung_up(before):
            del self._own.words[rank]
            self._own.guests.remove(before)
            before.close()
            self._came.remove(rank)
        self._foreign |= rank in self._came or not 0 <= rank < self._own.size
        self._came.add(rank)
        if why := self._check([self._mine] if words is self._mine else [self._mine, words]):
            raise why
        self._own.seat(words)

    def _seat_other(self, words: Words, connection: socket.socket) -> None:
        among: str = words["among"]
        table = self._others.setdefault(among, _Table(words["size"]))
        table.guests.append(connection)
        try:
            table.seat(words)
            if not table.is_full():
                return
            table.tell_all({"ranks": table.checked(self._check), "by": None})
        except Error as error:
            table.tell_all(refusal(error))
        del self._others[among]

    def _let_in(self, listener: Any) -> None:
        with suppress(BlockingIOError, ConnectionError):
            connection, (address, *_) = listener.accept()
            threading.Thread(target=self._greet, args=(connection, address), daemon=True).start()

    def _greet(self, connection: socket.socket, address: str) -> None:
        meeting = self._meeting
        lacks = "without farandole's first words"
        try:
            until = time.monotonic() + POLITE
            connection.settimeout(POLITE)
            theirs = take(connection, len(MAGIC) + NONCE, until)
            if not theirs.startswith(MAGIC):
                raise ConnectionError("it does not speak to a store")
            lacks = "without the job's secret"
            nonces = theirs[len(MAGIC) :] + secrets.token_bytes(NONCE)
            connection.sendall(nonces[NONCE:] + proof(meeting.secret, b"server", nonces))
            if not hmac.compare_digest(
                take(connection, PROOF, until), proof(meeting.secret, b"client", nonces)
            ):
                raise ConnectionError("it does not know the secret")
            lacks = "without a rank's words"
            words = _checked(hear(connection, until))
            with self._lock:
                if not self._over:
                    self._heard.put((words, connection))
                    return
            _tell(connection, {"closed": self._whose()})
        except (OSError, ValueError):
            self._knocked.put((address, lacks))
            connection.close()

    def _tell_of_strangers(self) -> None:
        """Once of each."""
        with suppress(queue.Empty):
            while True:
                stranger = self._knocked.get_nowait()
                if stranger not in self._strangers[:_MOST_WARNINGS]:
                    address, lacks = stranger
                    self._meeting.warn(
                        f"somebody at {address} has knocked at {self._meeting.place} {lacks}: if "
                        f"it is a rank of this job, look at its log; {self._who_is_missing()}"
                    )
                self._strangers.append(stranger)

    def _who_is_missing(self) -> str:
        missing = [r for r in range(self._meeting.size) if r not in self._own.words]
        return (
            f"{len(self._own.words)} of {self._own.size} ranks arrived at {self._meeting.place}; "
            f"missing: {', '.join(map(str, missing))}{said_among(self._meeting)}"
        )

    def _missing(self) -> RendezvousError:
        unknown = dict.fromkeys(address for address, lacks in self._strangers if "secret" in lacks)
        places = ", ".join(list(unknown)[:_MOST_WARNINGS])
        strangers = f"; who came from {places} did not know the job's secret" if unknown else ""
        return RendezvousError(self._who_is_missing() + strangers)


def no_place(meeting: Meeting, error: OSError) -> RendezvousError:
    return RendezvousError(
        f"rank 0 cannot listen at {meeting.place}: {error.strerror}; "
        "MASTER_ADDR is an address of rank 0's host, and MASTER_PORT a free port there"
    )


def listen(meeting: Meeting) -> tuple[list[socket.socket], OSError | None]:
    """Or why not: it is in use; of a world of some ranks it may also be on another host.

    Raises:
        RendezvousError: rank 0 has no such place.
    """
    listeners: list[socket.socket] = []
    try:
        for family, where in _places(meeting):
            _listen_too(listeners, family, where)
    except OSError as error:
        for listener in listeners:
            listener.close()
        if meeting.among:
            return [], None
        if error.errno != errno.EADDRINUSE:
            raise no_place(meeting, error) from error
        return [], error
    return listeners, None


def _places(meeting: Meeting) -> list[tuple[int, Any]]:
    """Raises OSError where an address is none."""
    found = [
        socket.getaddrinfo(address, meeting.port, type=socket.SOCK_STREAM)[0]
        for address in meeting.at or [meeting.address]
    ]
    return [(family, where) for family, _, _, _, where in found]


def _listen_too(listeners: list[socket.socket], family: int, where: Any) -> None:
    """Raises OSError where another process has the port, or where the first place cannot be had;
    a further one may be tentative, say."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(1024)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if not listeners or error.errno == errno.EADDRINUSE:
            raise
    else:
        listeners.append(listener)
