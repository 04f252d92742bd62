"""Two looks at the ranks of a job, as what happened between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from farandole._live.pages import Status


class Rate(NamedTuple):
    """One rank between two looks; shares are of the time."""

    status: Status  # at the second look
    seconds: float  # between the two, by its own host's clock
    steps: float  # a second
    operations: float  # a second
    bytes: float  # a second
    for_ranks: float  # the share that it waited for others to begin
    for_data: float
    late: float  # the share that all others waited and it did not
    processors: float  # that its process kept busy

    @property
    def moved(self) -> bool:
        return self.steps > 0 or self.operations > 0


def rates(before: Sequence[Status], after: Sequence[Status]) -> list[Rate]:
    """The ranks that both looks saw, each in the same world, perhaps of several jobs."""
    old = {_who(status): status for status in before}
    pairs = [(old[_who(status)], status) for status in after if _who(status) in old]
    waits = {_who(now): _share(then, now, "all_waits_for_ranks") for then, now in pairs}
    found = []
    for then, now in pairs:
        mine = waits[_who(now)]
        others = [waits[_who(s)] for _, s in pairs if s.job == now.job and s is not now]
        found.append(
            Rate(
                now,
                now.seen - then.seen,
                steps=_per_second(then, now, "steps"),
                operations=_per_second(then, now, "operations"),
                bytes=_per_second(then, now, "bytes"),
                for_ranks=mine,
                for_data=_share(then, now, "waited_for_data"),
                late=max(0.0, min(others, default=0.0) - mine),
                processors=_per_second(then, now, "processor"),
            )
        )
    return found


def _who(status: Status) -> tuple[object, ...]:
    return status.job, status.host, status.pid, status.joined


def _per_second(before: Status, after: Status, field: str) -> float:
    """0 where a rank of another host was not looked at anew."""
    seconds = after.seen - before.seen
    grown = float(getattr(after, field) - getattr(before, field))
    return grown / seconds if seconds > 0 else 0.0


def _share(before: Status, after: Status, field: str) -> float:
    return min(1.0, max(0.0, _per_second(before, after, field)))
