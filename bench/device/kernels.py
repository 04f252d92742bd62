"""Kernels and exchanges beside the device's own copy: python bench/device/kernels.py

Ranks are threads of one process, so the driver's time slices, which processes that share a device
get by turns, are no part of it. Each figure is of the best of five batches, by the device's clock;
bytes are those of the device's memory that are read and written, at least. Every result is looked
at: one that is wrong is an error. Goals are of an H200.

Each row has a process of its own, and a limit: one that fails says so in place of its figures, and
costs itself alone. Whatever PyTorch there is shows its own operations for the same, by one process.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
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
PIECE = 32 << 20  # FARANDOLE_DEVICE_BUCKET_BYTES
LIMIT = 12  # seconds for a row
TORCH_LIMIT = 60  # for all of PyTorch's
FOUND = ("moved", "device_seconds", "host_seconds")
TORCH = "torch"  # in place of a row
NO_DEVICE = "this PyTorch sees no device: it is not measured"
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


THE_COPY = Row("the device's copy", COPY)
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


class Failed(Exception):
    """A row, and why."""


def one_process(limit: float, *options: str) -> tuple[str, str]:
    """The output of this program with these options, and why it is incomplete, or empty."""
    process = subprocess.Popen(
        [sys.executable, __file__, *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
    )  # fmt: skip
    try:
        printed, said = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0], f"not done after {limit} s"
    last = said.strip().rpartition("\n")[2]
    return printed, (last or f"exit code {process.returncode}") if process.returncode else ""


def measured(row: Row, size: int, rounds: int) -> dict[str, float]:
    """By a process of its own; raises Failed."""
    number = _core.dtypes.index
    asked = {
        "device": 0,
        "what": row.what,
        "dtype": number(row.dtype),
        "bucket_dtype": number(row.bucket or row.dtype),
        "ranks": row.ranks,
        "parts": row.parts,
        "rounds": rounds,
        "bytes": size,
        "piece_bytes": PIECE,
    }
    printed, why = one_process(LIMIT, "--one", json.dumps(asked))
    if why:
        raise Failed(why)
    found: dict[str, float] = json.loads(printed)
    return found


def measure(asked: dict[str, int]) -> int:
    """As that process."""
    found = cuda._Measurement(**asked)
    try:
        cuda._measure(found)
    except _core.Error as error:
        sys.exit(" ".join(str(error).split()))
    if not found.right:
        sys.exit("WRONG results")
    print(json.dumps({name: getattr(found, name) for name in FOUND}))
    return 0


Cells = tuple[str, ...]


def bandwidth(size: int, rounds: int, copies: dict[int, float]) -> Iterator[tuple[bool, Cells]]:
    """Rows, and whether each did well. Of the copy's bandwidth later ones are shares."""
    for row in (THE_COPY, *ROWS):
        try:
            found = measured(row, size, rounds)
        except Failed as why:
            yield False, (row.name, format_size(size), str(why), "", "")
            continue
        rate = found["moved"] / found["device_seconds"] / 1e9
        if row is THE_COPY:
            copies[size] = rate
        yield True, rate_row(row.name, size, rate, copies, judged=row in ROWS and row.what != LANES)


def rate_row(name: str, size: int, rate: float, copies: dict[int, float], *, judged: bool) -> Cells:
    share = rate / copies[size] if size in copies else 0.0
    says = verdict(share >= SHARE) if share and judged and size >= LARGE else ""
    return name, format_size(size), f"{rate:.1f}", f"{share:.2f}" if share else "", says


def verdict(reached: bool) -> str:
    return "reached" if reached else "missed"


def latency(size: int, rounds: int) -> tuple[bool, Cells]:
    try:
        found = measured(Row("one-shot", ONE_SHOT, ranks=2), size, rounds)
    except Failed as why:
        return False, (format_size(size), str(why), "", "", "")
    times = found["device_seconds"] * 1e6, found["host_seconds"] * 1e6
    says = [verdict(time <= MICROSECONDS) if size <= SMALL else "" for time in times]
    return True, (format_size(size), f"{times[0]:.1f}", says[0], f"{times[1]:.1f}", says[1])


def beside_torch(large: str, rounds: int, copies: dict[int, float]) -> Iterator[tuple[bool, Cells]]:
    if importlib.util.find_spec("torch") is None:
        yield True, ("there is no PyTorch: its own operations are not measured", "", "", "", "")
        return
    options = ["--one", TORCH, "--large", large, "--rounds", str(rounds)]
    printed, why = one_process(TORCH_LIMIT, *options)
    for line in printed.splitlines():
        name, size, rate = json.loads(line)
        yield True, rate_row(name, size, rate, copies, judged=False)
    if why:
        sees_none = why == NO_DEVICE
        yield sees_none, (why, "", "", "", "") if sees_none else ("PyTorch's own", "", why, "", "")


def measure_torch(sizes: Sequence[int], rounds: int) -> int:
    """As the process for all of it, a line for each."""
    import torch

    if not torch.cuda.is_available():
        sys.exit(NO_DEVICE)
    for size in sizes:
        for name, moved, seconds in of_torch(size, rounds):
            print(json.dumps([name, size, moved / seconds / 1e9]), flush=True)
    return 0


def of_torch(size: int, rounds: int) -> Iterator[tuple[str, int, float]]:
    """PyTorch's own operations: the bytes that they read and write, and their seconds."""
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


def show(title: str, columns: Sequence[Column], rows: Iterable[tuple[bool, Cells]]) -> bool:
    """Each when it is done; whether all did well."""
    print(f"{title}\n\n{head_of(columns)}", flush=True)
    all_well = True
    for well, cells in rows:
        print(row_of(columns, cells), flush=True)
        all_well = all_well and well
    return all_well


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", default="64M,256M", help="bytes of an array, for bandwidths")
    parser.add_argument("--small", default="4,1K,8K,64K", help="the same for a one-shot")
    parser.add_argument("--rounds", type=int, default=20, help="in a batch")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # row: what its process measures
    arguments = parser.parse_args()
    large, small = (
        [*map(parse_size, sizes.split(","))] for sizes in (arguments.large, arguments.small)
    )
    rounds: int = arguments.rounds
    if arguments.one == TORCH:
        return measure_torch(large, rounds)
    if arguments.one:
        return measure(json.loads(arguments.one))
    print(f"on device 0, {cuda.devices()[0].name}\n")
    copies: dict[int, float] = {}

    def rates() -> Iterator[tuple[bool, Cells]]:
        for size in large:
            yield from bandwidth(size, rounds, copies)
        yield from beside_torch(arguments.large, rounds, copies)

    well = show("bytes read and written in a second, ranks as threads", BANDWIDTHS, rates())
    title = "\none-shot all-reduce of 2 ranks as threads"
    well &= show(title, LATENCIES, (latency(size, rounds) for size in small))
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
