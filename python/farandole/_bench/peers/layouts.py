"""What each collective reads and must leave behind, for libraries that are not ours.

Counts are elements. ``count`` is that of the larger of input and output on one rank, a multiple of
the number of ranks where it is shared out. Rank 0 is every root.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farandole._bench import data

ROOT = 0


@dataclass(frozen=True)
class Layout:
    """One collective. ``part``: one rank's share of ``count``."""

    bus_factor: str  # of the table below
    reads: str  # whole, part
    leaves: str  # whole, part; same: the input itself
    folds: bool = False
    reader: int | None = None  # the one rank that has an input, and that has an output
    leaver: int | None = None


LAYOUTS = {
    "all_reduce": Layout("twice", "whole", "same", folds=True),
    "broadcast": Layout("once", "whole", "same"),
    "all_gather": Layout("others", "part", "whole"),
    "reduce_scatter": Layout("others", "whole", "part", folds=True),
    "reduce": Layout("once", "whole", "whole", folds=True, leaver=ROOT),
    "gather": Layout("others", "part", "whole", leaver=ROOT),
    "scatter": Layout("others", "whole", "part", reader=ROOT),
    "all_to_all": Layout("others", "whole", "whole"),
}


def bus_factor(collective: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth, as nccl-tests defines it."""
    others = (ranks - 1) / ranks
    return {"once": 1.0, "others": others, "twice": 2 * others}[LAYOUTS[collective].bus_factor]


def whole_count(collective: str, size: int, dtype: str, ranks: int) -> int:
    """Elements of the larger of input and output, at least `size` bytes of them."""
    count = size // data.storage(dtype).itemsize
    layout = LAYOUTS[collective]
    shared = layout.bus_factor == "others"
    return data.round_up(count, ranks) if shared else count


class Buffers:
    """Input and output of one collective on this rank, None where it has none."""

    def __init__(self, collective: str, size: int, dtype: str, rank: int, ranks: int) -> None:
        layout = self._layout = LAYOUTS[collective]
        self._collective, self._dtype, self._rank, self._ranks = collective, dtype, rank, ranks
        count = whole_count(collective, size, dtype, ranks)
        counts = {"whole": count, "part": count // ranks}
        kind = data.storage(dtype)
        self.bytes = count * kind.itemsize
        self.part = count // ranks
        self.input: NDArray[Any] | None = None
        self.output: NDArray[Any] | None = None
        if layout.reader in (None, rank):
            self.input = np.empty(counts[layout.reads], kind)
        if layout.leaves == "same":
            self.output = self.input
        elif layout.leaver in (None, rank):
            self.output = np.empty(counts[layout.leaves], kind)
        self._turns = [self._plan(turn) for turn in range(4)]

    def _plan(self, turn: int) -> tuple[NDArray[Any], list[tuple[slice, NDArray[Any], int]]]:
        """What goes in, and what comes out: (where, pattern, phase)."""
        rank, n = self._rank, self.part
        parts = [
            data.contribution(r, self._ranks, turn, "sum", self._dtype) for r in range(self._ranks)
        ]
        stored = [data.encode(part, self._dtype) for part in parts]
        phase = rank * n if self._layout.leaves == "part" else 0
        everything = slice(0, None)
        if self._layout.folds:
            return stored[rank], [(everything, data.reduced(parts, "sum", self._dtype), phase)]
        if self._collective in ("broadcast", "scatter"):
            return stored[rank], [(everything, stored[ROOT], phase)]
        theirs = rank * n if self._collective == "all_to_all" else 0
        blocks = [slice(r * n, (r + 1) * n) for r in range(self._ranks)]
        return stored[rank], [
            (block, part, theirs) for block, part in zip(blocks, stored, strict=True)
        ]

    def prepare(self, turn: int) -> None:
        """The owner writes its input, as a program's own computation would."""
        if self.input is not None:
            data.lay(self._turns[turn % 4][0], self.input)

    def clear(self) -> None:
        """Zeros, which every sum leaves as they are."""
        if self.input is not None:
            self.input[:] = 0

    def count_wrong(self, turn: int) -> int:
        """Elements of the result that are not what they must be."""
        if self.output is None:
            return 0
        output = self.output
        expected = self._turns[turn % 4][1]
        return sum(data.count_wrong(p, output[where], phase) for where, p, phase in expected)
