"""The ratios that are promised, and whether a measured one keeps its bar. Pure.

A bar is the greatest ratio of our time over somebody's. It holds when the ratio measured does not
exceed it; where the interval reaches over the bar, noise may decide otherwise next time, and that
is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

KIB, MIB = 1 << 10, 1 << 20

# All-reduce of float32 on two ranks over the best MPI's: (ours, caller's memory) by size.
ALL_REDUCE = {
    4: (1.0, 1.0),
    KIB: (0.6, 0.9),
    16 * KIB: (0.5, 1.1),
    256 * KIB: (0.5, 1.0),
    MIB: (0.4, 0.9),
    4 * MIB: (0.35, 0.7),
    16 * MIB: (0.35, 0.7),
    64 * MIB: (0.35, 0.75),
}
GLOO = 1.0  # never slower
HALVES = 0.6  # of our float32 time for as many elements
COPYING = 1.6  # the copying path over cma
SCHEDULED = {"caller": 1 / 0.5, "ours": 1 / 0.35}  # schedules over the direct path, from 1 MiB
OTHERS = 1.0  # the other collectives over the best MPI, from 64 KiB
START_SECONDS = 0.3  # from launch to the first all-reduce
OVERHEAD = {"mlp": 0.30, "cnn": 0.02, "transformer": 0.06}  # of a training step
OF_LEAN_DDP = {"mlp": 1 / 3, "transformer": 1 / 3}  # of its overhead
OVERLAP = 0.02  # a step with overlap over one without, less one
UNDER_DDP = 0.10  # a step of DDP over our hook or backend over our optimizer's, less one
NAMED_MS = {"1000 x 1 KiB": 2.7, "171 like ResNet-50, 94 MB": 24.0}  # of a step, milliseconds
NAMED = 1 / 5  # of gloo's, tensor by tensor
GRAPH_OP_US = 5.0  # what an all-reduce adds to a graph of TensorFlow, without other ranks
IDLE = 0.01  # of the time waited

# Between two hosts, over the best MPI's time: of 4 B, and of 16 MiB, unless the floor is near it.
NETWORK_SMALL, NETWORK_LARGE = 1.2, 0.5
NETWORK_FLOOR_IS_NEAR, NETWORK_FLOOR = 0.43, 1.15  # of the best MPI's; over the floor
GIGABIT = {16 * MIB: 1 / 0.93, 64 * MIB: 1 / 0.97}  # over a bare copy both ways
OVER_MPI = {4: 1.5, 16 * MIB: 0.6}  # on one host, through an MPI, over its own Allreduce
MPI_FLOOR_IS_NEAR = OVER_MPI[16 * MIB] / NETWORK_FLOOR  # of its Allreduce
LEVELS = 1 / 1.4  # two ranks on each of two hosts, over the flat ring


def crowded(size: int, memory: str) -> float | None:
    """Four ranks on two cores, over the best MPI."""
    if size <= 16 * KIB:
        return 1.2
    if size < MIB:
        return None
    return 0.6 if memory == "ours" else 1.0


def verdict(ratio: Mapping[str, Any], limit: float | None) -> str:
    """'≤ 0.50: yes'; 'NO' where the bar is broken."""
    if limit is None:
        return ""
    if ratio["ratio"] <= limit:
        doubt = " (noise reaches over it)" if ratio["high"] > limit else ""
        return f"≤ {limit:.2f}: yes{doubt}"
    doubt = " (within noise)" if ratio["low"] <= limit else ""
    return f"≤ {limit:.2f}: **NO**{doubt}"


def broken(text: str) -> Iterator[str]:
    """The lines of a part's text whose bar does not hold."""
    return (line for line in text.splitlines() if "**NO**" in line)
