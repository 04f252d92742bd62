"""What ranks of several hosts tell each other first: everybody's words, for everybody.

Rank 0 listens at MASTER_ADDR and MASTER_PORT. Each other rank connects, both prove that they know
the job's secret, and then it hands in its words and gets those of all ranks. Under torchrun, which
holds that port, its own store carries the same words.
"""

from __future__ import annotations

import hmac
import importlib
import json
import os
import queue
import secrets
import selectors
import socket
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


def exchange(meeting: Meeting, mine: Words, check: Check) -> list[Words]:
    """Every rank's words, by rank. Rank 0 refuses all of them for what ``check`` says.

    Raises:
        RendezvousError: ranks are missing at the deadline, two are the same, or ``check`` refuses.
        AuthError: the other end does not know the secret.
    """
    if meeting.rank == 0:
        return _Reception(meeting, mine, check).receive_all()
    return _be_guest(meeting, mine)


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


class _Reception:
    """One thread for each who connects: who is silent holds nobody up."""

    def __init__(self, meeting: Meeting, mine: Words, check: Check) -> None:
        self._meeting = meeting
        self._check = check
        self._words: dict[int, Words] = {0: mine}
        self._guests: dict[int, socket.socket] = {}
        self._heard: queue.Queue[tuple[Words, socket.socket]] = queue.Queue()
        self._strangers = 0

    def receive_all(self) -> list[Words]:
        meeting = self._meeting
        with _listener(meeting) as listener, selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            try:
                while len(self._words) < meeting.size:
                    if time.monotonic() >= meeting.until:
                        raise self._missing()
                    if selector.select(_LOOK):
                        self._let_in(listener)
                    with suppress(queue.Empty):
                        while True:
                            self._seat(*self._heard.get_nowait())
                table = [self._words[r] for r in range(meeting.size)]
                if why := self._check(table):
                    raise RendezvousError(why)
            except RendezvousError as error:
                self._tell_all({"refused": str(error)})
                raise
            self._tell_all({"ranks": table})
        return table

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
            self._heard.put((_hear(connection), connection))
        except (OSError, ValueError):
            self._strangers += 1
            connection.close()

    def _seat(self, words: Words, connection: socket.socket) -> None:
        rank: int = words["rank"]
        if not 0 <= rank < self._meeting.size:
            self._guests[-1 - len(self._guests)] = connection
            raise RendezvousError(
                f"rank {rank} (pid {words.get('pid')}) does not exist in a world of "
                f"{self._meeting.size}"
            )
        if rank in self._words:
            self._guests[-1 - len(self._guests)] = connection
            first, second = self._words[rank], words
            raise RendezvousError(
                f"two processes are rank {rank}: pid {first['pid']} on {first['host']} and pid "
                f"{second.get('pid')} on {second.get('host')}"
            )
        self._words[rank] = words
        self._guests[rank] = connection

    def _missing(self) -> RendezvousError:
        missing = [r for r in range(self._meeting.size) if r not in self._words]
        strangers = (
            f"; {self._strangers} connections did not know the job's secret"
            if self._strangers
            else ""
        )
        return RendezvousError(
            f"{len(self._words)} of {self._meeting.size} ranks arrived at "
            f"{self._meeting.address}:{self._meeting.port}; missing: "
            f"{', '.join(map(str, missing))}{strangers}"
        )

    def _tell_all(self, words: Words) -> None:
        for connection in self._guests.values():
            with suppress(OSError):
                _send(connection, words)
            connection.close()


def _listener(meeting: Meeting) -> socket.socket:
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
        raise RendezvousError(
            f"rank 0 cannot listen at {meeting.address}:{meeting.port}: {error.strerror}; "
            "MASTER_ADDR is an address of rank 0's host, and MASTER_PORT a free port there"
        ) from error
    return listener


# ---- the others ----


def _be_guest(meeting: Meeting, mine: Words) -> list[Words]:
    with _dial(meeting) as connection:
        try:
            connection.settimeout(max(_POLITE, meeting.until - time.monotonic() + _GRACE))
            _prove(meeting, connection)
            _send(connection, mine)
            answer = _hear(connection)
        except (OSError, ValueError) as error:
            raise RendezvousError(
                f"rank {meeting.rank} lost rank 0 at {meeting.address}:{meeting.port}: {error}; "
                "look at rank 0's log"
            ) from error
    if "refused" in answer:
        raise RendezvousError(answer["refused"])
    table: list[Words] = answer["ranks"]
    return table


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


def _dial(meeting: Meeting) -> socket.socket:
    """Rank 0 may come later."""
    while True:
        try:
            return socket.create_connection((meeting.address, meeting.port), timeout=_POLITE)
        except OSError as error:
            if time.monotonic() >= meeting.until:
                raise RendezvousError(
                    f"rank {meeting.rank} does not reach rank 0 at {meeting.address}:"
                    f"{meeting.port}: {error.strerror or error}; check MASTER_ADDR and "
                    "MASTER_PORT, and look at rank 0's log"
                ) from error
        time.sleep(_RETRY)


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
