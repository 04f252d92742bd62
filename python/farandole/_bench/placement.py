"""One core for each rank of the host, where there are enough."""

from __future__ import annotations

import os
from pathlib import Path

from farandole import _topology


def pin(local_rank: int, local_size: int) -> int | None:
    """Binds this process to a core of its own; None if there are fewer cores than ranks.

    To be called before ``farandole.init()``, which looks at the affinity of all ranks to decide how
    long to spin, and before threads are started, which inherit it.
    """
    cores = cores_in_order(os.sched_getaffinity(0))
    if len(cores) < local_size:
        return None
    os.sched_setaffinity(0, {cores[local_rank]})
    return cores[local_rank]


def cores_in_order(usable: set[int], system: Path = _topology.SYSTEM) -> list[int]:
    """Cores before their hyper-threads: ranks share one only when there is no other."""
    first = [min(core) for core in _topology.cores(usable, system)]
    return [*first, *sorted(usable.difference(first))]


def describe(pins: list[int | None]) -> str:
    """'one core per rank (0, 1)'."""
    if None in pins:
        return f"not pinned: {len(os.sched_getaffinity(0))} usable cores for {len(pins)} ranks"
    return f"one core per rank ({', '.join(map(str, pins))})"
