"""The collectives that are measured, a row each, by nccl-tests' definitions, with their results.
Needs no native core: the ranks of other libraries take it, too.

``bytes`` is the size of the larger of input and output on one rank: of all_gather the output's, of
reduce_scatter the input's, of gather and scatter the root's. Algorithm bandwidth is ``bytes`` over
time. Bus bandwidth multiplies it by the part of ``bytes`` that must leave each rank in any
algorithm, so that it can be compared with what the hardware carries, whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farandole._bench import data

ROOT = 0
Patterns = list[NDArray[np.int64]]  # what each rank contributes
Expected = list[tuple[slice, NDArray[Any], int]]  # where, pattern, phase


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
    root_in: bool = False  # the root alone has input; likewise root_out
    root_out: bool = False

    def count(self, size: int, dtype: str, ranks: int) -> int:
        """Elements of the larger of input and output, at least `size` bytes of them."""
        count = size // data.storage(dtype).itemsize
        shared = self.part_in or self.part_out or self.blocks
        return data.round_up(count, ranks) if shared else count


def _one(n: int) -> float:  # noqa: ARG001
    return 1.0


def _others(n: int) -> float:
    """The share of the data that is not a rank's own."""
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

# Collectives that are compared with other libraries'.
COMMON = (
    "all_reduce", "broadcast", "all_gather", "reduce_scatter", "reduce", "gather", "scatter",
    "all_to_all",
)  # fmt: skip


class Buffers:
    """Input and output of one collective on this rank, None where it has none."""

    call: Callable[[], Any]  # the collective, as a library calls it

    def __init__(
        self,
        collective: Collective,
        size: int,
        dtype: str,
        rank: int,
        ranks: int,
        op: str = "sum",
        allocate: Callable[[int, Any], NDArray[Any]] = np.empty,
    ) -> None:
        self._collective, self._dtype, self._op = collective, dtype, op
        self._rank, self._ranks = rank, ranks
        kind, count = data.storage(dtype), collective.count(size, dtype, ranks)
        self.bytes, self.part = count * kind.itemsize, count // ranks
        self.input: NDArray[Any] | None = None
        self.output: NDArray[Any] | None = None
        if collective.moves and (rank == ROOT or not collective.root_in):
            self.input = allocate(self.part if collective.part_in else count, kind)
        if collective.in_place:
            self.output = self.input
        elif collective.moves and (rank == ROOT or not collective.root_out):
            self.output = allocate(self.part if collective.part_out else count, kind)
        self._turns = [self._plan(turn) for turn in range(4)]

    def _plan(self, turn: int) -> tuple[NDArray[Any], Expected]:
        """This rank's input, and the output that it must get."""
        ranks = range(self._ranks)
        parts = [data.contribution(r, len(ranks), turn, self._op, self._dtype) for r in ranks]
        stored = [data.encode(part, self._dtype) for part in parts]
        return stored[self._rank], self._expected(parts, stored)

    def _expected(self, parts: Patterns, stored: list[NDArray[Any]]) -> Expected:
        rank, n, collective = self._rank, self.part, self._collective
        whole = slice(0, None)
        phase = rank * n if collective.part_out or collective.blocks else 0
        if collective.folds:
            return [(whole, data.reduced(parts, self._op, self._dtype), phase)]
        if collective.part_in or collective.blocks:
            return [(slice(r * n, (r + 1) * n), stored[r], phase) for r in range(self._ranks)]
        if collective.name == "send_recv":
            alone = rank % 2 == 0 and rank + 1 == self._ranks
            return [] if alone else [(whole, stored[rank - rank % 2], 0)]
        return [(whole, stored[ROOT], phase)]

    def prepare(self, turn: int) -> None:
        """The owner writes its input, as a program's own computation would."""
        if self.input is not None:
            data.lay(self._turns[turn % 4][0], self.input)

    def clear(self) -> None:
        """Writes zeros, which every sum leaves as they are."""
        if self.input is not None:
            self.input[...] = 0

    def count_wrong(self, turn: int) -> int:
        """Elements of the result that are not what they must be."""
        if self.output is None:
            return 0
        output, expected = self.output, self._turns[turn % 4][1]
        return sum(data.count_wrong(p, output[where], phase) for where, p, phase in expected)
