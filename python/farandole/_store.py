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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from farandole._core import AuthError, RendezvousError

Words = dict[str, Any]
Check = Callable[[list[Words]], str | None]

_MAGIC = b"farandole store 1"
_NONCE = 32
_PROOF = 32
_MOST = 1 << 20  # bytes of all words
_POLITE = 5.0  # seconds in which who connects says who it is
_GRACE = 4.0  # seconds that rank 0 may need after its deadline to say what is wrong
_RETRY = 0.05
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

    @property
    def place(self) -> str:
        return f"{self.address}:{self.port}"


class _Closed(OSError):
    """Whoever received there has met its own world, and receives no more."""


def exchange(meeting: Meeting, mine: Words, check: Check) -> list[Words]:
    """Every rank's words, by rank. Rank 0 refuses all of them for what ``check`` says.

    Raises:
        RendezvousError: ranks are missing at the deadline, two are the same, or ``check`` refuses.
        AuthError: the other end does not know the secret.
    """
    while True:
        taken = None
        if meeting.rank == 0 or meeting.among:
            listener, taken = _listen(meeting)
            if listener is not None:
                return _Reception(meeting, mine, check, listener).receive_all()
        try:
            return _be_guest(meeting, mine)
        except OSError as error:  # who receives may come later
            if time.monotonic() >= meeting.until:
                raise _nobody_there(meeting, error) from error
        except (_Lost, AuthError) as error:
            if taken is not None:
                raise _no_place(meeting, taken) from error
            if isinstance(error, AuthError):
                raise
            raise RendezvousError(str(error)) from error
        time.sleep(_RETRY)


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

    def seat(self, words: Words, connection: socket.socket | None) -> None:
        if connection is not None:
            self.guests.append(connection)
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
            with suppress(OSError):
                _send(connection, words)
            connection.close()


class _Reception:
    """Receives the ranks of this rank's world, and meanwhile those of others of the job. One thread
    for each who connects: who is silent holds nobody up."""

    def __init__(
        self, meeting: Meeting, mine: Words, check: Check, listener: socket.socket
    ) -> None:
        self._meeting = meeting
        self._check = check
        self._listener = listener
        self._own = _Table(meeting.size)
        self._own.seat(mine, None)
        self._others: dict[str, _Table] = {}
        self._heard: queue.Queue[tuple[Words, socket.socket]] = queue.Queue()
        self._strangers = 0
        self._lock = threading.Lock()  # guards what follows
        self._over = False

    def receive_all(self) -> list[Words]:
        meeting, own = self._meeting, self._own
        try:
            with self._listener as listener, selectors.DefaultSelector() as selector:
                selector.register(listener, selectors.EVENT_READ)
                while not own.is_full():
                    if time.monotonic() >= meeting.until:
                        raise self._missing()
                    if selector.select(_LOOK):
                        self._let_in(listener)
                    self._seat_all()
                return own.close(self._check)
        except RendezvousError as error:
            own.tell_all({"refused": str(error)})
            raise
        finally:
            self._end()

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

    def _seat_all(self) -> None:
        with suppress(queue.Empty):
            while True:
                words, connection = self._heard.get_nowait()
                if words["among"] == self._meeting.among:
                    self._own.seat(words, connection)
                else:
                    self._seat_other(words, connection)

    def _seat_other(self, words: Words, connection: socket.socket) -> None:
        among: str = words["among"]
        table = self._others.setdefault(among, _Table(words["size"]))
        try:
            table.seat(words, connection)
            if not table.is_full():
                return
            table.close(self._check)
        except RendezvousError as error:
            table.tell_all({"refused": str(error)})
        del self._others[among]

    def _let_in(self, listener: socket.socket) -> None:
        with suppress(BlockingIOError, ConnectionError):
            connection, _ = listener.accept()
            threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        meeting = self._meeting
        try:
            connection.settimeout(_POLITE)
            theirs = _take(connection, len(_MAGIC) + _NONCE)
            if not theirs.startswith(_MAGIC):
                raise ConnectionError("it does not speak to a store")
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
            _send(connection, {"closed": self._whose()})
            connection.close()
        except (OSError, ValueError):
            self._strangers += 1
            connection.close()

    def _missing(self) -> RendezvousError:
        missing = [r for r in range(self._meeting.size) if r not in self._own.words]
        strangers = (
            f"; {self._strangers} connections did not know the job's secret"
            if self._strangers
            else ""
        )
        return RendezvousError(
            f"{len(self._own.words)} of {self._own.size} ranks arrived at {self._meeting.place}; "
            f"missing: {', '.join(map(str, missing))}{_among(self._meeting)}{strangers}"
        )


def _among(meeting: Meeting) -> str:
    return f" of a world of {_ranks(meeting.among)}" if meeting.among else ""


def _no_place(meeting: Meeting, error: OSError) -> RendezvousError:
    return RendezvousError(
        f"rank 0 cannot listen at {meeting.place}: {error.strerror}; "
        "MASTER_ADDR is an address of rank 0's host, and MASTER_PORT a free port there"
    )


def _listen(meeting: Meeting) -> tuple[socket.socket | None, OSError | None]:
    """Or why not: it is in use; of a world of some ranks it may also be on another host.

    Raises:
        RendezvousError: rank 0 has no such place.
    """
    listener = None
    try:
        family, _, _, _, where = socket.getaddrinfo(
            meeting.address, meeting.port, type=socket.SOCK_STREAM
        )[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(1024)
        listener.setblocking(False)
    except OSError as error:
        if listener is not None:
            listener.close()
        if meeting.among:
            return None, None
        if error.errno != errno.EADDRINUSE:
            raise _no_place(meeting, error) from error
        return None, error
    return listener, None


# ---- the others ----


class _Lost(Exception):
    """Who received stopped in the middle of it, or is none of ours."""


def _be_guest(meeting: Meeting, mine: Words) -> list[Words]:
    """Raises OSError where nobody receives."""
    with _connect(meeting) as connection:
        try:
            connection.settimeout(max(_POLITE, meeting.until - time.monotonic() + _GRACE))
            _prove(meeting, connection)
            _send(connection, mine | {"among": meeting.among})
            answer = _hear(connection)
        except ConnectionResetError as error:
            raise _Closed(error.errno, str(error)) from error
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
    theirs = _take(connection, _NONCE + _PROOF)
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


def exchange_in(store: KeyValueStore, name: str, mine: Words, check: Check) -> list[Words]:
    """The same as ``exchange`` in a store; ``name`` is this meeting's there.

    Raises:
        RendezvousError: ranks are missing when the store's patience ends, or ``check`` refuses.
    """
    rank, size = mine["rank"], mine["size"]
    try:
        store.set(f"{name}/{rank}", json.dumps(mine))
        if rank == 0:
            table = [json.loads(store.get(f"{name}/{r}")) for r in range(size)]
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


def torchruns(address: str, port: int, until: float) -> KeyValueStore | None:
    """The store that torchrun keeps at MASTER_PORT; None where no torchrun does."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    distributed = importlib.import_module("torch.distributed")  # torchrun's own package
    left = timedelta(seconds=max(1.0, until - time.monotonic()))
    store: KeyValueStore = distributed.TCPStore(address, port, is_master=False, timeout=left)
    return store
