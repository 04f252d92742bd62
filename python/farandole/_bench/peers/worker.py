"""One rank of a peer, under that peer's launcher (see workers.py).

Of each call: the input is rewritten by its owner, the ranks meet, the call between two readings of
the clock, every element of the result compared. The ranks of every peer meet in the same way, by
flags in shared memory and not by the peer's own barrier, so that all leave it equally late.

*Hot*: the input is written once (zeros, which every sum leaves as they are), the calls follow each
other after a meeting, and one more call on a known input is verified at the end.
"""

from __future__ import annotations

import gc
import importlib
import json
import mmap
import os
import socket
import time
from pathlib import Path
from typing import IO, Any

from farandole._bench.layouts import Buffers
from farandole._bench.peers.libraries import Member, Unable


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


def measure(case: Buffers, meet: Meeting, ask: dict[str, Any]) -> dict[str, Any]:
    """A block: some calls that are not timed (the caches are the last block's), then the others."""
    times, wrong = [], 0
    clock, call, hot = time.perf_counter_ns, case.call, ask["hot"]
    begin, before = clock(), _sent()
    if hot:
        case.clear()
    for turn in range(-ask["warm"], ask["iterations"]):
        if not hot:
            case.prepare(turn)
        meet()
        start = clock()
        call()
        end = clock()
        if not hot:
            wrong += case.count_wrong(turn)
        if turn >= 0:
            times.append(end - start)
    wall = clock() - begin
    if hot:
        case.prepare(0)
        meet()
        call()
        wrong = case.count_wrong(0)
    calls = ask["warm"] + ask["iterations"] + hot
    sent = (_sent() - before) // calls
    return {"times": times, "wrong": wrong, "wall": wall, "bytes": case.bytes, "sent": sent}


def _sent() -> int:
    """Bytes that have left by any interface of this rank's network, in packets."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    return sum(int(line.partition(":")[2].split()[8]) for line in lines)


def serve(me: Member, lines: IO[str], meet: Meeting) -> None:
    """Answers questions until nobody asks any more."""
    cases: dict[str, Buffers] = {}
    kept: Any = None
    gc.disable()
    for line in lines:
        ask = json.loads(line)
        key = json.dumps([ask[k] for k in ("collective", "bytes", "dtype", "memory", "options")])
        try:
            if key not in cases:
                if kept != ask["keep"]:
                    kept = ask["keep"]
                    cases.clear()  # one size at a time stays in memory
                gc.collect()
                cases[key] = me.make(ask)
            answer = measure(cases[key], meet, ask) | {"path": me.path()}
        except Unable as why:
            answer = {"unable": str(why)}
        lines.write(json.dumps(answer) + "\n")
        lines.flush()


def main(library: str) -> None:
    me: Member = importlib.import_module(f"farandole._bench.peers.libraries.{library}").join()
    meet = Meeting(os.environ["BENCH_MEETING"], me.rank, me.ranks)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ["BENCH_SOCKET"])
        with connection.makefile("rw") as lines:
            affinity = os.sched_getaffinity(0)
            core = min(affinity) if len(affinity) == 1 else None
            about = {"rank": me.rank, "version": me.version, "core": core}
            lines.write(json.dumps(about) + "\n")
            lines.flush()
            serve(me, lines, meet)
