"""One rank of a peer: python worker.py PEER, under that peer's launcher (see __init__.py).

Of each call: the input is rewritten by its owner, the ranks meet, the call between two readings of
the clock, every element of the result compared. The ranks of every peer meet in the same way, by
flags in shared memory and not by the peer's own barrier, so that all leave it equally late.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from farandole._bench import data, placement

_WARM_UP = 3  # calls of every block that are not timed: the caches are the last block's


class Rank(NamedTuple):
    """This rank of its world, and how it makes an array with an in-place all-reduce (a sum)."""

    rank: int
    ranks: int
    version: str
    make: Callable[[int, str, str], tuple[NDArray[Any], Callable[[], Any]]]  # count, dtype, memory
    path: Callable[[], str]


def open_farandole() -> Rank:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    placement.pin(rank, ranks)
    import farandole as fd

    fd.init()

    def make(count: int, dtype: str, memory: str) -> tuple[NDArray[Any], Callable[[], Any]]:
        array = fd.allocate(count, dtype) if memory == "ours" else np.empty(count, dtype)
        return array, partial(fd.all_reduce, array, out=array)

    return Rank(rank, ranks, fd.__version__, make, lambda: str(fd.world().last_path))


def open_openmpi() -> Rank:
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    ranks = int(os.environ["OMPI_COMM_WORLD_SIZE"])
    placement.pin(rank, ranks)
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def make(count: int, dtype: str, memory: str) -> tuple[NDArray[Any], Callable[[], Any]]:
        assert memory == "caller"
        array = np.empty(count, dtype)
        return array, partial(world.Allreduce, MPI.IN_PLACE, array)

    version = MPI.Get_library_version().split(",")[0]
    return Rank(rank, ranks, version, make, lambda: "")


def open_gloo() -> Rank:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    placement.pin(rank, ranks)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")

    def make(count: int, dtype: str, memory: str) -> tuple[NDArray[Any], Callable[[], Any]]:
        assert memory == "caller"
        array = np.empty(count, dtype)
        return array, partial(dist.all_reduce, torch.from_numpy(array))

    return Rank(rank, ranks, f"torch {torch.__version__}", make, lambda: "")


OPEN = {"farandole": open_farandole, "openmpi": open_openmpi, "gloo": open_gloo}


class Meeting:
    """A barrier that leaves no rank much behind: each rank counts in a cache line of its own."""

    def __init__(self, path: str, rank: int, ranks: int) -> None:
        with Path(path).open("r+b") as file:
            self._flags = memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")
        step = len(self._flags) // ranks
        self._mine = rank * step
        self._others = [r * step for r in range(ranks) if r != rank]
        self._crowded = len(os.sched_getaffinity(0)) > 1  # not pinned: more ranks than cores
        self._turn = 0

    def __call__(self) -> None:
        self._turn = turn = self._turn + 1
        flags = self._flags
        flags[self._mine] = turn
        for other in self._others:
            while flags[other] < turn:
                if self._crowded:
                    os.sched_yield()


class Case:
    """Buffers of one size, and what they hold before and after."""

    def __init__(self, me: Rank, size: int, dtype: str, memory: str) -> None:
        self.array, self.call = me.make(size // np.dtype(dtype).itemsize, dtype, memory)
        self._turns = []
        for turn in range(4):
            parts = [data.contribution(r, me.ranks, turn, "sum", dtype) for r in range(me.ranks)]
            mine = data.encode(parts[me.rank], dtype)
            self._turns.append((mine, data.reduced(parts, "sum", dtype)))

    def measure(self, meet: Meeting, iterations: int) -> dict[str, Any]:
        times, wrong = [], 0
        clock, call = time.perf_counter_ns, self.call
        for turn in range(-_WARM_UP, iterations):
            before, after = self._turns[turn % 4]
            data.lay(before, self.array)
            meet()
            start = clock()
            call()
            end = clock()
            wrong += data.count_wrong(after, self.array)
            if turn >= 0:
                times.append(end - start)
        return {"times": times, "wrong": wrong}


def serve(me: Rank, lines: Any, meet: Meeting) -> None:
    """Answers questions until nobody asks any more."""
    case: dict[tuple[Any, ...], Case] = {}
    gc.disable()
    for line in lines:
        ask = json.loads(line)
        what = (ask["bytes"], ask["dtype"], ask["memory"])
        if what not in case:
            if any(other[:2] != what[:2] for other in case):
                case.clear()  # one size at a time stays in memory
            gc.collect()
            case[what] = Case(me, *what)
        answer = case[what].measure(meet, ask["iterations"])
        lines.write(json.dumps(answer | {"path": me.path()}) + "\n")
        lines.flush()


def main() -> None:
    me = OPEN[sys.argv[1]]()
    meet = Meeting(os.environ["BENCH_MEETING"], me.rank, me.ranks)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect("\0" + os.environ["BENCH_SOCKET"])
        with connection.makefile("rw") as lines:
            affinity = os.sched_getaffinity(0)
            about = {
                "rank": me.rank,
                "version": me.version,
                "core": min(affinity) if len(affinity) == 1 else None,
            }
            lines.write(json.dumps(about) + "\n")
            lines.flush()
            serve(me, lines, meet)


if __name__ == "__main__":
    main()
