"""The rank that all others wait for: told once when it begins, and once when it is over.

In synchronous training all ranks are as fast as the slowest one. The others wait for it in each
step, and it waits for nobody: so it is the one that waits less than every other rank does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from farandole._live.pages import Status
from farandole._live.rates import Rate, rates

LOOK_EVERY = 5.0  # seconds
_LOOKS = 4  # of which the first and the last are compared
_OVER = 0.5  # of the share: less than that, and it keeps up
_AGAIN = 3600.0  # seconds until the same rank is told again: it may save weights now and then


class SlowRanks:
    """The judge of one job. `share`: of the time that all others wait for a rank before it is
    told; 0: it never is."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._looks: deque[list[Status]] = deque(maxlen=_LOOKS)
        self._slow: int | None = None  # the rank that was told, and has not kept up since
        self._told: dict[int, float] = {}  # by rank: when
        self._world: set[tuple[int, float]] = set()

    def look(self, ranks: list[Status]) -> Iterator[str]:
        """Lines for the user. `ranks`: all that are seen of the job."""
        if not self._share or {status.rank for status in ranks} != set(range(len(ranks))):
            self._looks.clear()
            return
        world = {(status.rank, status.joined) for status in ranks}
        if world != self._world:  # an elastic job's next one
            self._looks.clear()
            self._told.clear()
            self._slow, self._world = None, world
        self._looks.append(ranks)
        seen = rates(self._looks[0], self._looks[-1])
        whole = len(seen) == len(ranks) > 1 and len(ranks) == ranks[0].size
        if len(self._looks) < _LOOKS or not whole:
            return
        if not all(rate.moved for rate in seen):  # a hang, which the ranks tell of themselves
            return
        if self._slow is not None and seen[self._slow].late < self._share * _OVER:
            yield f"rank {self._slow} keeps up with the others again"
            self._slow = None
        slow = max(seen, key=lambda rate: rate.late)
        if slow.late >= self._share and self._is_new(slow):
            self._slow = slow.status.rank
            self._told[self._slow] = slow.status.seen
            yield _story(slow, seen)

    def _is_new(self, slow: Rate) -> bool:
        told = self._told.get(slow.status.rank)
        return self._slow != slow.status.rank and (told is None or slow.status.seen > told + _AGAIN)


def _story(slow: Rate, seen: list[Rate]) -> str:
    others = [rate for rate in seen if rate is not slow]
    waits = sorted(rate.for_ranks for rate in others)
    busy = sorted(rate.processors for rate in others)
    status = slow.status
    return (
        f"rank {status.rank} (pid {status.pid} on {status.host}) is the slowest: of the last "
        f"{slow.seconds:.0f} s the others waited {_range(waits, percent=True)} for ranks to begin "
        f"an operation, and it {slow.for_ranks:.0%}; its process kept {slow.processors:.1f} cores "
        f"busy, theirs {_range(busy)}"
    )


def _range(values: list[float], *, percent: bool = False) -> str:
    low, high = (f"{v:.0%}" if percent else f"{v:.1f}" for v in (values[0], values[-1]))
    return low if low == high else f"{low} to {high}"
