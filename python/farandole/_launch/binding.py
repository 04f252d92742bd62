"""The processors that each rank of a host may run on."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

from farandole import _topology
from farandole._launch.job import LaunchError

BINDINGS = ("none", "core", "numa")


def shares(binding: str, ranks: int, system: Path = _topology.SYSTEM) -> list[set[int]]:
    """Those of each local rank, in order; none at all for "none". Neighbours of a rank's core that
    are threads of it are the rank's, too.

    Raises:
        LaunchError: there are more ranks than cores.
    """
    if binding == "none":
        return []
    usable = os.sched_getaffinity(0)
    nodes = [cpus & usable for cpus in _topology.nodes(system) if cpus & usable] or [usable]
    if binding == "numa":
        return [nodes[rank * len(nodes) // ranks] for rank in range(ranks)]
    cores = [core for node in nodes for core in _topology.cores(node, system)]
    if ranks > len(cores):
        raise LaunchError(
            f"--bind core: {ranks} ranks are to have cores of their own, and {len(cores)} are "
            "usable; start fewer ranks, or leave --bind out",
            2,
        )
    cuts = [rank * len(cores) // ranks for rank in range(ranks + 1)]
    return [set().union(*cores[a:b]) for a, b in pairwise(cuts)]
