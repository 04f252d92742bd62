"""Bytes on their way into a descriptor that must not block us."""

from __future__ import annotations

import os

_MOST_AT_ONCE = 1 << 18


class Outbox:
    """A queue of bytes, written as the descriptor takes them."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.gone = False  # the reader left; what is put is dropped
        self._bytes = bytearray()
        os.set_blocking(fd, False)

    @property
    def pending(self) -> int:
        return len(self._bytes)

    def put(self, data: bytes) -> None:
        if not self.gone:
            self._bytes += data

    def flush(self) -> int:
        """Writes what fits now; returns how much."""
        done = 0
        while done < len(self._bytes) and not self.gone:
            try:
                done += os.write(self.fd, self._bytes[done : done + _MOST_AT_ONCE])
            except BlockingIOError:
                break
            except OSError:  # EPIPE, or a connection's end
                self.drop()
        del self._bytes[:done]
        return done

    def drop(self) -> None:
        """Discards all bytes, since nobody reads any more."""
        self.gone = True
        self._bytes.clear()
