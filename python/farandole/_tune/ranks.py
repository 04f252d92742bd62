"""The measurement, as every rank runs it: each path and planner on its own, at a few sizes.

All rows are visited in rounds, so that what disturbs the host for a while disturbs all of them
alike. A visit is ten calls. Of each, the owner rewrites its input and all ranks meet in a barrier;
its time is that from when the last rank has come until the last one has left, on the clock that all
ranks of a host share: how late a rank left the barrier is not counted in. A reading is the median
of a visit, a row's time the lower quartile of its readings. Results are verified once a row.

To name an algorithm takes Python longer than most paths take for little data, and programs do not:
how much longer is measured as well, and not counted in.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import farandole as fd
from farandole import _core
from farandole._bench.collectives import Case
from farandole._bench.layouts import COLLECTIVES
from farandole._bench.ranks import _no_collector, _pin
from farandole._bench.statistics import format_size
from farandole._progress import Progress
from farandole._tune.fit import PATHS, Sample

_CALLS = 10  # of a visit
_LEAST, _MOST = 5, 200  # rounds after the first, which warms up

# Bytes of one rank's input where the choice is open: parts of what a path can hold, or these.
_FOLDED, _GATHERED = (4096, 16384, 65536, 524288), (16384, 262144)
_MAPPED = {path["name"] for path in _core.tuning.paths() if path["mapped"]}
_SCHEDULE_SIZES = (1024, 32768, 524288)

_NAMING = ((PATHS[0], 8), ("", 8))  # what runs a few bytes of any collective, named and not
_LEAST_LEFT = 0.1  # of a time, when the naming is taken off


class _Row(NamedTuple):
    """One path or planner at one size, which is measured."""

    collective: str
    algorithm: str
    case: Case


def measure(seconds: float, planners: bool, terminal: int = 0) -> list[Sample]:
    """Joins the world and measures for that long; the same list on every rank.

    `terminal`: columns of the one on which rank 0 shows how far it is; 0: there is none.
    """
    _pin()
    fd.init()
    rows = [row for row in _with_naming(_rows(planners)) if _can_run(row)]
    progress = Progress(seconds, terminal) if fd.rank() == 0 else None
    if progress is not None:
        what = f"{'paths and planners' if planners else 'paths'} with {fd.size()} ranks"
        progress.show(f"measuring {what}: {len(rows)} rows, in rounds for about {seconds:g} s")
    with _no_collector():
        starts, ends = _visit_all(rows, seconds, progress)
    _verify(rows)
    times = fd.all_reduce(ends, "max") - fd.all_reduce(starts, "max")
    readings = np.median(times, axis=2)[1:]  # of (rounds, rows, calls)
    samples = [_sample(row, readings[:, i]) for i, row in enumerate(rows)]
    return _without_naming(samples)


def _with_naming(rows: Iterable[_Row]) -> list[_Row]:
    """The rows, with two further ones for each collective in front."""
    rows = list(rows)
    collectives = dict.fromkeys(row.collective for row in rows)
    return [_row(name, *row) for name in collectives for row in _NAMING] + rows


def _without_naming(samples: list[Sample]) -> list[Sample]:
    pairs = 2 * len({sample.collective for sample in samples})
    naming = {
        named.collective: max(0.0, named.seconds - unnamed.seconds)
        for named, unnamed in zip(samples[:pairs:2], samples[1:pairs:2], strict=True)
    }
    return [
        replace(s, seconds=max(s.seconds - naming[s.collective], _LEAST_LEFT * s.seconds))
        for s in samples[pairs:]
    ]


def _rows(planners: bool) -> Iterator[_Row]:
    for path in _core.tuning.paths():
        for collective, sizes in _sizes(path["most_bytes"]).items():
            if collective in path["collectives"]:
                yield from (_row(collective, path["name"], size) for size in sizes)
    for planner in _core.schedule.planners(size=fd.size()) if planners else ():
        row = COLLECTIVES.get(planner["collective"])
        if row is not None and row.moves:
            yield from (_row(row.name, planner["name"], size) for size in _SCHEDULE_SIZES)


def _sizes(most: int | None) -> dict[str, tuple[int, ...]]:
    """Sizes by collective; whole elements of every type."""
    if most is None:
        return {"all_reduce": _FOLDED, "all_gather": _GATHERED}
    parts = tuple(most // share // 8 * 8 for share in (8, 4, 2, 1))
    return {"all_reduce": (8, *parts), "all_gather": parts[1::2]}


def _row(collective: str, algorithm: str, size: int) -> _Row:
    what = COLLECTIVES[collective]
    # Case counts the larger of input and output, the model what one rank contributes.
    larger = size * fd.size() if what.part_in else size
    memory = "ours" if algorithm in _MAPPED else "caller"
    options = {"algorithm": algorithm} | ({"level": "fast"} if what.folds else {})
    options = options if algorithm else {}
    return _Row(collective, algorithm, Case(what, larger, "float32", memory, options))


def _can_run(row: _Row) -> bool:
    """Whether a row runs, by trying; equal on all ranks. The kernel may forbid paths by address."""
    row.case.prepare(0)
    try:
        row.case.call()
    except fd.InvalidArgument:
        return False
    return True


def _visit_all(
    rows: list[_Row], seconds: float, progress: Progress | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """When each call began and ended on this rank: (rounds, rows, calls), in nanoseconds."""
    begin = time.perf_counter()
    rounds: list[list[tuple[list[int], list[int]]]] = []
    while len(rounds) <= _MOST:
        visits = []
        for row in rows:
            if progress is not None:
                passed = min(time.perf_counter() - begin, seconds)
                progress.now(f"round {len(rounds) + 1}, {_name_of(row)}", passed)
            visits.append(_visit(row.case))
        rounds.append(visits)
        over = len(rounds) > _LEAST and time.perf_counter() > begin + seconds
        if fd.broadcast(np.array([over]))[0]:
            break
    if progress is not None:
        progress.clear()
    readings = np.array(rounds, np.int64)
    return readings[:, :, 0].copy(), readings[:, :, 1].copy()


def _name_of(row: _Row) -> str:
    by = f" by {row.algorithm}" if row.algorithm else ""
    return f"{row.collective}{by}, {format_size(row.case.bytes)}"


def _visit(case: Case) -> tuple[list[int], list[int]]:
    clock, prepare, call, barrier = time.perf_counter_ns, case.prepare, case.call, fd.barrier
    starts, ends = [0] * _CALLS, [0] * _CALLS
    for turn in range(_CALLS):
        prepare(turn)
        barrier()
        starts[turn] = clock()
        call()
        ends[turn] = clock()
    return starts, ends


def _verify(rows: list[_Row]) -> None:
    wrong = fd.all_reduce(np.array([row.case.count_wrong(_CALLS - 1) for row in rows]))
    for row, count in zip(rows, wrong.tolist(), strict=True):
        if count:
            raise RuntimeError(
                f"{row.collective} by {row.algorithm} of {row.case.bytes} bytes: "
                f"{count} wrong elements"
            )


def _sample(row: _Row, readings: NDArray[np.float64]) -> Sample:
    quick, slow = np.quantile(readings, [0.25, 0.75])
    part_in = COLLECTIVES[row.collective].part_in
    sent = row.case.bytes // fd.size() if part_in else row.case.bytes
    return Sample(
        row.collective, row.algorithm, sent, fd.size(), float(quick) / 1e9, float(slow / quick - 1)
    )
