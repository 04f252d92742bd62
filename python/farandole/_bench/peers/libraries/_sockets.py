"""One TCP connection between two ranks, for the peers that have no library."""

from __future__ import annotations

import os
import select
import socket
import time
from contextlib import suppress

from farandole._bench import placement
from farandole._bench.peers.libraries import launched

_START_SECONDS = 30.0
_PIECE = 256 << 10
_SPINS = 200  # looks at an empty socket before the kernel is asked to wake us


def join() -> tuple[int, int, Link | None]:
    """Rank, ranks, and the connection; without one unless there are two ranks."""
    rank, ranks = launched()
    placement.pin(rank, ranks)
    if ranks != 2:
        return rank, ranks, None
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return rank, ranks, Link(_accepted(where) if rank == 0 else _dialed(where))


def _accepted(where: tuple[str, int]) -> socket.socket:
    with socket.create_server(where) as listener:
        listener.settimeout(_START_SECONDS)
        return listener.accept()[0]


def _dialed(where: tuple[str, int]) -> socket.socket:
    until = time.monotonic() + _START_SECONDS
    while True:
        try:
            return socket.create_connection(where, _START_SECONDS)
        except ConnectionRefusedError:  # rank 0 does not listen yet
            if time.monotonic() > until:
                raise
            time.sleep(0.01)


class Link:
    """Moves bytes both ways at once."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._poll = select.poll()
        self._idle = 0

    def send(self, what: memoryview) -> int:
        """How much of it went at once."""
        with suppress(BlockingIOError):
            if what:
                return self._socket.send(what[:_PIECE])
        return 0

    def receive(self, into: memoryview) -> int:
        """How much of it came at once."""
        with suppress(BlockingIOError):
            if into:
                count = self._socket.recv_into(into[:_PIECE])
                if count == 0:
                    raise ConnectionError("the other rank has gone")
                return count
        return 0

    def rest(self, moved: int, to_send: bool) -> None:
        """After a turn that moved nothing, waits until something can move."""
        self._idle = 0 if moved else self._idle + 1
        if self._idle > _SPINS:
            self._poll.register(self._socket, select.POLLIN | (select.POLLOUT if to_send else 0))
            self._poll.poll()
            self._idle = 0
