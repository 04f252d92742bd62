"""What is measured: a row per collective, with nccl-tests' definitions.

``bytes`` is the size of the larger of input and output on one rank: of all_gather the output's, of
reduce_scatter the input's. Algorithm bandwidth is ``bytes`` over time. Bus bandwidth multiplies it
by the part of ``bytes`` that must leave each rank in any algorithm, so that it can be compared with
what the hardware carries, whatever the number of ranks.
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


COLLECTIVES = {
    row.name: row
    for row in (
        Collective("all_reduce", lambda n: 2 * (n - 1) / n, folds=True, in_place=True),
        Collective("broadcast", lambda n: 1.0, in_place=True),  # noqa: ARG005
        Collective("all_gather", lambda n: (n - 1) / n, part_in=True),
        Collective("reduce_scatter", lambda n: (n - 1) / n, folds=True, part_out=True),
        Collective("barrier", lambda n: 0.0, moves=False),  # noqa: ARG005
    )
}


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
        if collective.part_in or collective.part_out:
            count = data.round_up(count, ranks)
        self.bytes = count * item
        self._collective = collective
        self._dtype = dtype
        self._op = options.get("op", "sum")
        whole, part = (self._allocate(n, memory) for n in (count, count // ranks))
        self._input = part if collective.part_in else whole
        self._output = whole if collective.in_place or collective.part_in else part
        if not collective.moves:
            self.call: Callable[[], Any] = fd.barrier
            return
        borrowed = [_Half(a) if dtype == "bfloat16" else a for a in (self._input, self._output)]
        if collective.in_place:
            borrowed[1] = borrowed[0]
        self.call = partial(getattr(fd, collective.name), borrowed[0], out=borrowed[1], **options)
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
        whole = slice(0, self._output.size)
        if self._collective.folds:
            phase = rank * self._output.size if self._collective.part_out else 0
            result = data.reduced(everything, self._op, self._dtype)
            return stored[rank], [(whole, result, phase)]
        if self._collective.part_in:
            n = self._input.size
            return stored[rank], [(slice(r * n, (r + 1) * n), stored[r], 0) for r in range(ranks)]
        return stored[rank], [(whole, stored[0], 0)]

    def prepare(self, turn: int) -> None:
        """The owner writes its input, as a program's own computation would."""
        if self._collective.moves:
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
