"""One wait for many descriptors, until a deadline."""

from __future__ import annotations

import select
import time
from collections.abc import Iterable

READ, WRITE = select.POLLIN, select.POLLOUT


def wait(descriptors: Iterable[tuple[int, int]], deadline: float | None) -> set[int]:
    """Waits for any (descriptor, READ or WRITE); returns the ready ones, hang-ups included."""
    poll = select.poll()
    for descriptor, events in descriptors:
        poll.register(descriptor, events)
    return {descriptor for descriptor, _ in poll.poll(_milliseconds(deadline))}


def earliest(times: Iterable[float | None]) -> float | None:
    return min((time for time in times if time is not None), default=None)


def _milliseconds(deadline: float | None) -> int | None:
    if deadline is None:
        return None
    return max(0, int((deadline - time.monotonic()) * 1000) + 1)
