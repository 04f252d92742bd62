"""The cost of waiting: python bench/idle_cost.py

Rank 0 comes a second late, and the others wait for it. How much processor time did they burn, all
threads together, system calls included? A rank should be free to wait: its core may be wanted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import farandole as fd
from farandole import _launch
from farandole._bench import placement
from farandole._bench.statistics import format_size, median
from farandole.cli._terminal import print_table

_GOAL = 0.01  # of the time waited


def _asynchronous() -> Callable[[], Any]:
    array = np.ones(1 << 20, np.float32)
    return lambda: fd.all_reduce(array, out=array, async_op=True).wait()


def _synchronous(count: int) -> Callable[[], Any]:
    array = fd.allocate(count)
    return lambda: fd.all_reduce(array, out=array)


WAITS: dict[str, Callable[[], Callable[[], Any]]] = {
    "barrier": lambda: fd.barrier,
    f"all_reduce of {format_size(4)}": lambda: _synchronous(1),
    f"all_reduce of {format_size(1 << 20)}": lambda: _synchronous(1 << 18),
    f"all_reduce of {format_size(4 << 20)}, async_op, Handle.wait": _asynchronous,
}


def measure(what: str, late: float, rounds: int) -> dict[str, Any]:
    """One kind of wait; the same row on every rank."""
    call = WAITS[what]()
    call()
    waited, burnt = [], []
    for _ in range(rounds):
        fd.barrier()
        start, start_cpu = time.perf_counter(), time.process_time_ns()
        if fd.rank() == 0:
            time.sleep(late)
        call()
        waited.append(time.perf_counter() - start)
        burnt.append((time.process_time_ns() - start_cpu) / 1e6)
    # Rank 0 sleeps in the kernel: what it burns is the call alone. The others' most counts.
    everyone = fd.all_gather(np.array([burnt]))
    worst = everyone[1:].max(0).tolist() if fd.size() > 1 else burnt
    middle, seconds = median(worst), median(waited)
    return {
        "benchmark": "idle_cost",
        "ranks": fd.size(),
        "wait": what,
        "waited_s": seconds,
        "cpu_ms": middle,
        "cpu_max_ms": max(worst),
        "verified": middle < 1e3 * _GOAL * seconds,
    }


def _rank(arguments: argparse.Namespace) -> int:
    core = placement.pin(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    fd.init()
    pins = fd.all_gather(np.array([-1 if core is None else core])).tolist()
    rows = [measure(what, arguments.late, arguments.rounds) for what in WAITS]
    if fd.rank() == 0:
        placed = placement.describe([None if p < 0 else p for p in pins])
        columns = ["wait", "waited s", "processor ms (median)", "(most)", "below 1 %"]
        cells = [
            [
                row["wait"],
                f"{row['waited_s']:.2f}",
                f"{row['cpu_ms']:.2f}",
                f"{row['cpu_max_ms']:.2f}",
                "yes" if row["verified"] else "NO",
            ]
            for row in rows
        ]
        print_table(f"cost of waiting, {fd.size()} ranks, {placed}", columns, cells)
        if arguments.json is not None:
            arguments.json.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    return 0 if all(row["verified"] for row in rows) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("-np", type=int, default=2, dest="ranks", help="ranks, from 2 on (2)")
    parser.add_argument("--late", type=float, default=1.0, help="seconds rank 0 comes late (1)")
    parser.add_argument("--rounds", type=int, default=5, help="waits of each kind (5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON")
    arguments = parser.parse_args()
    if arguments.ranks < 2 or arguments.rounds < 1 or not 0 < arguments.late < 1e3:
        parser.error("two ranks, one round and some seconds are the least")
    if "RANK" in os.environ:
        return _rank(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, *sys.argv]
    return _launch.launch(_launch.Job(command=command, ranks=arguments.ranks, prefix=False))


if __name__ == "__main__":
    sys.exit(main())
