"""Our collectives on buffers of one size, as they are measured."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

import farandole as fd
from farandole import _core
from farandole._bench.layouts import Buffers, Collective


def _ping_pong(x: Any, out: Any) -> None:
    """Even ranks send to their neighbour above, which sends back what came."""
    rank = fd.rank()
    if rank % 2:
        fd.send(fd.recv(out, rank - 1), rank - 1)
    elif rank + 1 < fd.size():
        fd.send(x, rank + 1)
        fd.recv(out, rank + 1)


class _Half(_core.Buffer):
    """A bfloat16 buffer with a shape, which numpy has no dtype for."""

    def __init__(self, array: NDArray[np.uint16]) -> None:
        super().__init__(array.ctypes.data, array.size, "bfloat16", array)
        self.shape = array.shape


class Case(Buffers):
    """One collective on buffers of one size in one kind of memory, on this rank."""

    def __init__(
        self, collective: Collective, size: int, dtype: str, memory: str, options: dict[str, Any]
    ) -> None:
        op, allocate = options.get("op", "sum"), fd.allocate if memory == "ours" else np.empty
        super().__init__(collective, size, dtype, fd.rank(), fd.size(), op, allocate)
        if not collective.moves:
            self.call = fd.barrier
            return
        half = dtype == "bfloat16"
        x, out = (_Half(a) if half and a is not None else a for a in (self.input, self.output))
        if collective.in_place:
            out = x
        if collective.name == "send_recv":
            self.call = partial(_ping_pong, x, out)
            return
        call = getattr(fd, collective.name)
        if options:
            self.call = partial(call, x, out=out, **options)
        else:
            self.call = lambda: call(x, out=out)  # as programs do; partial() copies its dict
