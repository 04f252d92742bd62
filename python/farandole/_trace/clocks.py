"""The clocks of several hosts as one: rank 0's.

Beside the part of a rank whose host is not rank 0's lies `rank-N.clock`. Its first line says which
run and rank it is of. Each further one, ``[at, ahead, within]`` in nanoseconds, is a reading: at
that time by the rank's clock, the clock was ahead of rank 0's by so much, give or take `within`
(csrc/control/clock_log.h). Between two readings clocks are taken to drift evenly.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from farandole import _json

SUFFIX = ".clock"
_MUCH_WORSE = 2.0  # than the median of a run: a round trip that was held up says little


@dataclass(frozen=True)
class Clock:
    """A host's, in microseconds; readings by time, at least one."""

    at: Sequence[float]
    ahead: Sequence[float]
    within: float  # of the worst of these readings

    def to_rank_0(self, time: float) -> float:
        """The same moment by rank 0's clock."""
        return time - self._ahead_at(time)

    def _ahead_at(self, time: float) -> float:
        after = bisect_left(self.at, time)
        if after in (0, len(self.at)):
            return self.ahead[min(after, len(self.at) - 1)]
        begin, end = self.at[after - 1], self.at[after]
        first, last = self.ahead[after - 1], self.ahead[after]
        return first + (last - first) * (time - begin) / (end - begin)


def read(part: Path, run: str) -> Clock | None:
    """The clock of a rank's part; None where there is no reading of that run."""
    lines: list[Any] = []
    with suppress(OSError, ValueError):  # a line that is half written is the last one
        lines.extend(map(_json.read, part.with_suffix(SUFFIX).read_text("ascii").splitlines()))
    try:
        if not lines or str(lines[0]["run"]) != run:
            return None
        readings = {int(at): (int(ahead), int(within)) for at, ahead, within in lines[1:]}
    except (KeyError, TypeError, ValueError):
        return None
    if not readings:
        return None
    limit = _MUCH_WORSE * median(within for _, within in readings.values())
    good = sorted((at, *rest) for at, rest in readings.items() if rest[1] <= limit)
    return Clock(
        [at / 1000 for at, _, _ in good],
        [ahead / 1000 for _, ahead, _ in good],
        max(within for _, _, within in good) / 1000,
    )


def lined_up(line: bytes, clock: Clock) -> bytes:
    """An event as rank 0's clock would have told it."""
    event = json.loads(line)
    if "dur" in event:
        begin, end = float(event["ts"]), float(event["ts"]) + float(event["dur"])
        event["dur"] = round(clock.to_rank_0(end) - clock.to_rank_0(begin), 3)
    says = event.get("args", {})
    for place, name in ((event, "ts"), (says, "launched"), (says, "ready")):
        if name in place:
            place[name] = round(clock.to_rank_0(float(place[name])), 3)
    return json.dumps(event, separators=(",", ":")).encode()
