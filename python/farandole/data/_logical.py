"""Logical ranks: batches are cut for a number of parts that does not depend on the ranks.

A rank computes several parts, each by itself, and folds what it gets in the order in which all
parts would be folded. So the bits of a sum depend on the number of parts alone (Note [Same bits for
any number of ranks] in keras/_global/logical.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from farandole._core import InvalidArgument

_T = TypeVar("_T")


class Block(NamedTuple):
    """The parts of every batch that one rank computes."""

    parts: int  # of a batch
    mine: range


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
