"""Logical ranks: batches are cut for a number of parts that does not depend on the ranks.

A rank computes several parts, each by itself, and folds what it gets in the order in which all
parts would be folded. So the bits of a sum depend on the number of parts alone (Note [Same bits for
any number of ranks] in keras/_global/logical.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from farandole import _world
from farandole._arguments import shown
from farandole._core import InvalidArgument
from farandole._limits import setting

_T = TypeVar("_T")

_MOST = 1 << 16  # every part is computed by itself, also where it has no sample


class Block(NamedTuple):
    """The parts of every batch that one rank computes."""

    parts: int  # of a batch
    mine: range


def ranks_own(size: int | None = None, rank: int | None = None) -> Block:
    """The part of a rank where ranks themselves are the parts; default: of this rank."""
    me = _world.rank() if rank is None else rank
    return Block(_world.size() if size is None else size, range(me, me + 1))


def block_here(logical_ranks: Any, call: str, options: Mapping[str, Any]) -> Block:
    """This rank's.

    Args:
        call: that has the argument, for errors.
        options: of what reduces the gradients.

    Raises:
        InvalidArgument: they do not go on this many ranks, or with what else is asked for.
    """
    whole = isinstance(logical_ranks, int) and not isinstance(logical_ranks, bool)
    if not whole or not 1 <= logical_ranks <= _MOST:
        raise InvalidArgument(
            f"logical_ranks is {shown(logical_ranks)}; it is a whole number from 1 to {_MOST}"
        )
    for name in ("compression", "gradient_predivide_factor"):
        if name in options:
            raise InvalidArgument(
                f"{call}(logical_ranks={logical_ranks}, {name}=…): {name} changes what each rank "
                "sends, so that bits depend on their number; leave out one of them"
            )
    if setting("FARANDOLE_LEVEL") == "fast":
        raise InvalidArgument(
            f"logical_ranks={logical_ranks} with FARANDOLE_LEVEL=fast, by which bits depend on the "
            "number of ranks; unset it"
        )
    return block_of(_world.rank(), _world.size(), logical_ranks)


def block_of(rank: int, size: int, parts: int) -> Block:
    """The rank's part of the canonical tree over all parts: the tree over ranks (docs/determinism),
    with a subtree of parts in the place of each rank.

    Raises:
        InvalidArgument: that tree does not have one for each rank.

    Examples:
        >>> [list(block_of(rank, 3, 4).mine) for rank in range(3)]
        [[0], [1], [2, 3]]
    """
    blocks = _blocks(size, range(parts))
    if blocks is None:
        able = [n for n in range(1, parts + 1) if _blocks(n, range(parts)) is not None]
        raise InvalidArgument(
            f"logical_ranks={parts} do not go on {size} ranks, but on "
            f"{', '.join(map(str, able))}\n  advice: a power of two of logical ranks goes on any "
            "number of ranks up to it"
        )
    return Block(parts, blocks[rank])


def fold(values: Sequence[_T], add: Callable[[_T, _T], _T]) -> _T:
    """In the order of the canonical tree: split at the largest power of two below the count."""
    if len(values) == 1:
        return values[0]
    at = _below(len(values))
    return add(fold(values[:at], add), fold(values[at:], add))


class Folding(Generic[_T]):
    """The same fold, of values that come one by one; few are kept."""

    def __init__(self, add: Callable[[_T, _T], _T]) -> None:
        self._add = add
        self._sums: list[tuple[int, _T]] = []  # of so many values, a power of two: ever fewer

    def push(self, value: _T) -> None:
        count = 1
        while self._sums and self._sums[-1][0] == count:
            value = self._add(self._sums.pop()[1], value)
            count *= 2
        self._sums.append((count, value))

    def result(self) -> _T:
        """The fold of all values; there must be at least one."""
        _, value = self._sums[-1]
        for _, lower in reversed(self._sums[:-1]):
            value = self._add(lower, value)
        return value

    def downwards(self) -> Iterator[_T]:
        """The partial sums, in the order in which result() would add them to the next value."""
        return (value for _, value in reversed(self._sums))

    def __bool__(self) -> bool:
        return bool(self._sums)


def fix_torch_threads(logical_ranks: int) -> None:
    """PyTorch's kernels have other bits on another number of threads."""
    import torch

    cores = os.cpu_count() or 1
    threads = max(1, cores // logical_ranks)
    if torch.get_num_threads() == threads:
        return
    torch.set_num_threads(threads)
    if _world.rank() == 0:
        print(
            f"farandole: each rank computes on {threads} threads, by {cores} cores and "
            f"logical_ranks={logical_ranks}, whatever the number of ranks (torch.set_num_threads)"
        )


def _blocks(size: int, parts: range) -> list[range] | None:
    if size == 1:
        return [parts]
    if len(parts) < size:
        return None
    ranks, at = _below(size), _below(len(parts))
    lower, upper = _blocks(ranks, parts[:at]), _blocks(size - ranks, parts[at:])
    return None if lower is None or upper is None else lower + upper


def _below(n: int) -> int:
    """The largest power of two below n, which is at least 2."""
    return 1 << ((n - 1).bit_length() - 1)
