"""Our own paths beside each other: halves, the copying path, schedules over channels, hot calls."""

from __future__ import annotations

import bars
from document import table
from measuring import Bench, Row, Setting, only, over, ratio_cell, run, select, time_of

from farandole import _core
from farandole._bench.peers.table import PeerError
from farandole._bench.statistics import format_size

_MIB = 1 << 20


# ---- bfloat16 and float16 ----


def measure_halves(bench: Bench) -> list[Row]:
    """Sizes are those of float32; the halves' have as many elements."""
    sizes = [_MIB] if bench.quick else [16 << 10, 256 << 10, _MIB, 4 * _MIB, 16 * _MIB]
    settings = [Setting(dtype, dtype=dtype) for dtype in ("float32", "bfloat16", "float16")]
    return run(bench, [bench.question("all_reduce", sizes)], [], settings)


def render_halves(rows: list[Row]) -> str:
    cells = []
    for row in rows:
        count = row["bytes"] // 2
        whole = only(rows, dtype="float32", memory=row["memory"], bytes=4 * count)
        if row["dtype"] == "float32" or whole is None:
            continue
        ratio = over(row, whole)
        cells.append(
            [
                f"{count}",
                row["dtype"],
                row["memory"],
                time_of(row),
                time_of(whole),
                ratio_cell(ratio),
                bars.verdict(ratio, bars.HALVES),
            ]
        )
    columns = ["elements", "dtype", "memory", "p50 µs", "float32, µs", "ratio", "bar"]
    return table(columns, cells)


# ---- the copying path ----


def measure_copying(bench: Bench) -> list[Row]:
    if not any(setting["name"] == "FARANDOLE_CMA" for setting in _core.settings()):
        raise PeerError("this farandole has no FARANDOLE_CMA: copying is its only path")
    sizes = [_MIB] if bench.quick else [256 << 10, _MIB, 4 * _MIB, 16 * _MIB, 64 * _MIB]
    settings = [
        Setting("", memory=("caller",)),
        Setting("copying", environment={"FARANDOLE_CMA": "0"}, memory=("caller",)),
    ]
    return run(bench, [bench.question("all_reduce", sizes)], [], settings)


def render_copying(rows: list[Row]) -> str:
    cells = []
    for row in select(rows, setting="copying"):
        free = only(rows, setting="", bytes=row["bytes"])
        if free is None:
            continue
        ratio = over(row, free)
        cells.append(
            [
                format_size(row["bytes"]),
                f"{free['algorithm']}: {time_of(free)}",
                f"{row['algorithm']}: {time_of(row)}",
                ratio_cell(ratio),
                bars.verdict(ratio, bars.COPYING),
            ]
        )
    columns = ["Size", "path: p50 µs", "`FARANDOLE_CMA=0`, path: p50 µs", "ratio", "bar"]
    return table(columns, cells)


# ---- schedules over shared-memory channels ----


def measure_scheduled(bench: Bench) -> list[Row]:
    sizes = [_MIB] if bench.quick else [_MIB, 4 * _MIB, 16 * _MIB, 64 * _MIB]
    settings = [
        Setting(),
        Setting("ring, fast", {"algorithm": "ring", "level": "fast"}),
        Setting("halving_doubling, canonical", {"algorithm": "halving_doubling"}),
    ]
    return run(bench, [bench.question("all_reduce", sizes)], [], settings)


def render_scheduled(rows: list[Row]) -> str:
    cells = []
    for row in rows:
        direct = only(rows, setting="", bytes=row["bytes"], memory=row["memory"])
        if row["setting"] == "" or direct is None:
            continue
        ratio = over(row, direct)
        cells.append(
            [
                format_size(row["bytes"]),
                row["memory"],
                row["setting"],
                time_of(row),
                f"{direct['algorithm']}: {time_of(direct)}",
                f"{100 / ratio['ratio']:.0f} %",
                ratio_cell(ratio),
                bars.verdict(ratio, bars.SCHEDULED[row["memory"]]),
            ]
        )
    columns = ["Size", "memory", "schedule", "p50 µs", "direct, µs", "bandwidth", "time", "bar"]
    return table(columns, cells)
