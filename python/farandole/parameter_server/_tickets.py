"""Steps that all workers share: each goes to one worker, and to another one if that dies."""

from __future__ import annotations

from typing import Any

NONE_NOW, ALL_DONE, OTHER_TOTAL = -1, -2, -3


class Tickets:
    """The steps of one `steps()` call after the other, on the first server.

    A step is done when its gradient has come, or when its worker asks for the next one.
    """

    def __init__(self) -> None:
        self._run = 0  # which call of steps() this is
        self._total: int | None = None
        self._next = 0
        self._again: list[int] = []  # of workers that died
        self._held: dict[int, int] = {}  # by worker

    def take(self, worker: int, run: int, total: int) -> int:
        """The number of a step, or why there is none: NONE_NOW, while others are at work on the
        last ones; ALL_DONE; OTHER_TOTAL, where another worker asked for another number."""
        self.finish(worker)
        if run < self._run:
            return ALL_DONE
        if run > self._run:
            self._run, self._total, self._next, self._again = run, None, 0, []
        if self._total is None:
            self._total = total
        if total != self._total:
            return OTHER_TOTAL
        if self._again:
            self._held[worker] = self._again.pop(0)
        elif self._next < total:
            self._held[worker] = self._next
            self._next += 1
        else:
            return NONE_NOW if self._held else ALL_DONE
        return self._held[worker]

    def finish(self, worker: int) -> None:
        """The step that the worker holds is done."""
        self._held.pop(worker, None)

    def lose(self, worker: int) -> None:
        """The worker has died: its step is for another one."""
        if (step := self._held.pop(worker, None)) is not None:
            self._again.append(step)

    @property
    def total(self) -> int | None:
        return self._total

    def state(self) -> dict[str, Any]:
        """For a snapshot: steps in work are to be done again."""
        again = sorted([*self._again, *self._held.values()])
        return {"run": self._run, "total": self._total, "next": self._next, "again": again}

    def restore(self, state: dict[str, Any]) -> None:
        # The total is the restarted program's, which may want more steps than the one before.
        self._run, self._next, self._again = state["run"], state["next"], list(state["again"])
