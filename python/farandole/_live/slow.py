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


class SlowRanks:
    """The judge of one job. `share`: of the time that all others wait for a rank before it is
    told; 0: it never is."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._looks: deque[list[Status]] = deque(maxlen=_LOOKS)
        self._told: int | None = None

    def look(self, ranks: list[Status]) -> Iterator[str]:
        """Lines for the user. `ranks`: all that are seen of the job."""
        worlds = {(status.job, status.size) for status in ranks}
        if not self._share or len(worlds) != 1 or len(ranks) != next(iter(worlds))[1]:
            self._looks.clear()
            return
        self._looks.append(ranks)
        seen = rates(self._looks[0], self._looks[-1])
        if len(self._looks) < _LOOKS or len(seen) != len(ranks) or len(seen) < 2:
            return
        if not all(rate.moved for rate in seen):  # a hang, which the ranks tell of themselves
            return
        slow = max(seen, key=lambda rate: rate.late)
        if slow.late >= self._share and self._told != slow.status.rank:
            self._told = slow.status.rank
            yield _story(slow, seen, slow.status.seen - self._looks[0][0].seen)
        elif self._told is not None and slow.late < self._share * _OVER:
            yield f"rank {self._told} keeps up with the others again"
            self._told = None


def _story(slow: Rate, seen: list[Rate], seconds: float) -> str:
    others = [rate for rate in seen if rate is not slow]
    waits = sorted(rate.for_ranks for rate in others)
    busy = sorted(rate.processors for rate in others)
    return (
        f"rank {slow.status.rank} (pid {slow.status.pid} on {slow.status.host}) is the slowest: of "
        f"the last {seconds:.0f} s the others waited {_range(waits, percent=True)} for ranks to "
        f"begin an operation, and it {slow.for_ranks:.0%}; its process kept "
        f"{slow.processors:.1f} cores busy, theirs {_range(busy)}"
    )


def _range(values: list[float], *, percent: bool = False) -> str:
    low, high = (f"{v:.0%}" if percent else f"{v:.1f}" for v in (values[0], values[-1]))
    return low if low == high else f"{low} to {high}"
