"""What ranks of several hosts tell each other first: everybody's words, for everybody.

Rank 0 listens at MASTER_ADDR and MASTER_PORT. Each other rank connects, both prove that they know
the job's secret, and then it hands in its words and gets those of all ranks. Under torchrun, which
holds that port, its own store carries the same words.
"""

from __future__ import annotations

import errno
import hmac
import importlib
import json
import os
import queue
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from farandole._core import AuthError, RendezvousError

Words = dict[str, Any]
Check = Callable[[list[Words]], str | None]  # of some ranks' words, or of all: the first's count

_MAGIC = b"farandole store 1"
_NONCE = 32
_PROOF = 32
_MOST = 1 << 20  # bytes of all words
_POLITE = 5.0  # seconds in which who connects says who it is
_GRACE = 4.0  # seconds that rank 0 may need after its deadline to say what is wrong
_RETRY = 0.05
FAREWELL = 5.0  # seconds in which a rank that cannot join tells the others why
_REMIND = 60.0  # seconds between two warnings that ranks are missing
_MOST_WARNINGS = 8  # of strangers
_LOOK = 0.1  # how often an interruption is looked for


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

    @property
    def place(self) -> str:
        return f"{self.address}:{self.port}"


class _Closed(OSError):
    """Whoever received there has met its own world, and receives no more; or receives nobody."""


def exchange(meeting: Meeting, mine: Words, check: Check) -> list[Words]:
    """Every rank's words, by rank. Rank 0 refuses all of them for what ``check`` says.

    Raises:
        RendezvousError: ranks are missing at the deadline, two are the same, or ``check`` refuses.
        AuthError: the other end does not know the secret.
    """
    reminder = _Reminder(meeting)
    while True:
        taken = None
        if meeting.rank == 0 or meeting.among:
            listeners, taken = _listen(meeting)
            if listeners:
                return _Reception(meeting, mine, check, listeners).receive_all()
        try:
            return _be_guest(meeting, mine)
        except OSError as error:  # who receives may come later
            why = _no_place(meeting, taken) if taken else _nobody_there(meeting, error)
            if time.monotonic() >= meeting.until:
                raise why from error
            reminder.warn_in_time(str(why))
        except (_Lost, AuthError) as error:
            if taken is not None:
                raise _no_place(meeting, taken) from error
            if isinstance(error, AuthError):
                raise
            raise RendezvousError(str(error)) from error
        time.sleep(_RETRY)


class _Reminder:
    """Says what a rank waits for, when it has waited for long, and now and then."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._since = time.monotonic()
        self._next = self._since + meeting.warn_after

    def warn_in_time(self, text: str) -> None:
        if (now := time.monotonic()) >= self._next:
            self._next = now + _REMIND
            self._meeting.warn(f"after {now - self._since:.0f} s {text}")


# ---- words on a connection ----


def _send(connection: socket.socket, words: Any) -> None:
    data = json.dumps(words).encode()
    connection.sendall(len(data).to_bytes(4, "little") + data)


def _take(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise ConnectionError("it hung up")
        data += more
    return data


def _hear(connection: socket.socket) -> Any:
    length = int.from_bytes(_take(connection, 4), "little")
    if length > _MOST:
        raise ConnectionError(f"it announced {length} bytes")
    return json.loads(_take(connection, length))


def _proof(meeting: Meeting, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(meeting.secret, _MAGIC + role + nonces, "sha256")


# ---- rank 0 ----


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

    def close(self, check: Check) -> list[Words]:
        """Raises RendezvousError for what ``check`` says."""
        table = [self.words[r] for r in range(self.size)]
        if why := check(table):
            raise RendezvousError(why)
        self.tell_all({"ranks": table})
        return table

    def tell_all(self, words: Words) -> None:
        for connection in self.guests:
            _tell(connection, words)


def _tell(connection: socket.socket, words: Words) -> None:
    """The last that is said there."""
    with suppress(OSError):
        _send(connection, words)
    connection.close()


class _Reception:
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
        self._others: dict[str, _Table] = {}
        self._heard: queue.Queue[tuple[Words, socket.socket]] = queue.Queue()
        self._knocked: queue.Queue[tuple[str, str]] = queue.Queue()  # from where, what they lacked
        self._strangers: list[tuple[str, str]] = []
        self._lock = threading.Lock()  # guards what follows
        self._over = False

    def receive_all(self) -> list[Words]:
        with ExitStack() as stack:
            selector = stack.enter_context(selectors.DefaultSelector())
            for listener in self._listeners:
                selector.register(stack.enter_context(listener), selectors.EVENT_READ)
            stack.callback(self._end)
            try:
                self._seat(self._mine)
                self._receive(selector)
                return self._own.close(self._check)
            except RendezvousError as error:
                self._own.tell_all({"refused": str(error)})
                self._refuse_late(selector, str(error))
                raise

    def _receive(self, selector: selectors.BaseSelector) -> None:
        reminder = _Reminder(self._meeting)
        while not self._own.is_full():
            if time.monotonic() >= self._meeting.until:
                raise self._missing()
            for words, connection in self._arrivals(selector):
                self._own.guests.append(connection)
                self._seat(words)
            self._tell_of_strangers()
            reminder.warn_in_time(self._who_is_missing())

    def _refuse_late(self, selector: selectors.BaseSelector, why: str) -> None:
        """Whoever comes soon is told, too, and does not look for this rank in vain."""
        until = min(self._meeting.until, time.monotonic() + FAREWELL)
        awaited = self._meeting.size - 1 - len(self._own.guests)
        while awaited > self._knocked.qsize() and time.monotonic() < until:
            for _, connection in self._arrivals(selector):
                awaited -= 1
                _tell(connection, {"refused": why})

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
        return f"a world of {_ranks(self._meeting.among)}"

    def _arrivals(self, selector: selectors.BaseSelector) -> Iterator[tuple[Words, socket.socket]]:
        """Those of this rank's world who have come by now."""
        for key, _ in selector.select(_LOOK):
            self._let_in(key.fileobj)
        with suppress(queue.Empty):
            while True:
                words, connection = self._heard.get_nowait()
                if words["among"] == self._meeting.among:
                    yield words, connection
                else:
                    self._seat_other(words, connection)

    def _seat(self, words: Words) -> None:
        """What is wrong with one rank is said before the others have come."""
        if why := self._check([self._mine] if words is self._mine else [self._mine, words]):
            raise RendezvousError(why)
        self._own.seat(words)

    def _seat_other(self, words: Words, connection: socket.socket) -> None:
        among: str = words["among"]
        table = self._others.setdefault(among, _Table(words["size"]))
        table.guests.append(connection)
        try:
            table.seat(words)
            if not table.is_full():
                return
            table.close(self._check)
        except RendezvousError as error:
            table.tell_all({"refused": str(error)})
        del self._others[among]

    def _let_in(self, listener: Any) -> None:
        with suppress(BlockingIOError, ConnectionError):
            connection, (address, *_) = listener.accept()
            threading.Thread(target=self._greet, args=(connection, address), daemon=True).start()

    def _greet(self, connection: socket.socket, address: str) -> None:
        meeting = self._meeting
        lacks = "without farandole's first words"
        try:
            connection.settimeout(_POLITE)
            theirs = _take(connection, len(_MAGIC) + _NONCE)
            if not theirs.startswith(_MAGIC):
                raise ConnectionError("it does not speak to a store")
            lacks = "without the job's secret"
            nonces = theirs[len(_MAGIC) :] + secrets.token_bytes(_NONCE)
            connection.sendall(nonces[_NONCE:] + _proof(meeting, b"server", nonces))
            if not hmac.compare_digest(
                _take(connection, _PROOF), _proof(meeting, b"client", nonces)
            ):
                raise ConnectionError("it does not know the secret")
            words = {"among": "", **_hear(connection)}
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
            f"missing: {', '.join(map(str, missing))}{_among(self._meeting)}"
        )

    def _missing(self) -> RendezvousError:
        unknown = sum("secret" in lacks for _, lacks in self._strangers)
        strangers = f"; {unknown} connections did not know the job's secret" if unknown else ""
        return RendezvousError(self._who_is_missing() + strangers)


def _among(meeting: Meeting) -> str:
    return f" of a world of {_ranks(meeting.among)}" if meeting.among else ""


def _no_place(meeting: Meeting, error: OSError) -> RendezvousError:
    return RendezvousError(
        f"rank 0 cannot listen at {meeting.place}: {error.strerror}; "
        "MASTER_ADDR is an address of rank 0's host, and MASTER_PORT a free port there"
    )


def _listen(meeting: Meeting) -> tuple[list[socket.socket], OSError | None]:
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
            raise _no_place(meeting, error) from error
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


# ---- the others ----


class _Lost(Exception):
    """Who received stopped in the middle of it, or is none of ours."""


def _be_guest(meeting: Meeting, mine: Words) -> list[Words]:
    """Raises OSError where nobody receives."""
    with _connect(meeting) as connection:
        try:
            _prove(meeting, connection)
            connection.settimeout(max(_POLITE, meeting.until - time.monotonic() + _GRACE))
            _send(connection, mine | {"among": meeting.among})
            answer = _hear(connection)
        except ConnectionResetError as error:
            raise _Closed(error.errno, str(error)) from error
        except _Closed:
            raise
        except (OSError, ValueError) as error:
            whom = "the others" if meeting.among else "rank 0"
            raise _Lost(
                f"rank {meeting.rank}{_among(meeting)} lost {whom} at {meeting.place}: {error}; "
                "look at their logs"
            ) from error
    if "closed" in answer:
        raise _Closed(errno.ECONNREFUSED, f"there was {answer['closed']}")
    if "refused" in answer:
        raise RendezvousError(answer["refused"])
    table: list[Words] = answer["ranks"]
    return table


def _connect(meeting: Meeting) -> socket.socket:
    """Raises OSError where nobody listens.

    Then the kernel may give that very port to whoever connects, who so connects to himself; and
    nobody else can listen there meanwhile.
    """
    connection = socket.create_connection((meeting.address, meeting.port), timeout=_POLITE)
    if connection.getsockname() != connection.getpeername():
        return connection
    at_once = struct.pack("ii", 1, 0)  # the port is free again
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
    connection.close()
    raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))


def _ranks(among: str) -> str:
    return f"ranks {among.partition(':')[0]}" if among else "all ranks"


def _prove(meeting: Meeting, connection: socket.socket) -> None:
    mine = secrets.token_bytes(_NONCE)
    connection.sendall(_MAGIC + mine)
    try:
        theirs = _take(connection, _NONCE + _PROOF)
    except TimeoutError as error:
        raise _Closed(errno.ETIMEDOUT, "who listens there says nothing") from error
    nonces = mine + theirs[:_NONCE]
    if not hmac.compare_digest(theirs[_NONCE:], _proof(meeting, b"server", nonces)):
        raise AuthError(
            f"who listens at {meeting.address}:{meeting.port} does not know the secret of rank "
            f"{meeting.rank}'s job; give every rank the same FARANDOLE_SECRET_FILE, and every job "
            "a port of its own"
        )
    connection.sendall(_proof(meeting, b"client", nonces))


def _nobody_there(meeting: Meeting, error: OSError) -> RendezvousError:
    who = f"rank {meeting.rank}{_among(meeting)}"
    why = error.strerror or error
    if meeting.among:
        return RendezvousError(
            f"{who} found none of the others at {meeting.place}: {why}; start one of these ranks "
            "on the host of MASTER_ADDR, or start them by torchrun"
        )
    whom = "rank 0" if meeting.rank else "the others"
    return RendezvousError(
        f"{who} does not reach {whom} at {meeting.place}: {why}; check MASTER_ADDR and "
        "MASTER_PORT, and look at rank 0's log"
    )


# ---- a store that is there already ----


class KeyValueStore(Protocol):
    """What we need of a store of torch.distributed's. ``get`` waits for the key."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...


def exchange_in(
    store: KeyValueStore, name: str, meeting: Meeting, mine: Words, check: Check
) -> list[Words]:
    """The same as ``exchange`` in a store; ``name`` is this meeting's there.

    Raises:
        RendezvousError: ranks are missing when the store's patience ends, or ``check`` refuses.
    """
    rank = meeting.rank
    try:
        store.set(f"{name}/{rank}", json.dumps(mine))
        if rank == 0:
            table = _gather_in(store, name, meeting)
            store.set(name, json.dumps({"refused": check(table), "ranks": table}))
        answer = json.loads(store.get(name))
    except (RuntimeError, OSError) as error:  # torch's DistStoreError is the former
        raise RendezvousError(
            f"rank {rank} did not meet all others in torch.distributed's store: {error}"
        ) from error
    if answer["refused"]:
        raise RendezvousError(answer["refused"])
    ranks: list[Words] = answer["ranks"]
    return ranks


def _gather_in(store: KeyValueStore, name: str, meeting: Meeting) -> list[Words]:
    """A store says nothing while it waits for a key; a thread does."""
    table: list[Words] = []
    done = threading.Event()

    def remind() -> None:
        reminder = _Reminder(meeting)
        while not done.wait(_LOOK):
            reminder.warn_in_time(f"rank {len(table)} has not come to torch.distributed's store")

    threading.Thread(target=remind, daemon=True).start()
    try:
        while len(table) < meeting.size:
            table.append(json.loads(store.get(f"{name}/{len(table)}")))
    finally:
        done.set()
    return table


def fail_in(store: KeyValueStore, name: str, mine: Words, why: str) -> None:
    """Instead of meeting there: the others learn why this rank does not.

    Raises:
        RuntimeError: the store is gone.
    """
    store.set(f"{name}/{mine['rank']}", json.dumps(mine))
    if mine["rank"] == 0:
        store.set(name, json.dumps({"refused": why, "ranks": []}))


def torchruns(address: str, port: int, until: float) -> KeyValueStore | None:
    """The store that torchrun keeps at MASTER_PORT; None where no torchrun does."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    distributed = importlib.import_module("torch.distributed")  # torchrun's own package
    left = timedelta(seconds=max(1.0, until - time.monotonic()))
    store: KeyValueStore = distributed.TCPStore(address, port, is_master=False, timeout=left)
    return store
