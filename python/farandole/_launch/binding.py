"""The processors that each rank of a host may run on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from farandole._launch.job import LaunchError

BINDINGS = ("none", "core", "numa")

_SYSTEM = Path("/sys/devices/system")


def shares(binding: str, ranks: int, system: Path = _SYSTEM) -> list[set[int]]:
    """Those of each local rank, in order; none at all for "none". Neighbours of a rank's core that
    are threads of it are the rank's, too.

    Raises:
        LaunchError: there are more ranks than cores.
    """
    if binding == "none":
        return []
    usable = os.sched_getaffinity(0)
    nodes = [cpus & usable for cpus in _nodes(system) if cpus & usable] or [usable]
    if binding == "numa":
        return [nodes[rank * len(nodes) // ranks] for rank in range(ranks)]
    cores = [core for node in nodes for core in _cores(node, system)]
    if ranks > len(cores):
        raise LaunchError(
            f"--bind core: {ranks} ranks are to have cores of their own, and {len(cores)} are "
            "usable; start fewer ranks, or leave --bind out",
            2,
        )
    cuts = [rank * len(cores) // ranks for rank in range(ranks + 1)]
    return [set().union(*cores[a:b]) for a, b in pairwise(cuts)]


def _nodes(system: Path) -> Iterator[set[int]]:
    """The processors of each NUMA node; none where the kernel knows of none."""
    folders = (system / "node").glob("node[0-9]*")
    for folder in sorted(folders, key=lambda one: int(one.name[4:])):
        yield _listed((folder / "cpulist").read_text())


def _cores(cpus: set[int], system: Path) -> list[set[int]]:
    """By core, in order: its threads among `cpus`."""
    cores: dict[int, set[int]] = {}
    for cpu in sorted(cpus):
        file = system / f"cpu/cpu{cpu}/topology/thread_siblings_list"
        threads = _listed(file.read_text()) if file.exists() else {cpu}
        cores.setdefault(min(threads & cpus or {cpu}), set()).add(cpu)
    return list(cores.values())


def _listed(text: str) -> set[int]:
    """'0-3,8' as numbers."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found
