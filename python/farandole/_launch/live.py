"""The launcher's view of its job while it runs: it shows the ranks of other hosts to readers on
this one, names a rank that is slow, and serves metrics."""

from __future__ import annotations

import operator
import socket
import time
from collections.abc import Iterable, Sequence

from farandole._launch.place import Place
from farandole._launch.polling import earliest
from farandole._live.pages import Elsewhere, Status
from farandole._live.server import Server
from farandole._live.slow import LOOK_EVERY, SlowRanks

_SHOW_EVERY = 1.0  # seconds, as agents tell


class Live:
    """A look that fails is the last one; the job goes on."""

    def __init__(
        self, places: Sequence[Place], slow: float, listener: socket.socket | None
    ) -> None:
        """`slow`, `listener`: as in Job."""
        self._places = places
        self._slow = SlowRanks(slow)
        self._elsewhere = Elsewhere()
        self._server = None if listener is None else Server(listener, self._rows)
        self._shown: list[Sequence[Status]] = []
        self._next = self._next_show = time.monotonic() + LOOK_EVERY
        self._is_over = False

    def descriptors(self) -> list[tuple[int, int]]:
        return self._server.descriptors() if self._server and not self._is_over else []

    def due(self) -> float | None:
        if self._is_over:
            return None
        return earliest([self._next, self._server.due() if self._server else None])

    def turn(self, ready: set[int], now: float) -> Iterable[str]:
        """Lines for the user."""
        if self._is_over:
            return []
        try:
            return self._look(ready, now)
        except Exception as error:
            self._is_over = True
            self.close()
            return [f"ranks are not looked at any more: {type(error).__name__}: {error}"]

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def _look(self, ready: set[int], now: float) -> list[str]:
        if self._server is not None:
            self._server.turn(ready, now)
        if now >= self._next_show:
            self._next_show = now + _SHOW_EVERY
            self._show_elsewhere()
        if now < self._next:
            return []
        self._next = now + LOOK_EVERY
        return list(self._slow.look(self._rows()))

    def _rows(self) -> list[Status]:
        """All ranks that are seen, by rank."""
        found = [status for place in self._places for status in place.statuses()]
        return sorted(found, key=lambda status: status.rank)

    def _show_elsewhere(self) -> None:
        told = [place.statuses() for place in self._places if not place.is_here]
        if len(told) != len(self._shown) or any(map(operator.is_not, told, self._shown)):
            self._shown = told  # an agent tells in a new list each time
            self._elsewhere.show(status for statuses in told for status in statuses)
