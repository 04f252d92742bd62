"""Reads the output of ranks, no further than the launcher has room for."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from farandole._launch.agents.frames import PIECE, WINDOW
from farandole._launch.polling import READ, wait


class Tap:
    """One rank's stdout or stderr."""

    def __init__(self, rank: int, which: int, fd: int) -> None:
        self.rank, self.which, self.fd = rank, which, fd
        self.room = WINDOW
        self.open = True

    def read(self) -> bytes:
        """Reads what there is room for. At the end returns nothing, and closes."""
        data = os.read(self.fd, min(self.room, PIECE))
        self.room -= len(data)
        if not data:
            self.close()
        return data

    def close(self) -> None:
        if self.open:
            os.close(self.fd)
            self.open = False


class Taps:
    """The taps of all ranks of this host."""

    def __init__(self) -> None:
        self._of: dict[tuple[int, int], Tap] = {}
        self._is_unlimited = False

    def add(self, rank: int, pipes: Sequence[int]) -> None:
        for which, fd in enumerate(pipes):
            self._of[rank, which] = Tap(rank, which, fd)

    def readable(self) -> list[Tap]:
        """The taps that have room."""
        return [tap for tap in self._of.values() if tap.open and tap.room > 0]

    def read(self, ready: set[int]) -> Iterator[tuple[Tap, bytes]]:
        for tap in self.readable():
            if tap.fd in ready:
                yield tap, tap.read()
                if self._is_unlimited:
                    tap.room = WINDOW

    def give_room(self, rank: int, which: int, count: int) -> None:
        self._of[rank, which].room += count

    def unlimit(self) -> None:
        """Reads without limit once nobody shows the output, so that ranks can write and end."""
        self._is_unlimited = True
        for tap in self._of.values():
            tap.room = WINDOW

    def shut(self, rank: int, which: int) -> None:
        self._of[rank, which].close()

    def close_dry(self) -> Iterator[Tap]:
        """Closes the taps that have nothing to read now. For ranks that are dead."""
        for tap in self._of.values():
            if tap.open and not wait([(tap.fd, READ)], 0.0):
                tap.close()
                yield tap

    @property
    def any_open(self) -> bool:
        return any(tap.open for tap in self._of.values())
