"""`/metrics` and `/healthz` over HTTP, in somebody's loop: nothing here waits.

A client sends one GET without a body, so no more of HTTP is needed. One that is slow to ask, or to
take its answer, is left after a moment.
"""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress

from farandole._live import openmetrics
from farandole._live.health import health_of
from farandole._live.pages import Status
from farandole._words import CommandError

_READ, _WRITE = 1, 4  # select.POLLIN, select.POLLOUT
_PATIENCE = 5.0  # seconds for the whole exchange
_LARGEST = 8192  # of a request
_REST = 1.0  # seconds
_MOST = 32  # connections at once; further ones wait in the kernel

Rows = Callable[[], Sequence[Status]]


def listen(where: str) -> socket.socket:
    """At PORT of this host alone, or at ADDRESS:PORT; port 0: one that is free. Raises CommandError
    where that is no address, or taken."""
    address, colon, port = where.rpartition(":")
    address = address.strip("[]") if colon else "127.0.0.1"
    number = int(port) if port.isdecimal() and len(port) < 6 else -1
    if not 0 <= number <= 65535 or not address:
        raise CommandError(f"--metrics takes PORT or ADDRESS:PORT, not '{where}'")
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, number), family=family, backlog=64)
    except OSError as error:
        raise CommandError(f"--metrics {where}: cannot listen there: {_why(error)}", 1) from error
    listener.setblocking(False)
    return listener


def _why(error: OSError) -> str:
    is_of_names = isinstance(error, socket.gaierror)  # whose numbers are its own
    return os.strerror(error.errno) if error.errno and not is_of_names else str(error)


def url_of(listener: socket.socket) -> str:
    address, port = listener.getsockname()[:2]
    return f"http://{f'[{address}]' if ':' in address else address}:{port}/metrics"


class Server:
    """Answers at a socket that listens. `rows`: the ranks, as they are now."""

    def __init__(self, listener: socket.socket, rows: Rows) -> None:
        self._listener = listener
        self._rows = rows
        self._open: dict[int, _Exchange] = {}
        self._rests_until = 0.0  # no descriptor was free

    def descriptors(self) -> list[tuple[int, int]]:
        listens = not self._rests_until and len(self._open) < _MOST
        own = [(self._listener.fileno(), _READ)] if listens else []
        return own + [(fd, one.wants) for fd, one in self._open.items()]

    def due(self) -> float | None:
        rests = [self._rests_until] if self._rests_until else []
        return min([one.until for one in self._open.values()] + rests, default=None)

    def turn(self, ready: set[int], now: float) -> None:
        if now >= self._rests_until:
            self._rests_until = 0.0
        if self._listener.fileno() in ready and len(self._open) < _MOST:
            self._accept(now)
        for fd, one in list(self._open.items()):
            if fd in ready:
                one.turn(self._rows)
            if one.over or now >= one.until:
                del self._open[fd]
                one.close()

    def _accept(self, now: float) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # else it has left
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._rests_until = now + _REST
            return
        connection.setblocking(False)
        self._open[connection.fileno()] = _Exchange(connection, now + _PATIENCE)

    def close(self) -> None:
        for one in self._open.values():
            one.close()
        self._open.clear()
        self._listener.close()


class _Exchange:
    """One request and its answer."""

    def __init__(self, connection: socket.socket, until: float) -> None:
        self.until = until
        self.over = False
        self._connection = connection
        self._asked = b""
        self._answer: bytes | None = None

    @property
    def wants(self) -> int:
        return _READ if self._answer is None else _WRITE

    def turn(self, rows: Rows) -> None:
        try:
            if self._answer is None:
                self._read(rows)
            if self._answer:
                self._answer = self._answer[self._connection.send(self._answer) :]
            self.over = self.over or self._answer == b""
        except BlockingIOError:
            return
        except OSError:
            self.over = True

    def close(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _read(self, rows: Rows) -> None:
        data = self._connection.recv(4096)
        self._asked += data
        if b"\r\n\r\n" in self._asked or b"\n\n" in self._asked:
            self._answer = _answered(self._asked, rows)
        elif not data:
            self.over = True
        elif len(self._asked) > _LARGEST:
            self._answer = _response(431, "text/plain", "that is a long request\n")


def _answered(asked: bytes, rows: Rows) -> bytes:
    words = asked.partition(b"\n")[0].decode("latin-1").split()
    method, path = [*words, "", ""][:2]
    if method not in ("GET", "HEAD"):
        answer = _response(405, "text/plain", "GET /metrics or /healthz\n")
    elif path.partition("?")[0] == "/metrics":
        answer = _response(200, openmetrics.CONTENT_TYPE, openmetrics.text_of(rows()))
    elif path.partition("?")[0] == "/healthz":
        well, said = health_of(rows())
        answer = _response(200 if well else 503, "application/json", json.dumps(said) + "\n")
    else:
        answer = _response(404, "text/plain", "there are /metrics and /healthz\n")
    return answer.partition(b"\r\n\r\n")[0] + b"\r\n\r\n" if method == "HEAD" else answer


_REASONS = {
    200: "OK", 404: "Not Found", 405: "Method Not Allowed", 431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}  # fmt: skip


def _response(code: int, kind: str, text: str) -> bytes:
    body = text.encode()
    head = (
        f"HTTP/1.1 {code} {_REASONS[code]}\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
