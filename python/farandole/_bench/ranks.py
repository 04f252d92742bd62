"""The measurement, as every rank runs it.

Of each call: the owner rewrites its input, a barrier, the call between two readings of the clock,
and every element of the result compared. A call's time is that of the slowest rank, so a rank that
leaves the barrier late is counted in.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import farandole as fd
from farandole._bench import placement, torch_own
from farandole._bench.collectives import Case
from farandole._bench.devices import DeviceCase, driver
from farandole._bench.layouts import COLLECTIVES, Collective
from farandole._bench.rows import Rows
from farandole._bench.statistics import gigabytes_per_second, summarize
from farandole._limits import setting

_WARM_UP = 5
_CHUNK, _MOST = 10, 10_000  # iterations, where seconds are asked for


@dataclass(frozen=True)
class Request:
    """The measurement that is asked for; the same on every rank."""

    collective: str
    sizes: tuple[int, ...]
    dtype: str
    memory: tuple[str, ...]
    options: dict[str, Any]  # of the call: op, algorithm, level
    iterations: int | None
    seconds: float
    terminal: int = 0  # columns of the one that rank 0's stdout reaches; 0: it is none
    is_one_machine: bool = False  # that has the cores of several hosts


def measure(request: Request) -> list[dict[str, Any]]:
    """Joins the world, measures, and returns the rows on every rank; rank 0 shows each at once."""
    core = _pin(request.is_one_machine)
    fd.init()
    pins = fd.all_gather(np.array([-1 if core is None else core])).tolist()
    collective = COLLECTIVES[request.collective]
    kinds = request.memory if collective.moves else ("",)
    ways = [request.options, *_by_nccl(request, collective)]
    cases = [(size, memory, way) for size in request.sizes for memory in kinds for way in ways]
    shown = _shown(request, len(cases), placement.describe([None if p < 0 else p for p in pins]))
    rows = []
    try:
        for size, memory, way in cases:
            if shown is not None:
                shown.begin(size, memory)
            rows.append(_row(replace(request, options=way), collective, size, memory))
            if shown is not None:
                shown.show(rows[-1])
    finally:
        if shown is not None:
            shown.end()
    return rows


def _by_nccl(request: Request, collective: Collective) -> Iterator[dict[str, Any]]:
    """Options for NCCL beside it: on devices, one for each rank, if no algorithm is asked for."""
    if list(request.memory) != ["device"] or "algorithm" in request.options or not collective.moves:
        return
    from farandole import _core, cuda

    try:
        cuda.nccl_library()
        there = len(cuda.devices()) >= fd.local_size()
    except _core.Error:
        there = False
    if fd.all_reduce(np.array([there and fd.size() > 1]), "min")[0]:
        fast = {"level": "fast"} if collective.folds else {}
        yield {**request.options, **fast, "algorithm": "nccl"}


def _shown(request: Request, total: int, placed: str) -> Rows | None:
    """Rank 0's display of the rows; None on other ranks."""
    if fd.rank() != 0:
        return None
    algorithm = request.options.get("algorithm", "")
    on_devices = "device" in request.memory and COLLECTIVES[request.collective].moves
    of_torch = ""
    if on_devices and torch_own.place(driver().ordinal) is not None:
        of_torch = torch_own.operation(folds=COLLECTIVES[request.collective].folds)
    return Rows(
        request.collective,
        algorithm,
        placed,
        total,
        request.terminal,
        on_devices=on_devices,
        of_torch=of_torch,
    )


def _pin(is_one_machine: bool = False) -> int | None:
    from farandole._world_place import find_place

    place = find_place(None, None, None, None, epoch=0)
    if is_one_machine:
        return placement.pin(place.rank, place.size)
    return placement.pin(place.local_rank, place.local_size)


class _Run(NamedTuple):
    starts: NDArray[np.int64]  # of each call on this rank, nanoseconds of the host's clock
    ends: NDArray[np.int64]
    wrong: int  # elements, on this rank
    path: str  # what ran


def _run(case: Case | DeviceCase, iterations: int) -> _Run:
    starts, ends = np.empty((2, iterations), np.int64)
    wrong, path = 0, ""
    clock, call, barrier = time.perf_counter_ns, case.call, fd.barrier
    for turn in range(iterations):
        case.prepare(turn)
        barrier()
        start = clock()
        call()
        ends[turn] = clock()
        starts[turn] = start
        path = fd.world().last_path
        wrong += case.count_wrong(turn)
    return _Run(starts, ends, wrong, path)


def _run_for(case: Case | DeviceCase, seconds: float) -> _Run:
    """Goes on until the time is over, as rank 0 sees it."""
    until = time.perf_counter() + seconds
    parts: list[_Run] = []
    while len(parts) < _MOST // _CHUNK:
        parts.append(_run(case, _CHUNK))
        if fd.broadcast(np.array([time.perf_counter() > until]))[0]:
            break
    return _Run(
        np.concatenate([part.starts for part in parts]),
        np.concatenate([part.ends for part in parts]),
        sum(part.wrong for part in parts),
        parts[-1].path,
    )


@contextmanager
def _no_collector() -> Iterator[None]:
    """Garbage is collected between rows, not between readings of the clock."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _case(request: Request, collective: Collective, size: int, memory: str) -> Case | DeviceCase:
    if memory == "device":
        return DeviceCase(collective, size, request.dtype, request.options)
    return Case(collective, size, request.dtype, memory, request.options)


def _beside(collective: Collective, size: int) -> dict[str, float]:
    """GB/s of the device's own copy of as many bytes, and of PyTorch's operation."""
    seconds = {"copy_gbs": driver().copy_seconds(size)}
    if place := torch_own.place(driver().ordinal):
        seconds["torch_gbs"] = torch_own.seconds(place, size, folds=collective.folds)
    return {name: size / took / 1e9 for name, took in seconds.items()}


def _row(request: Request, collective: Collective, size: int, memory: str) -> dict[str, Any]:
    case = _case(request, collective, size, memory)
    with _no_collector():
        _run(case, _WARM_UP)
        run = (
            _run(case, request.iterations)
            if request.iterations is not None
            else _run_for(case, request.seconds)
        )
    slowest = fd.all_reduce(run.ends - run.starts, "max").tolist()
    wrong = int(fd.all_reduce(np.array([run.wrong]))[0])
    if not collective.moves:  # a barrier is wrong when somebody leaves before the last has come
        wrong = int(np.sum(fd.all_reduce(run.ends, "min") < fd.all_reduce(run.starts, "max")))
    least, middle, p99 = summarize(slowest)
    beside: dict[str, float] = {}
    if isinstance(case, DeviceCase):  # while nobody else uses the device
        for turn in range(fd.size()):
            fd.barrier()
            if turn == fd.rank():
                beside = _beside(collective, case.bytes)
        case.end()
    bandwidth = gigabytes_per_second(case.bytes, middle)
    moves = collective.moves
    level = request.options.get("level") or setting("FARANDOLE_LEVEL")
    return {
        "collective": collective.name,
        "ranks": fd.size(),
        "bytes": case.bytes,
        "dtype": request.dtype if moves else None,
        "op": request.options.get("op", "sum") if collective.folds else None,
        "memory": memory or None,
        "peer": "farandole",
        "algorithm": run.path,
        "level": level if collective.folds else None,
        "iterations": len(slowest),
        "min_us": least / 1e3,
        "p50_us": middle / 1e3,
        "p99_us": p99 / 1e3,
        "algbw_gbs": bandwidth if moves else None,
        "busbw_gbs": bandwidth * collective.bus_factor(fd.size()) if moves else None,
        **beside,
        "errors": wrong,
        "verified": wrong == 0,
    }
