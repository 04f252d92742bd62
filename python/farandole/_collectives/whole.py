"""The collectives on whole arrays: those that fold, broadcast, barrier."""

from __future__ import annotations

from collections.abc import Sequence
from types import GenericAlias
from typing import TYPE_CHECKING, Any, overload

from farandole._arguments import explained
from farandole._collectives.arrays import checked_counts, rows_of
from farandole._collectives.table import (
    ALL_REDUCE,
    BROADCAST,
    REDUCE,
    REDUCE_SCATTER,
    Shape,
    collective,
    fold,
    move,
    one,
)
from farandole._core import Handle
from farandole._world import Group, world

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
@collective(ALL_REDUCE, fold)
def all_reduce(x: Any, op: str = "sum", **options: Any) -> Any:
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
    return fold(one, ALL_REDUCE, x, op, **options)


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
@collective(REDUCE, fold)
def reduce(x: Any, op: str = "sum", root: int = 0, **options: Any) -> Any:
    """Reduces as :func:`all_reduce` does; only ``root`` gets the result, the others None.

    ``out`` is looked at on the root alone.

    Examples:
        >>> fd.reduce(np.arange(3), root=0).tolist()
        [0, 1, 2]
    """
    return fold(one, REDUCE, x, op, root, **options)


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
@collective(REDUCE_SCATTER, fold)
def reduce_scatter(
    x: Any, op: str = "sum", *, counts: Sequence[int] | None = None, **options: Any
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

    def shares(x: Any, group: Group, _: float | None) -> tuple[Shape, list[int]]:
        _, rest, width = rows_of(x, "reduce_scatter")
        rows = checked_counts(counts or (), group.size, "counts")
        return (rows[group.rank], *rest), [n * width for n in rows]

    return fold(one, REDUCE_SCATTER, x, op, 0, None if counts is None else shares, **options)


@overload
def broadcast(x: Whole[A], root: int = ..., **options: Unpack[Now[A]]) -> A: ...
@overload
def broadcast(x: Whole[A], root: int = ..., **options: Unpack[Later[A]]) -> Handle[A]: ...
@overload
def broadcast(x: Input, root: int = ..., **options: Unpack[Either]) -> Any: ...
@collective(BROADCAST, move)
def broadcast(x: Any, root: int = 0, **options: Any) -> Any:
    """Copies the root's array to every rank; shapes and dtypes are equal on all ranks.

    ``root`` is a rank of ``group``. Arguments and errors as in :func:`all_reduce`; ``out=x``
    overwrites ``x`` on the other ranks.

    Examples:
        >>> fd.broadcast(np.arange(3), root=0).tolist()
        [0, 1, 2]
    """
    return move(one, BROADCAST, x, root, **options)


@explained
def barrier(
    *, group: Group | None = None, name: str | None = None, timeout: float | None = None
) -> None:
    """Returns when every rank of the group has called it."""
    (group if group is not None else world()).barrier(name, timeout)
