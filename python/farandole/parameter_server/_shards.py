"""The placement of variables' rows on servers: a value, computed alike on every rank."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from farandole import _core
from farandole._arguments import shown
from farandole._core import InvalidArgument
from farandole.parameter_server._rows import Gradient, Rows

SPLIT_ABOVE = 256 * 1024  # bytes


class Variable(NamedTuple):
    """The properties of a variable that ranks agree on."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def row(self) -> tuple[int, ...]:
        return self.shape[1:]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


class Shard(NamedTuple):
    """Rows [begin, end) of a variable, on one server; of one without dimensions, its only row."""

    variable: int  # its place in the list of variables
    server: int
    begin: int
    end: int


def described(variables: Mapping[str, np.ndarray]) -> list[Variable]:
    """The variables, in the order given.

    Raises:
        InvalidArgument: none, a name that is no text, or an array of a dtype that is not moved.
    """
    if not isinstance(variables, Mapping) or not variables:
        raise InvalidArgument(
            f"variables are {shown(variables)}; they are a dictionary of names and numpy arrays"
        )
    found = []
    for name, value in variables.items():
        if not isinstance(name, str):
            raise InvalidArgument(f"a variable's name is {shown(name)}; names are text")
        array = np.asarray(value)
        if array.dtype.name not in _core.dtypes or array.dtype.name == "bfloat16":
            raise InvalidArgument(
                f"variable '{name}' is of dtype {array.dtype}, which is not moved"
            )
        found.append(Variable(name, array.shape, array.dtype.name))
    return found


def rows_of(variable: Variable) -> int:
    return variable.shape[0] if variable.shape else 1


def plan(variables: list[Variable], servers: int, split_above: int) -> list[Shard]:
    """Variables larger than `split_above` bytes are cut into as many parts as there are servers, if
    they have as many rows; the others stay whole."""

    def is_cut(variable: Variable) -> bool:
        return variable.nbytes > split_above and rows_of(variable) >= servers

    parts = [servers if is_cut(variable) else 1 for variable in variables]
    return place(variables, parts, [0] * servers)


def place(variables: list[Variable], parts: list[int], load: list[int]) -> list[Shard]:
    """Variables are cut by rows into so many parts, of which each goes to another server; those
    that stay whole come last, the largest first. All go where the fewest bytes are.

    Args:
        parts: of each variable, from 1 to the number of servers, and no more than it has rows.
        load: bytes on each server before; and then after.

    Returns:
        Ordered by variable, then by row.
    """
    shards: list[Shard] = []
    for at, variable in enumerate(variables):
        if parts[at] == 1:
            continue
        rows, count = rows_of(variable), parts[at]
        for part, server in enumerate(sorted(_emptiest(load, count))):
            begin, end = rows * part // count, rows * (part + 1) // count
            shards.append(Shard(at, server, begin, end))
            load[server] += (end - begin) * (variable.nbytes // rows)
    whole = [at for at, count in enumerate(parts) if count == 1]
    for at in sorted(whole, key=lambda at: (-variables[at].nbytes, at)):
        (server,) = _emptiest(load, 1)
        shards.append(Shard(at, server, 0, rows_of(variables[at])))
        load[server] += variables[at].nbytes
    return sorted(shards, key=lambda shard: (shard.variable, shard.begin))


def _emptiest(load: list[int], count: int) -> list[int]:
    return sorted(range(len(load)), key=lambda server: (load[server], server))[:count]


def inside(indices: np.ndarray, shard: Shard) -> np.ndarray:
    """A mask of the indices whose rows the shard has."""
    return (indices >= shard.begin) & (indices < shard.end)


def part_of(gradient: Gradient, variable: Variable, shard: Shard) -> Gradient:
    """The shard's rows of a gradient of the variable."""
    if shard.end - shard.begin == rows_of(variable):
        return gradient
    if isinstance(gradient, Rows):
        return gradient.between(shard.begin, shard.end)
    return gradient[shard.begin : shard.end]


def asked_of(
    pieces: Sequence[tuple[str, Shard]], wanted: Mapping[str, np.ndarray], chosen: Collection[str]
) -> np.ndarray:
    """The table of a pull from the server that has these pieces.

    Args:
        wanted: rows, by name.
        chosen: names; others do not come.
    """
    table = []
    for at, (name, shard) in enumerate(pieces):
        if name not in chosen:
            continue
        if name in wanted:
            here = inside(wanted[name], shard)
            table += [np.array([at, here.sum()]), wanted[name][here] - shard.begin]
        else:
            table.append(np.array([at, -1]))
    return np.concatenate(table) if table else np.empty(0, np.int64)
