"""A launcher, or an agent, looks at its ranks while they run: it shows the ranks of other
hosts to who looks here, tells of a rank that is slow, and serves metrics."""

from __future__ import annotations

import operator
import os
import socket
import time
from collections.abc import Iterable, Sequence

from farandole._launch.place import Place
from farandole._launch.polling import earliest
from farandole._launch.processes import descendants
from farandole._live.pages import Elsewhere, Pages, Status
from farandole._live.server import Server
from farandole._live.slow import LOOK_EVERY, SlowRanks


def pages_below() -> Pages:
    """Pages of this process's descendants: a rank may be a shell's child."""
    return Pages(lambda: [process.pid for process in descendants(os.getpid())])


class Live:
    """The launcher's view of one job."""

    def __init__(
        self, places: Sequence[Place], slow: float, listener: socket.socket | None
    ) -> None:
        """`slow`, `listener`: as in Job."""
        self._places = places
        self._slow = SlowRanks(slow)
        self._pages = pages_below()
        self._elsewhere = Elsewhere()
        self._server = None if listener is None else Server(listener, self.rows)
        self._shown: list[list[Status]] = []
        self._next = time.monotonic() + LOOK_EVERY

    def descriptors(self) -> list[tuple[int, int]]:
        return self._server.descriptors() if self._server else []

    def due(self) -> float | None:
        return earliest([self._next, self._server.due() if self._server else None])

    def turn(self, ready: set[int], now: float) -> Iterable[str]:
        """Lines for the user."""
        if self._server is not None:
            self._server.turn(ready, now)
        self._show_elsewhere()
        if now < self._next:
            return []
        self._next = now + LOOK_EVERY
        return self._slow.look(self.rows())

    def _show_elsewhere(self) -> None:
        told = [place.statuses for place in self._places]  # each time in a new list
        if len(told) != len(self._shown) or any(map(operator.is_not, told, self._shown)):
            self._shown = told
            self._elsewhere.show(status for statuses in told for status in statuses)

    def rows(self) -> list[Status]:
        """All ranks that are seen, by rank."""
        here = sum(rank.alive for place in self._places if place.is_here for rank in place.ranks)
        far = [status for place in self._places for status in place.statuses]
        return sorted([*self._pages.read(here), *far], key=lambda status: status.rank)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
