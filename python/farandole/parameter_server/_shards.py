"""Which server has which rows of which variable: a value, computed alike on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from farandole import _core
from farandole._arguments import shown
from farandole._core import InvalidArgument

SPLIT_ABOVE = 256 * 1024  # bytes


class Variable(NamedTuple):
    """What ranks agree on of a variable."""

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
    """Variables larger than `split_above` bytes are cut by rows into as many parts as there are
    servers, if they have as many rows; the others go whole, the largest first, to the server that
    has the fewest bytes. Ordered by variable, then by row."""
    load = [0] * servers
    shards: list[Shard] = []
    whole: list[int] = []
    for at, variable in enumerate(variables):
        rows = rows_of(variable)
        if servers == 1 or variable.nbytes <= split_above or rows < servers:
            whole.append(at)
            continue
        for server in range(servers):
            begin, end = rows * server // servers, rows * (server + 1) // servers
            shards.append(Shard(at, server, begin, end))
            load[server] += (end - begin) * (variable.nbytes // rows)
    for at in sorted(whole, key=lambda at: (-variables[at].nbytes, at)):
        server = load.index(min(load))
        shards.append(Shard(at, server, 0, rows_of(variables[at])))
        load[server] += variables[at].nbytes
    return sorted(shards)
