"""What is measured: a row per collective, with nccl-tests' definitions.

``bytes`` is the size of the larger of input and output on one rank: of all_gather the output's, of
reduce_scatter the input's, of gather and scatter the root's. Algorithm bandwidth is ``bytes`` over
time. Bus bandwidth multiplies it by the part of ``bytes`` that must leave each rank in any
algorithm, so that it can be compared with what the hardware carries, whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

import farandole as fd
from farandole import _core
from farandole._bench import data

Patterns = list[NDArray[np.int64]]  # what each rank contributes


@dataclass(frozen=True)
class Collective:
    """One collective: how much it moves, whether it folds, and what its output must hold."""

    name: str
    bus_factor: Callable[[int], float]  # of the number of ranks
    moves: bool = True  # has input and output
    folds: bool = False  # takes op and level
    in_place: bool = False
    part_in: bool = False  # the input is a part of the output, one per rank; likewise part_out
    part_out: bool = False
    blocks: bool = False  # whole in and out, in a block for every rank
    root_in: bool = False  # rank 0 alone has input; likewise root_out
    root_out: bool = False


def _one(n: int) -> float:  # noqa: ARG001
    return 1.0


def _others(n: int) -> float:
    """The part of all that is not a rank's own."""
    return (n - 1) / n


COLLECTIVES = {
    row.name: row
    for row in (
        Collective("all_reduce", lambda n: 2 * (n - 1) / n, folds=True, in_place=True),
        Collective("broadcast", _one, in_place=True),
        Collective("all_gather", _others, part_in=True),
        Collective("reduce_scatter", _others, folds=True, part_out=True),
        Collective("all_to_all", _others, blocks=True),
        Collective("reduce", _one, folds=True, root_out=True),
        Collective("gather", _others, part_in=True, root_out=True),
        Collective("scatter", _others, part_out=True, root_in=True),
        # Ping-pong of neighbours: `bytes` cross twice, one after the other.
        Collective("send_recv", lambda n: 2.0 if n > 1 else 0.0),
        Collective("barrier", lambda n: 0.0, moves=False),  # noqa: ARG005
    )
}


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


class Case:
    """One collective on buffers of one size in one kind of memory, on this rank."""

    def __init__(
        self,
        collective: Collective,
        size: int,
        dtype: str,
        memory: str,
        options: dict[str, Any],
    ) -> None:
        ranks = fd.size()
        item = data.storage(dtype).itemsize
        count = size // item
        if collective.part_in or collective.part_out or collective.blocks:
            count = data.round_up(count, ranks)
        self.bytes = count * item
        self._collective = collective
        self._dtype = dtype
        self._op = options.get("op", "sum")
        whole, part = (self._allocate(n, memory) for n in (count, count // ranks))
        self._input = part if collective.part_in else whole
        self._output = part if collective.part_out else whole
        if not collective.in_place and self._input is self._output:
            self._output = self._allocate(count, memory)
        if not collective.moves:
            self.call: Callable[[], Any] = fd.barrier
            return
        borrowed = [_Half(a) if dtype == "bfloat16" else a for a in (self._input, self._output)]
        if collective.in_place:
            borrowed[1] = borrowed[0]
        self._has_input = fd.rank() == 0 or not collective.root_in
        self._has_output = fd.rank() == 0 or not collective.root_out
        x = borrowed[0] if self._has_input else None
        out = borrowed[1] if self._has_output else None
        if collective.name == "send_recv":
            self.call = partial(_ping_pong, x, out)
        else:
            self.call = partial(getattr(fd, collective.name), x, out=out, **options)
        self._turns = [self._plan(turn) for turn in range(4)]

    def _allocate(self, count: int, memory: str) -> NDArray[Any]:
        kind = data.storage(self._dtype)
        return fd.allocate(count, kind) if memory == "ours" else np.empty(count, kind)

    def _plan(self, turn: int) -> tuple[NDArray[Any], list[tuple[slice, NDArray[Any], int]]]:
        """What goes in, and what comes out: (where, pattern, phase)."""
        rank, ranks = fd.rank(), fd.size()
        everything = [
            data.contribution(r, ranks, turn, self._op, self._dtype) for r in range(ranks)
        ]
        stored = [data.encode(pattern, self._dtype) for pattern in everything]
        return stored[rank], self._expected(everything, stored) if self._has_output else []

    def _expected(
        self, everything: Patterns, stored: list[NDArray[Any]]
    ) -> list[tuple[slice, NDArray[Any], int]]:
        rank, ranks = fd.rank(), fd.size()
        whole, mine = slice(0, self._output.size), rank * self._output.size
        collective = self._collective
        if collective.folds:
            result = data.reduced(everything, self._op, self._dtype)
            return [(whole, result, mine if collective.part_out else 0)]
        if collective.part_in or collective.blocks:
            n = self._output.size // ranks
            phase = rank * n if collective.blocks else 0
            return [(slice(r * n, (r + 1) * n), stored[r], phase) for r in range(ranks)]
        if collective.name == "send_recv":
            alone = rank % 2 == 0 and rank + 1 == ranks
            return [] if alone else [(whole, stored[rank - rank % 2], 0)]
        return [(whole, stored[0], mine if collective.part_out else 0)]

    def prepare(self, turn: int) -> None:
        """The owner writes its input, as a program's own computation would."""
        if self._collective.moves and self._has_input:
            data.lay(self._turns[turn % 4][0], self._input)

    def clear(self) -> None:
        """Zeros, which every sum leaves as they are."""
        self._input[...] = 0

    def count_wrong(self, turn: int) -> int:
        """Elements of the result that are not what they must be."""
        if not self._collective.moves:
            return 0
        expected = self._turns[turn % 4][1]
        return sum(data.count_wrong(p, self._output[where], phase) for where, p, phase in expected)
