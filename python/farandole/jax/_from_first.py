"""Gives all ranks rank 0's trees, by name; their arrays are compared and sent as they are.

A value without arrays on any rank is an object, which may differ in any way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from farandole import _collectives, _world
from farandole.common._objects import agree_prepared, attempt, broadcast_object, compare
from farandole.jax._kept import Kept, is_key, leaves_of, like, require_plain

_ALIKE = "give every rank's state the same names, and trees of the same arrays"
_NUMBERS = (bool, int, float, complex, np.generic)

_Trees = dict[str, Any]


class _Row(NamedTuple):
    """The description of a leaf that ranks exchange."""

    place: str
    what: str = ""  # of an array
    dtype: Any = None  # of what is sent of it; None: it is none
    shape: tuple[int, ...] = ()
    of_jax: bool = False
    weak: bool = False
    number: bool = False  # one alone, as an array or not

    def __str__(self) -> str:
        return f"{self.place} {self.what}" if self.what else self.place


_Table = dict[str, list[_Row]]  # by name of a tree


def from_first(mine: _Trees, kept: Callable[[], _Trees]) -> _Trees:
    """Rank 0's trees, with a `Kept` for each array of JAX. Collective.

    Args:
        mine: what this rank has, with arrays.
        kept: makes copies of it, with a `Kept` for each array; what other ranks than 0 make of it
            says where they want their arrays.

    Raises:
        InvalidArgument: some rank has what cannot be kept, or sent; on every rank.
        Mismatch: names or trees differ; on every rank.
    """
    made, error = attempt(lambda: ({n: _rows(n, tree) for n, tree in mine.items()}, kept()))
    rows, copies = made or (_Table(), _Trees())
    what, names = "sync() of a JaxState", sorted(mine)
    tables = agree_prepared(what, "the names of a JaxState", names, error, _ALIKE, rows)
    return _received(copies, _with_arrays(names, tables), tables[0])


def _rows(name: str, tree: Any) -> list[_Row]:
    return [_row(name + path, leaf) for path, leaf in leaves_of(tree)[0]]


def _row(place: str, leaf: Any) -> _Row:
    require_plain(place, leaf)
    of_jax, key = isinstance(leaf, jax.Array), is_key(leaf)
    if not of_jax and (type(leaf) is not np.ndarray or leaf.dtype.hasobject):
        return _Row(place, number=isinstance(leaf, _NUMBERS))
    what = f"{leaf.dtype}{list(leaf.shape)}"
    data: Any = jax.random.key_data(leaf) if key else leaf
    weak = of_jax and data.weak_type
    return _Row(place, what, data.dtype, data.shape, of_jax, weak, not leaf.shape and not key)


def _with_arrays(names: Sequence[str], tables: Sequence[_Table]) -> list[str]:
    """The names of trees that some rank has arrays in.

    Raises:
        Mismatch: these are not alike on all ranks; names the first leaf that is not.
    """
    found = [n for n in names if any(row.what for table in tables for row in table[n])]
    for name in found:
        words = _words([table[name] for table in tables])
        compare("a JaxState", dict(enumerate(words)), _ALIKE)
    return found


def _words(of_ranks: Sequence[list[_Row]]) -> list[list[str]]:
    """By rank. A value that began as Python's number may be an array on ranks that have trained."""
    loose = {
        i
        for i, rows in enumerate(zip(*of_ranks, strict=False))
        if all(row.number for row in rows) and not all(row.what for row in rows)
    }
    return [[r.place if i in loose else str(r) for i, r in enumerate(rows)] for rows in of_ranks]


def _received(mine: _Trees, with_arrays: Sequence[str], told: _Table) -> _Trees:
    """`told`: rank 0's rows."""
    root = _world.rank() == 0
    trees = {name: leaves_of(mine[name]) for name in with_arrays}
    rows = [row for name in with_arrays for row in told[name]]
    leaves = [leaf for pairs, _ in trees.values() for _, leaf in pairs]
    arrays = [
        _bytes(leaf) if root else np.empty(math.prod(row.shape) * row.dtype.itemsize, np.uint8)
        for row, leaf in zip(rows, leaves, strict=True)
        if row.what
    ]
    objects = {name: tree for name, tree in mine.items() if name not in trees}
    others = [leaf for row, leaf in zip(rows, leaves, strict=True) if not row.what]
    objects, others = broadcast_object((objects, others), name="a JaxState")
    if arrays:
        arrays = _collectives.grouped_broadcast(arrays, 0, name="a JaxState")
    if root:
        return mine
    come, rest, new = iter(arrays), iter(others), dict(objects)
    for name, (pairs, structure) in trees.items():
        new[name] = structure.unflatten(
            _made(row, leaf, next(come)) if row.what else next(rest)
            for row, (_, leaf) in zip(told[name], pairs, strict=True)
        )
    return new


def _bytes(leaf: Any) -> np.ndarray[Any, Any]:
    value = leaf.value if isinstance(leaf, Kept) else leaf
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


def _made(row: _Row, mine: Any, data: np.ndarray[Any, Any]) -> Any:
    """The received array; if JAX's, placed where this rank had its own."""
    value = data.view(row.dtype).reshape(row.shape)
    return like(mine, value, row.weak) if row.of_jax else value
