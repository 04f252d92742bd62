"""An all-reduce of two ranks by an MPI's bare messages: the same bytes, and the fold.

Small arrays are exchanged whole. Of others each rank folds one half and sends the result back.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from farandole._bench.layouts import COLLECTIVES, Buffers
from farandole._bench.peers.libraries import Member, Unable, mpi

_SMALL = 64 << 10


def join() -> Member:
    joined = mpi.world()

    def make(ask: dict[str, Any]) -> Buffers:
        if joined.ranks != 2 or ask["collective"] != "all_reduce":
            raise Unable("the floor of an MPI's messages is an all_reduce of two ranks")
        if ask["dtype"] in mpi.HALVES:
            raise Unable(f"MPI has no {ask['dtype']}")
        return _Floor(joined.mpi.COMM_WORLD, ask, joined.rank)

    return Member(joined.rank, joined.ranks, joined.version, make)


class _Floor(Buffers):
    def __init__(self, world: Any, ask: dict[str, Any], rank: int) -> None:
        super().__init__(COLLECTIVES[ask["collective"]], ask["bytes"], ask["dtype"], rank, 2)
        assert self.output is not None
        array, middle = self.output, self.output.size // 2
        halves = array[:middle], array[middle:]
        self._whole, self._mine, self._others = array, halves[rank], halves[1 - rank]
        self._world, self._peer = world, 1 - rank
        is_small = array.nbytes <= _SMALL
        self._scratch = np.empty_like(self._whole if is_small else self._mine)
        self.call = self._at_once if is_small else self._by_halves

    def _exchange(self, out: NDArray[Any], into: NDArray[Any]) -> None:
        self._world.Sendrecv(out, self._peer, 0, into, self._peer, 0)

    def _at_once(self) -> None:
        self._exchange(self._whole, self._scratch)
        np.add(self._whole, self._scratch, out=self._whole)

    def _by_halves(self) -> None:
        self._exchange(self._others, self._scratch)
        np.add(self._mine, self._scratch, out=self._mine)
        self._exchange(self._mine, self._others)
