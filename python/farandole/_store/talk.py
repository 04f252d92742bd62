"""Words on a connection, and the proofs before them."""

from __future__ import annotations

import hmac
import json
import select
import socket
import time
from typing import Any

POLITE = 5.0  # seconds in which who connects says who it is
LOOK = 0.1  # seconds; how often an interruption is looked for
MAGIC = b"farandole store 1"
NONCE = 32
PROOF = 32
_MOST = 1 << 25  # bytes of all words; of each rank some 1000


def send(connection: socket.socket, words: Any) -> None:
    data = json.dumps(words).encode()
    connection.sendall(len(data).to_bytes(4, "little") + data)


def take(connection: socket.socket, count: int, until: float | None = None) -> bytes:
    """In all by ``until``, else within the connection's timeout, however little comes at a time."""
    before = connection.gettimeout()
    until = _end_of(connection) if until is None else until
    data = b""
    while len(data) < count:
        if until is not None:
            if (left := until - time.monotonic()) <= 0:
                raise TimeoutError("timed out")
            connection.settimeout(left)
        more = connection.recv(count - len(data))
        connection.settimeout(before)
        if not more:
            raise ConnectionError("it hung up")
        data += more
    return data


def hear(connection: socket.socket, until: float | None = None) -> Any:
    until = _end_of(connection) if until is None else until
    length = int.from_bytes(take(connection, 4, until), "little")
    if length > _MOST:
        raise ConnectionError(f"it announced {length} bytes")
    return json.loads(take(connection, length, until))


def _end_of(connection: socket.socket) -> float | None:
    timeout = connection.gettimeout()
    return None if timeout is None else time.monotonic() + timeout


def has_hung_up(connection: socket.socket) -> bool:
    """Its other end has closed it, or has ended, and all it had said was heard."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    try:
        return bool(poll.poll(0)) and not connection.recv(1, socket.MSG_PEEK)
    except OSError:
        return True


def proof(secret: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, MAGIC + role + nonces, "sha256")
