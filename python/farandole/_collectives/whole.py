"""The collectives on whole arrays: those that fold, broadcast, barrier."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import GenericAlias
from typing import TYPE_CHECKING, Any, overload

from farandole import _core
from farandole._arguments import explained
from farandole._collectives.arrays import call, checked_counts, input_array, like, rows_of, shape_of
from farandole._core import Handle
from farandole._world import Group, _state, world

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from farandole.typing import (
        A,
        Counts,
        Either,
        FoldEither,
        FoldLater,
        FoldNow,
        Input,
        Later,
        Now,
        ReduceOp,
        Rows,
        Whole,
    )

__all__ = ["Handle", "all_reduce", "barrier", "broadcast", "reduce", "reduce_scatter"]

# A program may write Handle[...] where annotations are evaluated; a native class does not know it.
Handle.__class_getitem__ = classmethod(GenericAlias)  # type: ignore[attr-defined]


@overload
def all_reduce(x: Whole[A], op: ReduceOp = ..., **options: Unpack[FoldNow[A]]) -> A: ...
@overload
def all_reduce(x: Whole[A], op: ReduceOp = ..., **options: Unpack[FoldLater[A]]) -> Handle[A]: ...
@overload
def all_reduce(x: Input, op: ReduceOp = ..., **options: Unpack[FoldEither]) -> Any: ...
@_core.quick_call("all_reduce", _state)
@explained
def all_reduce(
    x: Any,
    op: str = "sum",
    *,
    out: Any = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    name: str | None = None,
    async_op: bool = False,
    group: Group | None = None,
    algorithm: str | None = None,
    level: str | None = None,
    timeout: float | None = None,
) -> Any:
    """Reduces equal arrays of all ranks, elementwise; every rank gets the result.

    The result has the same bits on every rank, and for any algorithm of level ``canonical``: it is
    defined by docs/determinism.md.

    Args:
        x: a contiguous array in host memory or on a CUDA device; any shape. dtypes: float16,
            bfloat16, float32, float64, signed and unsigned integers of 8 to 64 bits, bool.
        op: ``sum``, ``mean``, ``min``, ``max`` or ``product``.
        out: where the result goes; ``out=x`` reduces in place. Default: a new array like ``x``.
        prescale: a factor on every input.
        postscale: a factor on the result.
        name: compared between ranks, and part of errors and traces.
        async_op: return a ``Handle`` at once; ``Handle.wait()`` gives the result.
        group: default: all ranks. Operations of a group match in program order.
        algorithm: force a path over shared memory (``ll``, ``one_shot``, ``mapped``, ``cma``,
            ``cico``), ``eager`` among several hosts, ``mpi`` (its own all-reduce, at level
            ``fast``) where data go over MPI, or a planner; the error for an unknown name lists
            them.
        level: ``canonical`` or ``fast``; default ``FARANDOLE_LEVEL``.
        timeout: seconds until the operation fails, 0: never; default ``FARANDOLE_TIMEOUT``.

    Raises:
        InvalidArgument: bad input on this rank; nothing was sent.
        DeviceError: a rank's device or driver has failed; so has the group.
        Mismatch: the ranks submitted different operations; the group lives on.
        PeerLost, EarlyExit, Stalled, RemoteError: the group has failed.

    Examples:
        >>> import farandole as fd, numpy as np
        >>> fd.init()
        >>> float(fd.all_reduce(np.float32(3), op="mean"))
        3.0
    """
    x = input_array(x)
    if out is None:
        out = like(x, shape_of(x))
    options = (op, prescale, postscale, 0, name, algorithm, level, timeout)
    return call("all_reduce", x, out, group, async_op, options)


@overload
def reduce(
    x: Whole[A], op: ReduceOp = ..., root: int = ..., **options: Unpack[FoldNow[A]]
) -> A | None: ...
@overload
def reduce(
    x: Whole[A], op: ReduceOp = ..., root: int = ..., **options: Unpack[FoldLater[A]]
) -> Handle[A | None]: ...
@overload
def reduce(x: Input, op: ReduceOp = ..., root: int = ..., **options: Unpack[FoldEither]) -> Any: ...
@_core.quick_call("reduce", _state)
@explained
def reduce(
    x: Any,
    op: str = "sum",
    root: int = 0,
    *,
    out: Any = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    name: str | None = None,
    async_op: bool = False,
    group: Group | None = None,
    algorithm: str | None = None,
    level: str | None = None,
    timeout: float | None = None,
) -> Any:
    """Reduces as :func:`all_reduce` does; only ``root`` gets the result, the others None.

    ``out`` is looked at on the root alone.

    Examples:
        >>> fd.reduce(np.arange(3), root=0).tolist()
        [0, 1, 2]
    """
    x = input_array(x)
    g = group if group is not None else world()
    if g.rank != root:
        out = None
    elif out is None:
        out = like(x, shape_of(x))
    options = (op, prescale, postscale, root, name, algorithm, level, timeout)
    return call("reduce", x, out, g, async_op, options)


@overload
def reduce_scatter(
    x: Rows[A], op: ReduceOp = ..., *, counts: Counts = ..., **options: Unpack[FoldNow[A]]
) -> A: ...
@overload
def reduce_scatter(
    x: Rows[A], op: ReduceOp = ..., *, counts: Counts = ..., **options: Unpack[FoldLater[A]]
) -> Handle[A]: ...
@overload
def reduce_scatter(
    x: Input, op: ReduceOp = ..., *, counts: Counts = ..., **options: Unpack[FoldEither]
) -> Any: ...
@_core.quick_call("reduce_scatter", _state)
@explained
def reduce_scatter(
    x: Any,
    op: str = "sum",
    *,
    counts: Sequence[int] | None = None,
    out: Any = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    name: str | None = None,
    async_op: bool = False,
    group: Group | None = None,
    algorithm: str | None = None,
    level: str | None = None,
    timeout: float | None = None,
) -> Any:
    """Reduces as :func:`all_reduce` does, and leaves part r of the result on rank r.

    The elements of ``x``, flattened, are split evenly; the first ranks get one more where they do
    not divide. The result has one dimension, unless ``out`` is given.

    With ``counts``, the same on every rank, rank r gets the next ``counts[r]`` rows of the first
    dimension instead: ``x`` of shape (sum(counts), ...) gives (counts[r], ...).

    Examples:
        >>> fd.reduce_scatter(np.arange(3)).tolist()
        [0, 1, 2]
        >>> fd.reduce_scatter(np.ones((2, 3)), counts=[2]).shape
        (2, 3)
    """
    x = input_array(x)
    g = group if group is not None else world()
    options: tuple[Any, ...] = (op, prescale, postscale, 0, name, algorithm, level, timeout)
    if counts is not None:
        _, rest, width = rows_of(x, "reduce_scatter")
        rows = checked_counts(counts, g.size, "counts")
        options = (*options, [n * width for n in rows])
        shape: tuple[int, ...] = (rows[g.rank], *rest)
    else:
        count = math.prod(shape_of(x))
        shape = (count // g.size + (g.rank < count % g.size),)
    if out is None:
        out = like(x, shape)
    return call("reduce_scatter", x, out, g, async_op, options)


@overload
def broadcast(x: Whole[A], root: int = ..., **options: Unpack[Now[A]]) -> A: ...
@overload
def broadcast(x: Whole[A], root: int = ..., **options: Unpack[Later[A]]) -> Handle[A]: ...
@overload
def broadcast(x: Input, root: int = ..., **options: Unpack[Either]) -> Any: ...
@_core.quick_call("broadcast", _state)
@explained
def broadcast(
    x: Any,
    root: int = 0,
    *,
    out: Any = None,
    name: str | None = None,
    async_op: bool = False,
    group: Group | None = None,
    algorithm: str | None = None,
    timeout: float | None = None,
) -> Any:
    """Copies the root's array to every rank; shapes and dtypes are equal on all ranks.

    ``root`` is a rank of ``group``. Arguments and errors as in :func:`all_reduce`; ``out=x``
    overwrites ``x`` on the other ranks.

    Examples:
        >>> fd.broadcast(np.arange(3), root=0).tolist()
        [0, 1, 2]
    """
    x = input_array(x)
    if out is None:
        out = like(x, shape_of(x))
    options = ("sum", 1.0, 1.0, root, name, algorithm, None, timeout)
    return call("broadcast", x, out, group, async_op, options)


@explained
def barrier(
    *, group: Group | None = None, name: str | None = None, timeout: float | None = None
) -> None:
    """Returns when every rank of the group has called it."""
    (group if group is not None else world()).barrier(name, timeout)
