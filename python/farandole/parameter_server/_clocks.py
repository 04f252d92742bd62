"""The steps of each worker, and how far the fastest may be ahead of the slowest."""

from __future__ import annotations


class Clocks:
    """The clocks of one server's workers. A clock counts the gradients that a worker has pushed.

    A worker is *awaited* until it rests, leaves or dies: others do not get further ahead of it than
    the bound.
    """

    def __init__(self, workers: int, bound: int | None) -> None:
        self._bound = bound
        self.clock = [0] * workers
        self._awaited = set(range(workers))
        self._gone: set[int] = set()
        self.most_ahead = 0  # of those that were let go on

    @property
    def awaited(self) -> frozenset[int]:
        return frozenset(self._awaited)

    def tick(self, worker: int) -> None:
        """The worker has pushed."""
        self.wake(worker)
        self.clock[worker] += 1

    def wake(self, worker: int) -> None:
        """The worker works. After a rest it goes on where the slowest is, so that other workers do
        not wait for steps that it has left out."""
        if worker in self._awaited:
            return
        self.clock[worker] = max(
            [self.clock[worker], *([self._slowest()] if self._awaited else [])]
        )
        self._awaited.add(worker)

    def rest(self, worker: int) -> None:
        """The worker has no work now."""
        self._awaited.discard(worker)

    def leave(self, worker: int) -> None:
        """The worker has ended, in whatever way."""
        self._awaited.discard(worker)
        self._gone.add(worker)

    def has_left(self, worker: int) -> bool:
        return worker in self._gone

    def may_go_on(self, worker: int) -> bool:
        """Whether it is no more than the bound ahead of the slowest that is awaited."""
        return self._bound is None or self._ahead(worker) <= self._bound

    def note_going(self, worker: int) -> None:
        """Notes that the worker goes on."""
        self.most_ahead = max(self.most_ahead, self._ahead(worker))

    def _ahead(self, worker: int) -> int:
        return self.clock[worker] - self._slowest() if self._awaited else 0

    def _slowest(self) -> int:
        return min(self.clock[each] for each in self._awaited)
