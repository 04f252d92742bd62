"""Measures MPI's own all-reduce, and links over MPI, with the ranks that mpiexec started.
By these numbers the engine chooses between MPI's algorithm and its own.

Ranks are those of the job that is to be tuned, on its hosts. The time that a call takes to agree is
not counted in, as it is not in the predictions for schedules.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import farandole as fd
from farandole import _mpi
from farandole._tune import fit, links

_SIZES = (4096, 1 << 16, 1 << 20, 1 << 23)  # bytes
_PART_OF_TIME = 0.5  # for links
_LEAST_LEFT = 0.1  # of a time, when agreement and Python's part are taken off


@dataclass(frozen=True)
class OverMpi:
    """Numbers of a table, in seconds, and by how much slow readings exceeded quick ones."""

    seconds: dict[str, float]
    noise: float


def measure(seconds: float) -> OverMpi:
    """Joins the world of MPI_COMM_WORLD and measures for about that long; the same on every rank.

    Raises:
        RendezvousError: mpi4py is missing, or ranks do not come.
        InvalidArgument: the ranks share one host.
    """
    fd.init(comm=_mpi.all_ranks().given)
    if fd.cross_size() < 2:
        raise fd.InvalidArgument(
            f"MPI's all-reduce is chosen between hosts alone, and all {fd.size()} ranks share one"
        )
    host_of = np.ravel(fd.all_gather(np.array([fd.cross_rank()])))
    leaders = [int(np.argmax(host_of == host)) for host in range(1, fd.cross_size())]
    link = links.measure_from_first(leaders, seconds * _PART_OF_TIME)
    doublings = (fd.size() - 1).bit_length()
    agreed = links.python_part() + doublings * link.network_round
    sent = 2 * (fd.size() - 1) / fd.size()
    taken, noises = [], [link.noise]
    for size in _SIZES:
        data = np.ones(size // 4, np.float32)
        part = seconds * (1 - _PART_OF_TIME) / len(_SIZES)
        readings = links.times(fd.world(), data, part, "mpi")
        if not (data == fd.size()).all():
            raise RuntimeError(f"MPI's all-reduce of {size} bytes gave a wrong result")
        time = float(np.median(readings))
        taken.append(max(time - agreed, _LEAST_LEFT * time))
        noises.append(links.spread(readings))
    features = np.array([(doublings, sent * size) for size in _SIZES], np.float64)
    defaults = np.array([link.network_round, link.network_byte])
    round_, byte = fit.solve(features, np.array(taken), defaults).tolist()
    found = {
        "network_round": link.network_round, "network_byte": link.network_byte,
        "mpi_round": round_, "mpi_byte": byte,
    }  # fmt: skip
    return OverMpi(found, float(np.median(noises)))
