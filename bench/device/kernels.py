"""Kernels beside the device's own copy: python bench/device/kernels.py

Those of the farandole that is installed, alone on the device. Each figure is of the best of five
batches, by the device's clock; bytes are those of the device's memory that are read and written.
Every result is looked at: one that is wrong is an error. Goals are of an H200.

Each row has a process of its own, and a limit: one that fails says so in place of its figures, and
costs itself alone. Whatever PyTorch there is shows its own operations for the same.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from driver import Device, Failed, Fold, Piece, Pieces, Scaling

from farandole import cuda
from farandole._bench.statistics import format_size, parse_size
from farandole._tables import Column, head_of, row_of

SHARE = 0.85  # of the copy's bandwidth, where that is a goal
LARGE = 64 << 20  # from where it is
LIMIT = 12  # seconds for a row
TORCH_LIMIT = 60  # for all of PyTorch's
TORCH = "torch"  # in place of a row
NO_DEVICE = "this PyTorch sees no device: it is not measured"
BANDWIDTHS = (
    Column("what", 29), Column("of each", 7), Column("GB/s", 7), Column("of copy"),
    Column(f"goal {SHARE}"),
)  # fmt: skip
NUMBER = 1.5  # in all inputs: it and its sums are exact in each dtype
PARTS = 200  # arrays that are packed
CHUNK = 4096  # elements of a piece that a block takes: csrc/cuda/kernels/parameters.h
FOLD_CHUNK = 16 << 10  # bytes that a block folds: csrc/cuda/plans.cpp
ONE = Scaling(1, 1, 0, 1)  # scales by nothing


@dataclass(frozen=True)
class Row:
    """One measurement."""

    name: str
    what: str  # copy, pack or fold
    dtype: str = "float32"
    sources: int = 1  # of a fold


THE_COPY = Row("the device's copy", "copy")
ROWS = (
    Row("pack 200 arrays", "pack"),
    Row("fold of 2", "fold", sources=2),
    Row("fold of 2, bfloat16", "fold", "bfloat16", sources=2),
    Row("fold of 8", "fold", sources=8),
)


@dataclass(frozen=True)
class Work:
    """What a row puts into the stream, over and over; and what it is to leave there."""

    moved: int  # bytes that are read and written
    launch: Callable[[], None]
    output: int
    size: int
    word: int


def word_of(number: float, dtype: str) -> int:
    """The number, as it fills words of memory."""
    (bits,) = struct.unpack("<I", struct.pack("<f", number))
    return int(bits) if dtype == "float32" else (bits >> 16) * 0x10001


def copy(device: Device, row: Row, size: int) -> Work:
    word = word_of(NUMBER, row.dtype)
    source, to = device.array(size, word), device.array(size, 0)
    return Work(2 * size, lambda: device.copy(to, source, size), to, size, word)


def pack(device: Device, row: Row, size: int) -> Work:
    count = size // 4 // PARTS
    size, word = 4 * count * PARTS, word_of(NUMBER, row.dtype)
    source, to = device.array(size, word), device.array(size, 0)
    chunks = -(-count // CHUNK)
    pieces = (Piece * PARTS)(
        *((source + 4 * count * i, to + 4 * count * i, count, chunks * i) for i in range(PARTS))
    )
    job = Pieces(device.put(pieces), PARTS, chunks * PARTS, ONE)
    launch = device.kernel("farandole_copy_uint32", chunks * PARTS, job)
    return Work(2 * size, launch, to, size, word)


def fold(device: Device, row: Row, size: int) -> Work:
    sources = [device.array(size, word_of(NUMBER, row.dtype)) for _ in range(row.sources)]
    to = device.array(size, 0)
    count = size // (4 if row.dtype == "float32" else 2)
    job = Fold(count, len(sources), 1, 0, ONE, ONE)
    job.sources[: len(sources)] = sources
    job.destinations[0] = to
    launch = device.kernel(f"farandole_fold_{row.dtype}", -(-size // FOLD_CHUNK), job)
    word = word_of(NUMBER * row.sources, row.dtype)
    return Work((row.sources + 1) * size, launch, to, size, word)


WORK = {"copy": copy, "pack": pack, "fold": fold}


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


def measured(row: Row, size: int, rounds: int) -> float:
    """Bytes a second, by a process of its own; raises Failed."""
    asked = {**asdict(row), "size": size, "rounds": rounds}
    printed, why = one_process(LIMIT, "--one", json.dumps(asked))
    if why:
        raise Failed(why)
    return float(printed)


def measure(size: int, rounds: int, **row: Any) -> int:
    """As that process."""
    asked = Row(**row)
    try:
        device = Device()
        work = WORK[asked.what](device, asked, size)
        seconds = device.best_round(rounds, work.launch)
        right = device.is_full_of(work.output, work.size, work.word)
    except Failed as why:
        sys.exit(str(why))
    if not right:
        sys.exit("WRONG results")
    print(work.moved / seconds)
    return 0


Cells = tuple[str, ...]


def bandwidth(size: int, rounds: int, copies: dict[int, float]) -> Iterator[tuple[bool, Cells]]:
    """Rows, and whether each did well. Of the copy's bandwidth later ones are shares."""
    for row in (THE_COPY, *ROWS):
        try:
            rate = measured(row, size, rounds) / 1e9
        except Failed as why:
            yield False, (row.name, format_size(size), str(why), "", "")
            continue
        if row is THE_COPY:
            copies[size] = rate
        yield True, rate_row(row.name, size, rate, copies, judged=row in ROWS)


def rate_row(name: str, size: int, rate: float, copies: dict[int, float], *, judged: bool) -> Cells:
    share = rate / copies[size] if size in copies else 0.0
    reached = "reached" if share >= SHARE else "missed"
    says = reached if share and judged and size >= LARGE else ""
    return name, format_size(size), f"{rate:.1f}", f"{share:.2f}" if share else "", says


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
    parser.add_argument("--large", default="64M,256M", help="bytes of an array")
    parser.add_argument("--rounds", type=int, default=20, help="in a batch")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # row: what its process measures
    arguments = parser.parse_args()
    large = [*map(parse_size, arguments.large.split(","))]
    rounds: int = arguments.rounds
    if arguments.one == TORCH:
        return measure_torch(large, rounds)
    if arguments.one:
        return measure(**json.loads(arguments.one))
    print(f"on device 0, {cuda.devices()[0].name}\n")
    copies: dict[int, float] = {}

    def rates() -> Iterator[tuple[bool, Cells]]:
        for size in large:
            yield from bandwidth(size, rounds, copies)
        yield from beside_torch(arguments.large, rounds, copies)

    return 0 if show("bytes read and written in a second", BANDWIDTHS, rates()) else 1


if __name__ == "__main__":
    sys.exit(main())
