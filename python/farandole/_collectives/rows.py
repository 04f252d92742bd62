"""The collectives that move rows between ranks and fold nothing.

Equal shares travel at once. Where they differ, all ranks must know how: by ``counts``, or by an
exchange that goes before and costs a small collective more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from farandole import _core
from farandole._arguments import type_of
from farandole._collectives.arrays import (
    borrowable,
    checked_counts,
    input_array,
    is_on_device,
    like,
    rows_of,
)
from farandole._collectives.table import (
    ALL_GATHER,
    ALL_TO_ALL,
    GATHER,
    ROOT,
    SCATTER,
    How,
    Shape,
    Shares,
    call,
    collective,
    move,
    one,
)
from farandole._core import Handle, InvalidArgument
from farandole._world import Group

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


def everyones(numbers: Sequence[int], group: Group, timeout: float | None) -> list[list[int]]:
    """The numbers that each rank gives, known to all."""
    mine = np.array(numbers, np.int64)
    table = np.empty((group.size, len(mine)), np.int64)
    group.run("all_gather", mine, table, name="counts", timeout=timeout)
    return table.tolist()


def _shares(verb: str, uneven: bool, counts: Sequence[int] | None) -> Shares | None:
    """Of rows that are joined; None where all ranks have the same."""

    def shares(x: Any, group: Group, timeout: float | None) -> tuple[Shape, list[int]]:
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

    return None if counts is None and not uneven else shares


@overload
def all_gather(x: Rows[A], **options: Unpack[GatherNow[A]]) -> A: ...
@overload
def all_gather(x: Rows[A], **options: Unpack[GatherLater[A]]) -> Handle[A]: ...
@overload
def all_gather(x: Input, **options: Unpack[GatherEither]) -> Any: ...
@collective(ALL_GATHER, move)
def all_gather(
    x: Any, *, uneven: bool = False, counts: Sequence[int] | None = None, **options: Any
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
    return move(one, ALL_GATHER, x, 0, _shares("all_gather", uneven, counts), **options)


@overload
def gather(x: Rows[A], root: int = ..., **options: Unpack[GatherNow[A]]) -> A | None: ...
@overload
def gather(x: Rows[A], root: int = ..., **options: Unpack[GatherLater[A]]) -> Handle[A | None]: ...
@overload
def gather(x: Input, root: int = ..., **options: Unpack[GatherEither]) -> Any: ...
@collective(GATHER, move)
def gather(
    x: Any,
    root: int = 0,
    *,
    uneven: bool = False,
    counts: Sequence[int] | None = None,
    **options: Any,
) -> Any:
    """Joins arrays as :func:`all_gather` does; only ``root`` gets the result, the others None.

    ``out`` is looked at on the root alone; ``uneven`` and ``counts`` are the same on every rank.

    Examples:
        >>> fd.gather(np.arange(2), root=0).tolist()
        [0, 1]
    """
    return move(one, GATHER, x, root, _shares("gather", uneven, counts), **options)


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
@collective(ALL_TO_ALL, move)
def all_to_all(x: Any, splits: Sequence[int] | None = None, **options: Any) -> Any:
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
    return move(_all_to_all, ALL_TO_ALL, x, 0, splits, **options)


def _all_to_all(x: Any, how: How, splits: Sequence[int] | None) -> Any:
    row, options, out, async_op, group = how
    x = input_array(x)
    rows, rest, width = rows_of(x, "all_to_all")
    if splits is None:
        if rows % group.size:
            raise InvalidArgument(f"{rows} rows cannot be cut into {group.size} equal blocks")
        target = like(x, (rows, *rest)) if out is None else out
        return call(x, (row, options, target, async_op, group))
    mine = checked_counts(splits, group.size, "splits")
    if sum(mine) != rows:
        raise InvalidArgument(f"splits={mine} take {sum(mine)} rows; there are {rows}")
    table = everyones(mine, group, options[-1])
    received = [counts[group.rank] for counts in table]
    target = like(x, (sum(received), *rest)) if out is None else out
    options = (*options, [n * width for counts in table for n in counts])
    if async_op:
        both = (target, received)
        return group.start(row.kind, borrowable(x), borrowable(target), both, *options)
    return call(x, (row, options, target, False, group)), received


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
@collective(SCATTER, move)
def scatter(
    x: Any = None,
    root: int = 0,
    *,
    counts: Sequence[int] | None = None,
    **options: Any,
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
    return move(_scatter, SCATTER, x, root, counts, **options)


def _scatter(x: Any, how: How, counts: Sequence[int] | None) -> Any:
    row, options, out, async_op, group = how
    root, elements = options[ROOT], None
    source = input_array(x) if group.rank == root else None
    if out is None:
        shape, dtype, elements = _told_by_root(source, root, counts, group, options[-1])
        out = like(source, shape) if source is not None else np.empty(shape, dtype)
    elif counts is not None:
        width = rows_of(out, "scatter")[2]
        elements = [n * width for n in checked_counts(counts, group.size, "counts")]
    options = options if elements is None else (*options, elements)
    return call(source, (row, options, out, async_op, group))


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
