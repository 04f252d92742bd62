"""Ending what ranks left behind: a daemon, a worker.

It gets a moment to leave by itself, then SIGTERM, then SIGKILL; what resists is named.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Container

from farandole._launch.processes import Process, descendants, describe, reap, send
from farandole._launch.signals import Escalation

# Time to leave alone, then from SIGTERM to SIGKILL, then until we give up. multiprocessing's
# helpers leave alone within milliseconds.
_LEAVE_ALONE, _LEAVE_TERM, LEAVE_KILL = 0.5, 1.0, 3.0
_LOOK_AGAIN = 0.02

# Seconds until the last of it is ended or named, at the latest.
LONGEST = _LEAVE_ALONE + _LEAVE_TERM + LEAVE_KILL


def left_behind(ranks: Container[int]) -> list[Process]:
    """Living descendants of this process besides ranks. Reaps zombies, but not the ranks'."""
    found = [process for process in descendants(os.getpid()) if process.pid not in ranks]
    reap(found)
    return [process for process in found if not process.dead]


class Leftovers:
    """One attempt to end the leftovers."""

    def __init__(self, ranks: Container[int], host: str, at_once: bool) -> None:
        self._ranks = ranks
        self._where = f" on {host}" if host else ""
        term = time.monotonic() + (0 if at_once else _LEAVE_ALONE)
        kill = term + _LEAVE_TERM
        self._plan = Escalation()
        self._plan.plan((term, signal.SIGTERM), (kill, signal.SIGKILL), (kill + LEAVE_KILL, None))
        self._told: dict[int, Process] = {}
        self._look_at = 0.0
        self.over = False
        self.remarks: list[str] = []

    def hurry(self) -> None:
        now = time.monotonic()
        self._plan.plan((now, signal.SIGKILL), (now + LEAVE_KILL, None))
        self._look_at = now

    def due(self) -> float | None:
        return None if self.over else self._look_at

    def turn(self, now: float) -> None:
        if self.over or now < self._look_at:
            return
        self._look_at = now + _LOOK_AGAIN
        left = left_behind(self._ranks)
        if not left:
            self._end(f"ended what ranks left running{self._where}: ", list(self._told.values()))
            return
        for number in self._plan.take(now):
            if number is None:
                self._end(f"could not end{self._where} ", left)
                return
            for process in left:
                self._told[process.pid] = process
                send(process, number)

    def _end(self, what: str, who: list[Process]) -> None:
        self.over = True
        if who:
            self.remarks.append(what + describe(who))
