"""Kernels and exchanges beside the device's own copy: python bench/device/kernels.py

Ranks are threads of this process, so the driver's time slices, which processes that share a device
get by turns, are no part of it. Each figure is of the best of five batches, by the device's clock;
bytes are those of the device's memory that are read and written, at least. Every result is looked
at: one that is wrong is an error. Goals are of an H200.

Whatever PyTorch there is shows its own operations for the same.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# Streams that share a connection to the device can wait for each other. Before the driver begins.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

from farandole import _core, cuda
from farandole._bench.statistics import format_size, parse_size
from farandole._tables import Column, head_of, row_of

COPY, GATHER, SCATTER, FOLD, TWO_SHOT, ONE_SHOT, LANES = range(7)  # csrc/base/cuda_table.h
SHARE = 0.85  # of the copy's bandwidth, where that is a goal
LARGE = 64 << 20  # from where it is
MICROSECONDS, SMALL = 10.0, 8 << 10  # a one-shot of two ranks, up to so many bytes
PIECE = 16 << 20  # FARANDOLE_DEVICE_BUCKET_BYTES
LIMIT = 30  # seconds for a row, after which it says where it is, and ends
_GOAL = f"goal {MICROSECONDS:.0f} us"
BANDWIDTHS = (
    Column("what", 29), Column("of each", 7), Column("GB/s", 7), Column("of copy"),
    Column(f"goal {SHARE}"),
)  # fmt: skip
LATENCIES = (
    Column("bytes", 7), Column("us by events"), Column(_GOAL), Column("us by the host"),
    Column(_GOAL),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One measurement."""

    name: str
    what: int
    dtype: str = "float32"
    bucket: str = ""
    ranks: int = 1
    parts: int = 200


ROWS = (
    Row("pack 200 arrays", GATHER),
    Row("unpack them", SCATTER),
    Row("pack, cast to bfloat16", GATHER, bucket="bfloat16"),
    Row("fold of 2", FOLD, ranks=2),
    Row("fold of 2, bfloat16", FOLD, "bfloat16", ranks=2),
    Row("fold of 8", FOLD, ranks=8),
    Row("two-shot, 2 ranks", TWO_SHOT, ranks=2),
    Row("two-shot, 2 ranks, bfloat16", TWO_SHOT, "bfloat16", ranks=2),
    Row("two-shot, 4 ranks", TWO_SHOT, ranks=4),
    Row("a schedule by lanes, 2 ranks", LANES, ranks=2),
    Row("a schedule by lanes, 4 ranks", LANES, ranks=4),
)


def measured(row: Row, size: int, rounds: int) -> cuda._Measurement:
    """Raises RuntimeError where the results are wrong."""
    number = _core.dtypes.index
    asked = cuda._Measurement(
        device=0,
        what=row.what,
        dtype=number(row.dtype),
        bucket_dtype=number(row.bucket or row.dtype),
        ranks=row.ranks,
        parts=row.parts,
        rounds=rounds,
        bytes=size,
        piece_bytes=PIECE,
    )
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    cuda._measure(asked)
    faulthandler.cancel_dump_traceback_later()
    if not asked.right:
        raise RuntimeError(f"WRONG: {row.name} of {size} bytes")
    return asked


def bandwidth(size: int, rounds: int) -> Iterator[tuple[str, ...]]:
    def rate(found: cuda._Measurement) -> float:
        return float(found.moved / found.device_seconds / 1e9)

    copy = rate(measured(Row("the device's copy", COPY), size, rounds))
    yield "the device's copy", format_size(size), f"{copy:.1f}", "1", ""
    for row in ROWS:
        found = rate(measured(row, size, rounds))
        has_goal = size >= LARGE and row.what != LANES
        says = verdict(found >= SHARE * copy) if has_goal else ""
        yield row.name, format_size(size), f"{found:.1f}", f"{found / copy:.2f}", says
    for name, moved, seconds in of_torch(size, rounds):
        found = moved / seconds / 1e9
        yield name, format_size(size), f"{found:.1f}", f"{found / copy:.2f}", ""


def verdict(reached: bool) -> str:
    return "reached" if reached else "missed"


def latency(size: int, rounds: int) -> tuple[str, ...]:
    found = measured(Row("one-shot", ONE_SHOT, ranks=2), size, rounds)
    times = found.device_seconds * 1e6, found.host_seconds * 1e6
    says = [verdict(time <= MICROSECONDS) if size <= SMALL else "" for time in times]
    return format_size(size), f"{times[0]:.1f}", says[0], f"{times[1]:.1f}", says[1]


def of_torch(size: int, rounds: int) -> Iterator[tuple[str, int, float]]:
    """What PyTorch's own operations read and write, and in how many seconds."""
    if why_no_torch():
        return
    import torch

    count = size // 4
    parts = [torch.full((count // 200,), 1.5, device="cuda") for _ in range(200)]
    into = torch.empty(count // 200 * 200, device="cuda")
    one, other, to = (torch.full((count,), 1.5, device="cuda") for _ in range(3))
    work = {
        "torch.cat of 200": (lambda: torch.cat(parts, out=into), 2 * into.nbytes),
        "torch.add": (lambda: torch.add(one, other, out=to), 3 * to.nbytes),
    }
    for name, (run, moved) in work.items():
        best = float("inf")
        for _ in range(6):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(rounds):
                run()
            end.record()
            end.synchronize()
            best = min(best, begin.elapsed_time(end) / 1e3 / rounds)
        yield name, moved, best


def why_no_torch() -> str:
    if importlib.util.find_spec("torch") is None:
        return "there is no PyTorch: its own operations are not measured"
    import torch

    return "" if torch.cuda.is_available() else "this PyTorch sees no device: it is not measured"


def show(title: str, columns: Sequence[Column]) -> None:
    print(f"{title}\n\n{head_of(columns)}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", default="64M,256M", help="bytes of an array, for bandwidths")
    parser.add_argument("--small", default="4,1K,8K,64K", help="the same for a one-shot")
    parser.add_argument("--rounds", type=int, default=20, help="in a batch")
    arguments = parser.parse_args()
    print(f"on device 0, {cuda.devices()[0].name}; {why_no_torch() or 'beside PyTorch'}\n")
    show("bytes read and written in a second, ranks as threads", BANDWIDTHS)
    for size in map(parse_size, arguments.large.split(",")):
        for cells in bandwidth(size, arguments.rounds):
            print(row_of(BANDWIDTHS, cells), flush=True)
    show("\none-shot all-reduce of 2 ranks as threads", LATENCIES)
    for size in map(parse_size, arguments.small.split(",")):
        print(row_of(LATENCIES, latency(size, arguments.rounds)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
