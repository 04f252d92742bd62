"""Words on a connection, and descriptors with them where both ends are on one host.

What is sent is a frame: how many bytes and how many descriptors come, the descriptors, the words
and their seal: HMAC-SHA256 of the frame and of how many were sent before it, by a key that follows
from the secret and from what both ends have said at random, for each direction another one. So
words that somebody on the way changes, repeats, leaves out or makes up are an error.
"""

from __future__ import annotations

import array
import errno
import hmac
import json
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

from farandole import _json

POLITE = 5.0  # seconds in which who connects says who it is
LOOK = 0.1  # seconds; how often an interruption is looked for
MAGIC = b"farandole meets 3"
NONCE = 32
PROOF = 32
HEAD = struct.Struct("<II")
_SEAL = 32
_MOST = 1 << 25  # bytes of all words; of each rank some 1000
_AT_ONCE = 253  # descriptors, as the kernel takes them, with one byte each time
_INT = array.array("i").itemsize
_PAUSE = 0.001  # seconds


class Changed(ValueError):
    """Words are not as the other end has sent them."""


class _Seals:
    """The seals of one direction, at one of its ends."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def next(self, frame: bytes) -> bytes:
        numbered = self._count.to_bytes(8, "little") + frame
        self._count += 1
        return hmac.digest(self._key, numbered, "sha256")


class Connection:
    """A connection. One deadline bounds a whole message, however little comes at a time."""

    def __init__(self, its: socket.socket) -> None:
        self._socket = its
        self._takes_descriptors = its.family == socket.AF_UNIX
        self._descriptors: list[int] = []  # that have come
        self._sends = self._hears = _Seals(b"")
        its.setblocking(False)

    def seal(self, secret: bytes, sends: bytes, hears: bytes, nonces: bytes) -> None:
        """Seals all that follows: both ends have proved themselves. `sends`, `hears`: roles."""
        self._sends = _Seals(proof(secret, b"seals of the " + sends, nonces))
        self._hears = _Seals(proof(secret, b"seals of the " + hears, nonces))

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()
        close_all(self.take_descriptors())

    def take_descriptors(self) -> list[int]:
        """The descriptors that have come with words. The caller owns them."""
        taken, self._descriptors = self._descriptors, []
        return taken

    def address(self) -> str:
        """The other end's address, as this host sees it; empty for a process of this host."""
        if self._socket.family == socket.AF_UNIX:
            return ""
        return str(self._socket.getpeername()[0])

    def is_of_this_user(self) -> bool:
        return self._peer()[1] == os.geteuid()

    def process(self) -> int:
        """The process that listens at the other end, or opened it."""
        return self._peer()[0]

    def _peer(self) -> tuple[int, int, int]:
        size = struct.calcsize("iii")
        their = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        pid, user, group = struct.unpack("iii", their)
        return pid, user, group

    def has_come(self, seconds: float) -> bool:
        """Whether something is there to be taken, be it the end."""
        return bool(_ready(self._socket, select.POLLIN, seconds))

    def has_hung_up(self) -> bool:
        """Whether the other end has closed it or ended, and all that it sent was read."""
        try:
            return self.has_come(0) and not self._socket.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def send(self, words: Any, descriptors: Sequence[int] = (), until: float | None = None) -> None:
        """`words`: an object; or its JSON, made once for many connections."""
        until = time.monotonic() + POLITE if until is None else until
        data = words if isinstance(words, bytes) else json.dumps(words).encode()
        head = HEAD.pack(len(data) + _SEAL, len(descriptors))
        data += self._sends.next(head + data)
        if descriptors:
            self.send_bytes(head, until)
            for begin in range(0, len(descriptors), _AT_ONCE):
                self._give(descriptors[begin : begin + _AT_ONCE], until)
            head = b""
        self.send_bytes(head + data, until)  # together: who reads waits for the rest

    def send_bytes(self, data: bytes, until: float) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[self._socket.send(view, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                self._wait(select.POLLOUT, until)

    def _give(self, descriptors: Sequence[int], until: float) -> None:
        """Sends descriptors; waits while too many are on their way (ETOOMANYREFS), too."""
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
        while True:
            try:
                self._socket.sendmsg([b"\0"], [rights], socket.MSG_NOSIGNAL)
                return
            except BlockingIOError:
                self._wait(select.POLLOUT, until)
            except OSError as error:
                if error.errno != errno.ETOOMANYREFS or time.monotonic() >= until:
                    raise
                time.sleep(_PAUSE)

    def hear(self, until: float) -> Any:
        head = self.take(HEAD.size, until)
        return self.words(head, self.take(sum(self.sizes(head)), until))

    def words(self, head: bytes, rest: bytes) -> Any:
        return _json.read(self.opened(head, rest))

    def opened(self, head: bytes, rest: bytes) -> bytes:
        """The words of the next frame. Raises Changed."""
        words, seal = rest[self.sizes(head)[1] : -_SEAL], rest[-_SEAL:]
        if not hmac.compare_digest(self._hears.next(head + words), seal):
            raise Changed("somebody on the way has changed what was said")
        return words

    def sizes(self, head: bytes) -> tuple[int, int]:
        """How many bytes of words come, and how many bytes that carry descriptors."""
        size, descriptors = HEAD.unpack(head)
        if not _SEAL <= size <= _MOST:
            raise ConnectionError(f"it announced {size} bytes")
        if descriptors and not self._takes_descriptors:
            raise ConnectionError(f"it announced {descriptors} descriptors")
        return size, -(-descriptors // _AT_ONCE)

    def take(self, count: int, until: float) -> bytes:
        data = b""
        while len(data) < count:
            data += self.take_some(count - len(data), until)
        return data

    def take_some(self, most: int, until: float) -> bytes:
        while (data := self.receive(most)) is None:
            self._wait(select.POLLIN, until)
        return data

    def receive(self, most: int) -> bytes | None:
        """The bytes that are there; None: nothing yet."""
        try:
            data = self._receive(most)
        except BlockingIOError:
            return None
        if not data:
            raise ConnectionError("it hung up")
        return data

    def _receive(self, most: int) -> bytes:
        if not self._takes_descriptors:
            return self._socket.recv(most)
        try:
            data, rights, flags, _ = self._receive_all(most)
        except ConnectionResetError:
            # The other end closed it with data unread. What it had sent comes after this error.
            data, rights, flags, _ = self._receive_all(most)
        for level, kind, its in rights:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = len(its) // _INT * _INT
                self._descriptors += array.array("i", its[:whole])
        if flags & socket.MSG_CTRUNC:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return data

    def _receive_all(self, most: int) -> tuple[bytes, list[tuple[int, int, bytes]], int, Any]:
        """Not socket.recv_fds: it drops the flag, so that child programs would inherit them."""
        room = socket.CMSG_SPACE(_AT_ONCE * _INT)
        return self._socket.recvmsg(most, room, socket.MSG_CMSG_CLOEXEC)

    def _wait(self, events: int, until: float) -> None:
        left = until - time.monotonic()
        if left <= 0 or not _ready(self._socket, events, left):
            raise TimeoutError("timed out")


def lacks_descriptors(error: Exception) -> bool:
    """Whether this process can open no more descriptors."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _ready(its: socket.socket, events: int, seconds: float) -> list[tuple[int, int]]:
    """Needs no descriptor of its own."""
    poll = select.poll()
    poll.register(its, events)
    return poll.poll(1000 * min(seconds, 1e6))


def wait_for(connection: Connection, until: float, look: Callable[[], None]) -> None:
    """Waits until something has come. `look` is called now and then, and may raise.

    Raises:
        TimeoutError: nothing has.
    """
    while not connection.has_come(LOOK):
        look()
        if time.monotonic() >= until:
            raise TimeoutError("timed out")


def proof(secret: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, MAGIC + role + nonces, "sha256")
