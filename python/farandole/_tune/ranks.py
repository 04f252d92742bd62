"""The measurement, as every rank runs it: each path and planner on its own, at a few sizes.

Of each call: the owner rewrites its input, a barrier, the call between two readings of the clock.
A call's time is that of the slowest rank; results are verified once for each row.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

import farandole as fd
from farandole import _core
from farandole._bench.collectives import COLLECTIVES, Case
from farandole._bench.ranks import _no_collector, _pin
from farandole._bench.statistics import median
from farandole._tune.fit import Sample

_SECONDS = 0.03  # for each row
_LEAST, _MOST = 10, 400  # calls
_WARM_UP = 3

# Bytes of one rank's input where the choice is open: what a path cannot hold is not asked of it.
_PATH_SIZES = {
    "lines": (8, 256, 1024, 2048),
    "one_shot": (8, 1024, 8192, 32768),
    "window": (1024, 8192, 65536, 524288),
    "staged": (1024, 8192, 65536, 524288),
}
_SCHEDULE_SIZES = (1024, 32768, 524288)


def measure() -> list[Sample]:
    """Joins the world and measures; the same list on every rank."""
    _pin()
    fd.init()
    return [_sample(*row) for row in _rows()]


def _rows() -> Iterator[tuple[str, str, int]]:
    for path, sizes in _PATH_SIZES.items():
        yield from (("all_reduce", path, size) for size in sizes)
    for planner in _core.schedule.planners(size=fd.size()):
        row = COLLECTIVES.get(planner["collective"])
        if row is not None and row.moves:
            yield from ((row.name, planner["name"], size) for size in _SCHEDULE_SIZES)


def _sample(collective: str, algorithm: str, size: int) -> Sample:
    row = COLLECTIVES[collective]
    # Case counts the larger of input and output, the model what one rank contributes.
    larger = size * fd.size() if row.part_in else size
    memory = "ours" if algorithm == "window" else "caller"
    options = {"algorithm": algorithm} | ({"level": "fast"} if row.folds else {})
    case = Case(row, larger, "float32", memory, options)
    times = _times(case)
    slowest = fd.all_reduce(np.array(times, np.int64), "max").tolist()
    wrong = int(fd.all_reduce(np.array([case.count_wrong(_WARM_UP + len(times) - 1)]))[0])
    if wrong:
        raise RuntimeError(f"{collective} by {algorithm} of {size} bytes: {wrong} wrong elements")
    sent = case.bytes // fd.size() if row.part_in else case.bytes
    return Sample(collective, algorithm, sent, fd.size(), median(slowest) / 1e9)


def _times(case: Case) -> list[int]:
    """Nanoseconds of each call on this rank; as many on every rank."""
    clock, call, barrier = time.perf_counter_ns, case.call, fd.barrier
    times: list[int] = []
    until = 0.0
    with _no_collector():
        for turn in range(_WARM_UP + _MOST):
            case.prepare(turn)
            barrier()
            start = clock()
            call()
            end = clock()
            if turn < _WARM_UP:
                until = time.perf_counter() + _SECONDS
                continue
            times.append(end - start)
            enough = len(times) % _LEAST == 0
            if enough and fd.broadcast(np.array([time.perf_counter() > until]))[0]:
                break
    return times
