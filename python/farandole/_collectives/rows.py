"""The collectives that move rows between ranks and fold nothing.

Equal shares travel at once. Where they differ, all ranks must know how: by ``counts``, or by an
exchange that goes before and costs a small collective more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from farandole import _core
from farandole._arguments import explained, type_of
from farandole._collectives.arrays import (
    borrowable,
    call,
    checked_counts,
    input_array,
    is_on_device,
    like,
    rows_of,
    shape_of,
)
from farandole._core import Handle, InvalidArgument
from farandole._world import Group, _state, world

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from farandole.typing import (
        A,
        Counts,
        Either,
        GatherEither,
        GatherLater,
        GatherNow,
        Input,
        Later,
        Now,
        Rows,
    )

__all__ = ["all_gather", "all_to_all", "gather", "scatter"]

_MOST_DIMENSIONS = 64


def _options(
    name: str | None,
    algorithm: str | None,
    timeout: float | None,
    root: int = 0,
    counts: list[int] | None = None,
) -> tuple[Any, ...]:
    options = ("sum", 1.0, 1.0, root, name, algorithm, None, timeout)
    return options if counts is None else (*options, counts)


def everyones(numbers: Sequence[int], group: Group, timeout: float | None) -> list[list[int]]:
    """The numbers that each rank gives, known to all."""
    mine = np.array(numbers, np.int64)
    table = np.empty((group.size, len(mine)), np.int64)
    group.run("all_gather", mine, table, name="counts", timeout=timeout)
    return table.tolist()


def _joined(
    x: Any,
    verb: str,
    uneven: bool,
    counts: Sequence[int] | None,
    group: Group,
    timeout: float | None,
) -> tuple[tuple[int, ...], list[int] | None]:
    """The shape of all ranks' rows together; elements of each rank where they may differ."""
    if counts is None and not uneven:
        shape = shape_of(x) or (1,)
        return (group.size * shape[0], *shape[1:]), None
    mine, rest, width = rows_of(x, verb)
    if counts is None:
        rows = [n for (n,) in everyones([mine], group, timeout)]
    else:
        rows = checked_counts(counts, group.size, "counts")
        if rows[group.rank] != mine:
            raise InvalidArgument(
                f"counts={rows} says that rank {group.rank} has {rows[group.rank]} rows; "
                f"it has {mine}"
            )
    return (sum(rows), *rest), [n * width for n in rows]


@overload
def all_gather(x: Rows[A], **options: Unpack[GatherNow[A]]) -> A: ...
@overload
def all_gather(x: Rows[A], **options: Unpack[GatherLater[A]]) -> Handle[A]: ...
@overload
def all_gather(x: Input, **options: Unpack[GatherEither]) -> Any: ...
@_core.quick_call("all_gather", _state)
@explained
def all_gather(
    x: Any,
    *,
    uneven: bool = False,
    counts: Sequence[int] | None = None,
    out: Any = None,
    name: str | None = None,
    async_op: bool = False,
    group: Group | None = None,
    algorithm: str | None = None,
    timeout: float | None = None,
) -> Any:
    """Joins arrays of all ranks along the first dimension, in rank order.

    ``x`` of shape (n, ...) gives (size·n, ...); a 0-dimensional ``x`` gives (size,). Shapes are
    equal, unless first dimensions are said to differ, on every rank:

    * ``counts``: the first dimension of every rank. Nothing more is exchanged.
    * ``uneven=True``: the ranks tell each other first, by a small all_gather.

    The other dimensions are equal. Further arguments and errors as in :func:`all_reduce`.

    Examples:
        >>> fd.all_gather(np.arange(2)).tolist()
        [0, 1]
        >>> fd.all_gather(np.ones((3, 2)), uneven=True).shape
        (3, 2)
    """
    x = input_array(x)
    g = group if group is not None else world()
    shape, elements = _joined(x, "all_gather", uneven, counts, g, timeout)
    if out is None:
        out = like(x, shape)
    options = _options(name, algorithm, timeout, counts=elements)
    return call("all_gather", x, out, g, async_op, options)


@overload
def gather(x: Rows[A], root: int = ..., **options: Unpack[GatherNow[A]]) -> A | None: ...
@overload
def gather(x: Rows[A], root: int = ..., **options: Unpack[GatherLater[A]]) -> Handle[A | None]: ...
@overload
def gather(x: Input, root: int = ..., **options: Unpack[GatherEither]) -> Any: ...
@_core.quick_call("gather", _state)
@explained
def gather(
    x: Any,
    root: int = 0,
    *,
    uneven: bool = False,
    counts: Sequence[int] | None = None,
    out: Any = None,
    name: str | None = None,
    async_op: bool = False,
    group: Group | None = None,
    algorithm: str | None = None,
    timeout: float | None = None,
) -> Any:
    """Joins arrays as :func:`all_gather` does; only ``root`` gets the result, the others None.

    ``out`` is looked at on the root alone; ``uneven`` and ``counts`` are the same on every rank.

    Examples:
        >>> fd.gather(np.arange(2), root=0).tolist()
        [0, 1]
    """
    x = input_array(x)
    g = group if group is not None else world()
    shape, elements = _joined(x, "gather", uneven, counts, g, timeout)
    if g.rank != root:
        out = None
    elif out is None:
        out = like(x, shape)
    return call("gather", x, out, g, async_op, _options(name, algorithm, timeout, root, elements))


@overload
def all_to_all(x: Rows[A], splits: None = ..., **options: Unpack[Now[A]]) -> A: ...
@overload
def all_to_all(x: Rows[A], splits: None = ..., **options: Unpack[Later[A]]) -> Handle[A]: ...
@overload
def all_to_all(
    x: Rows[A], splits: Sequence[int], **options: Unpack[Now[A]]
) -> tuple[A, list[int]]: ...
@overload
def all_to_all(
    x: Rows[A], splits: Sequence[int], **options: Unpack[Later[A]]
) -> Handle[tuple[A, list[int]]]: ...
@overload
def all_to_all(x: Input, splits: Counts = ..., **options: Unpack[Either]) -> Any: ...
@_core.quick_call("all_to_all", _state)
@explained
def all_to_all(
    x: Any,
    splits: Sequence[int] | None = None,
    *,
    out: Any = None,
    name: str | None = None,
    async_op: bool = False,
    group: Group | None = None,
    algorithm: str | None = None,
    timeout: float | None = None,
) -> Any:
    """Sends a block of rows to every rank and joins the blocks that come, in rank order.

    Without ``splits``, ``x`` of shape (size·n, ...) is cut into equal blocks, the r-th for rank r;
    the result has the shape of ``x``.

    With ``splits``, the next ``splits[r]`` rows are for rank r. The ranks first tell each other
    their splits. Returns (array, received): the array has shape (sum(received), ...), and
    ``received[r]`` rows of it came from rank r. Every rank gives splits, or none does.

    ``out`` does not overlap ``x``. Further arguments and errors as in :func:`all_reduce`.

    Examples:
        >>> fd.all_to_all(np.arange(2)).tolist()
        [0, 1]
        >>> rows, received = fd.all_to_all(np.arange(2), splits=[2])
        >>> received
        [2]
    """
    x = input_array(x)
    g = group if group is not None else world()
    rows, rest, width = rows_of(x, "all_to_all")
    if splits is None:
        if rows % g.size:
            raise InvalidArgument(f"{rows} rows cannot be cut into {g.size} equal blocks")
        target = like(x, (rows, *rest)) if out is None else out
        return call("all_to_all", x, target, g, async_op, _options(name, algorithm, timeout))
    mine = checked_counts(splits, g.size, "splits")
    if sum(mine) != rows:
        raise InvalidArgument(f"splits={mine} take {sum(mine)} rows; there are {rows}")
    table = everyones(mine, g, timeout)
    received = [row[g.rank] for row in table]
    target = like(x, (sum(received), *rest)) if out is None else out
    options = _options(name, algorithm, timeout, 0, [n * width for row in table for n in row])
    if async_op:
        both = (target, received)
        return g.start("all_to_all", borrowable(x), borrowable(target), both, *options)
    return call("all_to_all", x, target, g, False, options), received


@overload
def scatter(
    x: Rows[A] | None = ..., root: int = ..., *, counts: Counts = ..., **options: Unpack[Now[A]]
) -> A: ...
@overload
def scatter(
    x: Rows[A] | None = ..., root: int = ..., *, counts: Counts = ..., **options: Unpack[Later[A]]
) -> Handle[A]: ...
@overload
def scatter(
    x: Input | None = ..., root: int = ..., *, counts: Counts = ..., **options: Unpack[Either]
) -> Any: ...
@_core.quick_call("scatter", _state)
@explained
def scatter(
    x: Any = None,
    root: int = 0,
    *,
    counts: Sequence[int] | None = None,
    out: Any = None,
    name: str | None = None,
    async_op: bool = False,
    group: Group | None = None,
    algorithm: str | None = None,
    timeout: float | None = None,
) -> Any:
    """Splits the root's array along the first dimension: rank r gets the r-th part.

    Only the root's ``x`` is looked at; the others may pass None. ``x`` of shape (size·n, ...) gives
    (n, ...) everywhere; with ``counts`` on the root, rank r gets ``counts[r]`` rows. The root first
    tells the others what it has, by a small broadcast.

    Ranks that know what comes give ``out``: all of them, or none. Nothing is then exchanged before,
    and ``counts``, if parts differ, are the same on every rank.

    Examples:
        >>> fd.scatter(np.arange(2), root=0).tolist()
        [0, 1]
    """
    g = group if group is not None else world()
    source = input_array(x) if g.rank == root else None
    if out is None:
        shape, dtype, elements = _told_by_root(source, root, counts, g, timeout)
        out = like(source, shape) if source is not None else np.empty(shape, dtype)
    elif counts is not None:
        width = rows_of(out, "scatter")[2]
        elements = [n * width for n in checked_counts(counts, g.size, "counts")]
    else:
        elements = None
    options = _options(name, algorithm, timeout, root, elements)
    return call("scatter", source, out, g, async_op, options)


def _told_by_root(
    x: Any, root: int, counts: Sequence[int] | None, group: Group, timeout: float | None
) -> tuple[tuple[int, ...], np.dtype[Any], list[int]]:
    """This rank's shape, the dtype, and the elements of every rank's part."""
    told = np.zeros(2 + _MOST_DIMENSIONS + group.size, np.int64)
    refusal: Exception | None = None
    if group.rank == root:
        try:
            _tell(x, counts, group.size, told)
        except Exception as error:  # the others must not wait for what will not come
            refusal, told[0] = error, -1
    group.run("broadcast", told, told, root=root, name="scatter", timeout=timeout)
    if refusal is not None:
        raise refusal
    if told[0] < 0:
        raise InvalidArgument(f"rank {root} cannot scatter what it has; its own error says why")
    dimensions, at = int(told[1]), 2 + _MOST_DIMENSIONS
    rest = tuple(told[2 : 2 + dimensions].tolist())
    rows = told[at:].tolist()
    width = int(np.prod(rest, dtype=np.int64))
    dtype = np.dtype(_core.dtypes[int(told[0])])
    return (rows[group.rank], *rest), dtype, [n * width for n in rows]


def _tell(x: Any, counts: Sequence[int] | None, size: int, told: np.ndarray[Any, Any]) -> None:
    """Fills: index of the dtype, how many dimensions besides rows, those, every rank's rows."""
    rows, rest, _ = rows_of(x, "scatter")
    if counts is None:
        if rows % size:
            raise InvalidArgument(f"{rows} rows cannot be cut into {size} equal parts; give counts")
        counts = [rows // size] * size
    parts = checked_counts(counts, size, "counts")
    if sum(parts) != rows:
        raise InvalidArgument(f"counts={parts} take {sum(parts)} rows; there are {rows}")
    if is_on_device(x):
        raise InvalidArgument("scatter of an array on a device needs out= on every rank")
    try:
        dtype = np.asarray(x).dtype.name
    except (TypeError, RuntimeError):  # PyTorch has dtypes that numpy has not, and gradients
        dtype = str(getattr(x, "dtype", type_of(x)))
    if dtype not in _core.dtypes or dtype == "bfloat16":  # which numpy alone cannot make
        raise InvalidArgument(f"scatter of {dtype} needs out= on every rank")
    told[0], told[1] = _core.dtypes.index(dtype), len(rest)
    told[2 : 2 + len(rest)] = rest
    told[2 + _MOST_DIMENSIONS :] = parts
