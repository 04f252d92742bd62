"""Many arrays in one call: small ones of one dtype travel together, with the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

from farandole._arguments import explained, passes_on
from farandole._collectives.table import (
    ALL_GATHER,
    ALL_REDUCE,
    BROADCAST,
    REDUCE_SCATTER,
    fold,
    many,
    move,
)
from farandole._core import Handle

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from farandole.typing import (
        A,
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

__all__ = [
    "grouped_all_gather",
    "grouped_all_reduce",
    "grouped_broadcast",
    "grouped_reduce_scatter",
]


@overload
def grouped_all_reduce(
    xs: Sequence[Whole[A]], op: ReduceOp = ..., **options: Unpack[FoldNow[Sequence[A]]]
) -> list[A]: ...
@overload
def grouped_all_reduce(
    xs: Sequence[Whole[A]], op: ReduceOp = ..., **options: Unpack[FoldLater[Sequence[A]]]
) -> Handle[list[A]]: ...
@overload
def grouped_all_reduce(
    xs: Sequence[Input], op: ReduceOp = ..., **options: Unpack[FoldEither]
) -> Any: ...
@explained
@passes_on(fold)
def grouped_all_reduce(
    xs: Sequence[Any], op: str = "sum", *, out: Sequence[Any] | None = None, **options: Any
) -> Any:
    """Reduces every array of a list as :func:`all_reduce` does, in one call.

    Nothing is sent unless all arrays are valid. Arrays up to 32 KiB travel together by dtype, which
    may differ within the list; at level ``canonical`` the results have the bits of separate calls.

    Args:
        xs: arrays; as many, of the same dtypes and sizes and in the same order, on every rank.
        out: as many arrays; ``out=xs`` reduces in place. Default: new ones.
        async_op: return one ``Handle`` at once. Results are complete after ``Handle.wait()``, which
            gives their list; not before.

    Further arguments and errors as in :func:`all_reduce`.

    Examples:
        >>> [a.tolist() for a in fd.grouped_all_reduce([np.ones(2), np.arange(3)])]
        [[1.0, 1.0], [0, 1, 2]]
    """
    return fold(many, ALL_REDUCE, xs, op, out=out, **options)


@overload
def grouped_broadcast(
    xs: Sequence[Whole[A]], root: int = ..., **options: Unpack[Now[Sequence[A]]]
) -> list[A]: ...
@overload
def grouped_broadcast(
    xs: Sequence[Whole[A]], root: int = ..., **options: Unpack[Later[Sequence[A]]]
) -> Handle[list[A]]: ...
@overload
def grouped_broadcast(xs: Sequence[Input], root: int = ..., **options: Unpack[Either]) -> Any: ...
@explained
@passes_on(move)
def grouped_broadcast(
    xs: Sequence[Any], root: int = 0, *, out: Sequence[Any] | None = None, **options: Any
) -> Any:
    """Broadcasts every array of a list; arguments as in :func:`grouped_all_reduce`.

    Examples:
        >>> [a.tolist() for a in fd.grouped_broadcast([np.ones(1), np.arange(2)], root=0)]
        [[1.0], [0, 1]]
    """
    return move(many, BROADCAST, xs, root, out=out, **options)


@overload
def grouped_all_gather(xs: Sequence[Rows[A]], **options: Unpack[Now[Sequence[A]]]) -> list[A]: ...
@overload
def grouped_all_gather(
    xs: Sequence[Rows[A]], **options: Unpack[Later[Sequence[A]]]
) -> Handle[list[A]]: ...
@overload
def grouped_all_gather(xs: Sequence[Input], **options: Unpack[Either]) -> Any: ...
@explained
@passes_on(move)
def grouped_all_gather(
    xs: Sequence[Any], *, out: Sequence[Any] | None = None, **options: Any
) -> Any:
    """Gathers every array of a list as :func:`all_gather` does with equal shapes.

    Arguments as in :func:`grouped_all_reduce`.

    Examples:
        >>> [a.shape for a in fd.grouped_all_gather([np.ones((1, 2)), np.arange(3)])]
        [(1, 2), (3,)]
    """
    return move(many, ALL_GATHER, xs, out=out, **options)


@overload
def grouped_reduce_scatter(
    xs: Sequence[Rows[A]], op: ReduceOp = ..., **options: Unpack[FoldNow[Sequence[A]]]
) -> list[A]: ...
@overload
def grouped_reduce_scatter(
    xs: Sequence[Rows[A]], op: ReduceOp = ..., **options: Unpack[FoldLater[Sequence[A]]]
) -> Handle[list[A]]: ...
@overload
def grouped_reduce_scatter(
    xs: Sequence[Input], op: ReduceOp = ..., **options: Unpack[FoldEither]
) -> Any: ...
@explained
@passes_on(fold)
def grouped_reduce_scatter(
    xs: Sequence[Any], op: str = "sum", *, out: Sequence[Any] | None = None, **options: Any
) -> Any:
    """Reduces and scatters every array of a list as :func:`reduce_scatter` does without counts.

    Arguments as in :func:`grouped_all_reduce`.

    Examples:
        >>> [a.tolist() for a in fd.grouped_reduce_scatter([np.ones(2), np.arange(3)])]
        [[1.0, 1.0], [0, 1, 2]]
    """
    return fold(many, REDUCE_SCATTER, xs, op, out=out, **options)
