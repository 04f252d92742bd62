"""Words between a launcher and its ranks, on one host: datagrams to abstract UNIX sockets."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

PARTS = "\x1f"  # between those of a word
_MOST_AT_ONCE = 10_000  # then who listens does something else first


class Ear:
    """A socket that others find by its name."""

    def __init__(self, name: str, largest: int) -> None:
        """`largest`: bytes of a word. Raises OSError where somebody has the name."""
        self._largest = largest
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(f"\0{name}")

    def fileno(self) -> int:
        return self._socket.fileno()

    def words(self) -> Iterator[bytes]:
        """All that were said until now, by processes of this user."""
        for _ in range(_MOST_AT_ONCE):
            try:
                data, extra, _, _ = self._socket.recvmsg(self._largest, 64)
            except BlockingIOError:
                return
            if _is_of_this_user(extra):
                yield data


def _is_of_this_user(extra: list[tuple[int, int, bytes]]) -> bool:
    return any(
        (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS)
        and struct.unpack("iII", data[:12])[1] == os.geteuid()
        for level, kind, data in extra
    )


def say(name: str, word: bytes) -> None:
    """Sends a word to the socket of that name. It is lost where nobody listens, or has no time."""
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as mouth,
        suppress(OSError),
    ):
        mouth.sendto(word, f"\0{name}")


def worker_name(run_id: str, pid: int) -> str:
    """Where a worker of an elastic job listens (_elastic.py)."""
    return f"farandole-worker-{run_id}-{pid}"
