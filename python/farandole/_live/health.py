"""Whether a job moves, for the probes of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from farandole._live.pages import Status


def health_of(ranks: Sequence[Status]) -> tuple[bool, dict[str, Any]]:
    """(whether it is well, what to say of it). A job that waits is: it may load data, or save its
    weights, and an operation that waits for too long fails by itself (FARANDOLE_TIMEOUT)."""
    failed = [status for status in ranks if status.verdict]
    if failed:
        worst = failed[0]
        return False, {"state": "failed", "rank": worst.rank, "verdict": worst.verdict}
    if not ranks:
        return True, {"state": "starting", "ranks": 0}
    stopped = [status.rank for status in ranks if status.state == "stopped"]
    waiting = [status for status in ranks if status.waits_since]
    if len(waiting) + len(stopped) == len(ranks):
        first = min(waiting, key=lambda status: status.waits_since, default=None)
        seconds = 0.0 if first is None else first.present_wait
        what = "" if first is None else first.waits_in
        whom = sorted({rank for status in waiting for rank in status.waits_for})
        said = {"state": "waiting", "seconds": round(seconds, 3), "in": what, "for": whom}
    else:
        said = {"state": "moving"}
    return True, said | {"ranks": len(ranks), "stopped": stopped}
