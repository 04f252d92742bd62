"""An attacker between ranks that meet, which does not know their secret."""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from farandole import Error, _meeting
from farandole._meeting import MasterPort, connection
from farandole._meeting.connection import HEAD, Changed, Connection

HERE = "127.0.0.1"
SAID = [{"number": n} for n in range(4)]


@contextmanager
def two_ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server((HERE, 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    with ours, theirs:
        yield ours, theirs


def frames_of(data: bytes) -> list[bytes]:
    frames = []
    while data:
        size = HEAD.size + HEAD.unpack_from(data)[0]
        frames.append(data[:size])
        data = data[size:]
    return frames


def said_frames() -> list[bytes]:
    with two_ends() as (ours, theirs):
        sender = Connection(ours)
        sender.seal(b"secret", b"client", b"server", b"nonces")
        for words in SAID:
            sender.send(words)
        ours.shutdown(socket.SHUT_WR)
        theirs.settimeout(20)
        return frames_of(b"".join(iter(lambda: theirs.recv(65536), b"")))


def heard(data: bytes, role: bytes = b"client") -> tuple[list[Any], Exception | None]:
    """The messages that are received from these bytes, and the error that ends them."""
    words: list[Any] = []
    with two_ends() as (ours, theirs):
        ours.sendall(data)
        ours.shutdown(socket.SHUT_WR)
        receiver = Connection(theirs)
        receiver.seal(b"secret", b"server", role, b"nonces")
        try:
            while receiver.has_come(0) and not receiver.has_hung_up():
                words.append(receiver.hear(time.monotonic() + 20))
        except (OSError, ValueError) as error:
            return words, error
    return words, None


def test_what_passes_unchanged_is_heard() -> None:
    assert heard(b"".join(said_frames())) == (SAID, None)


Deed = Callable[[list[bytes]], list[bytes]]


@pytest.mark.parametrize(
    "deed",
    [
        pytest.param(lambda f: [f[0], f[1][:-1], *f[2:]], id="cuts"),
        pytest.param(lambda f: [f[0], f[0], *f[1:]], id="repeats"),
        pytest.param(lambda f: [f[0], *f[2:]], id="leaves out"),
        pytest.param(lambda f: [f[0], f[2], f[1], f[3]], id="exchanges"),
        pytest.param(lambda f: [f[0], f[1][:-32] + bytes(32), *f[2:]], id="makes up"),
    ],
)
def test_what_a_stranger_does_to_words_is_noticed(deed: Deed) -> None:
    words, error = heard(b"".join(deed(said_frames())))
    assert words == SAID[:1]
    assert isinstance(error, Changed)


def test_no_byte_of_words_can_be_changed() -> None:
    frames = said_frames()
    for at in range(len(frames[1])):
        changed = bytearray(frames[1])
        changed[at] ^= 1
        words, error = heard(frames[0] + changed + frames[2] + frames[3])
        assert (at, words) == (at, SAID[:1])
        # A length that is too large, or descriptors over TCP, are noticed before the seal.
        assert isinstance(error, Changed if at >= HEAD.size else (Changed, OSError))


def test_words_are_not_sent_back_to_who_has_said_them() -> None:
    words, error = heard(said_frames()[0], role=b"server")
    assert not words
    assert isinstance(error, Changed)


class Way:
    """A relay to rank 0 that changes one byte: the byte at `offset` of those that pass in a
    `direction` (0: to rank 0)."""

    def __init__(self, port: int, direction: int, offset: int) -> None:
        self._to, self._direction, self._left = port, direction, offset
        self._server = socket.create_server((HERE, 0))
        self.port = self._server.getsockname()[1]
        self.has_changed = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._server.close()

    def _run(self) -> None:
        while True:
            try:
                dialer, _ = self._server.accept()
            except OSError:
                return
            with suppress(OSError):
                self._pass(dialer)

    def _pass(self, dialer: socket.socket) -> None:
        with dialer, socket.create_connection((HERE, self._to)) as rank_0:
            ends = [dialer, rank_0]
            while True:
                for end in select.select(ends, [], [], 20)[0]:
                    if not (data := end.recv(65536)):
                        return
                    other = ends[1 - ends.index(end)]
                    other.sendall(self._changed(data, ends.index(end)))

    def _changed(self, data: bytes, direction: int) -> bytes:
        if direction != self._direction or self.has_changed:
            return data
        if self._left >= len(data):
            self._left -= len(data)
            return data
        self.has_changed = True
        changed = bytearray(data)
        changed[self._left] ^= 1
        return bytes(changed)


def words_of(rank: int) -> dict[str, Any]:
    return {"rank": rank, "size": 2, "pid": 100 + rank, "host": "here"}


def met(rank: int, port: int) -> list[dict[str, Any]]:
    meeting = _meeting.Meeting(rank, range(2), time.monotonic() + 3, secret=b"secret")
    found = _meeting.exchange(meeting, MasterPort(HERE, port), words_of(rank), lambda _: None)
    found.line.end()
    return found.table


def free_port() -> int:
    with socket.create_server((HERE, 0)) as found:
        return int(found.getsockname()[1])


_GREETING = len(connection.MAGIC) + connection.NONCE
# Offsets in the bytes from rank 1: magic, nonce, proof, a length, its words.
_THERE = [0, 20, _GREETING + 1, _GREETING + 32, _GREETING + 32 + HEAD.size + 3]
# Offsets in the bytes from rank 0: the same; its words are the table.
_BACK = [0, 20, _GREETING + 1, _GREETING + 32, _GREETING + 32 + HEAD.size + 12]


def test_ranks_have_met_as_they_said_or_say_why_not() -> None:
    def outcome(future: Future[list[dict[str, Any]]]) -> Any:
        error = future.exception(60)
        return future.result() if error is None else error

    cases = [(0, at) for at in _THERE] + [(1, at) for at in _BACK]
    with ThreadPoolExecutor(2 * len(cases)) as threads:
        running = []
        for direction, offset in cases:
            port = free_port()
            first = threads.submit(met, 0, port)
            while True:  # until it listens
                with suppress(ConnectionRefusedError), socket.create_connection((HERE, port)):
                    break
                time.sleep(0.01)
            way = Way(port, direction, offset)
            running.append((direction, offset, way, first, threads.submit(met, 1, way.port)))
        for direction, offset, way, first, second in running:
            ends = [outcome(first), outcome(second)]
            way.close()
            told = (direction, offset, *map(repr, ends))
            assert way.has_changed, told
            right = [words_of(rank) | {"among": ""} for rank in range(2)]
            # A rank whose greeting was lost tries again, and then no byte is changed any more.
            assert all(end == right or isinstance(end, Error) for end in ends), told
            assert (ends[0] == right) == (ends[1] == right), told


def test_lengths_are_checked_before_memory_is_taken() -> None:
    for size in (0, 31, 1 << 31):
        words, error = heard(struct.pack("<II", size, 0) + bytes(100))
        assert not words
        assert isinstance(error, ConnectionError)
