"""Many arrays in one call: small ones of one dtype travel together, with the same bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, overload

from farandole._arguments import explained
from farandole._collectives.arrays import borrowable, input_array, like, shape_of
from farandole._core import Handle, InvalidArgument
from farandole._world import Group, world

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

Shape = tuple[int, ...]


def _call(
    kind: str,
    xs: Sequence[Any],
    out: Sequence[Any] | None,
    shape: Callable[[Shape, Group], Shape],
    group: Group | None,
    async_op: bool,
    options: tuple[Any, ...],
) -> Any:
    g = group if group is not None else world()
    if not isinstance(xs, list | tuple):
        raise InvalidArgument(
            f"a grouped collective takes a list of arrays, not {type(xs).__name__}"
        )
    inputs = [input_array(x) for x in xs]
    outs = [like(x, shape(shape_of(x), g)) for x in inputs] if out is None else list(out)
    sources = [borrowable(x) for x in inputs]
    targets = [
        source if x is o else borrowable(o)
        for x, source, o in zip(inputs, sources, outs, strict=False)
    ] + outs[len(inputs) :]
    if async_op:
        return g.start_grouped(kind, sources, targets, outs, *options)
    g.run_grouped(kind, sources, targets, *options)
    return outs


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
def grouped_all_reduce(
    xs: Sequence[Any],
    op: str = "sum",
    *,
    out: Sequence[Any] | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    name: str | None = None,
    async_op: bool = False,
    group: Group | None = None,
    algorithm: str | None = None,
    level: str | None = None,
    timeout: float | None = None,
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
    options = (op, prescale, postscale, 0, name, algorithm, level, timeout)
    return _call("all_reduce", xs, out, lambda shape, _: shape, group, async_op, options)


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
def grouped_broadcast(
    xs: Sequence[Any],
    root: int = 0,
    *,
    out: Sequence[Any] | None = None,
    name: str | None = None,
    async_op: bool = False,
    group: Group | None = None,
    algorithm: str | None = None,
    timeout: float | None = None,
) -> Any:
    """Broadcasts every array of a list; arguments as in :func:`grouped_all_reduce`.

    Examples:
        >>> [a.tolist() for a in fd.grouped_broadcast([np.ones(1), np.arange(2)], root=0)]
        [[1.0], [0, 1]]
    """
    options = ("sum", 1.0, 1.0, root, name, algorithm, None, timeout)
    return _call("broadcast", xs, out, lambda shape, _: shape, group, async_op, options)


@overload
def grouped_all_gather(xs: Sequence[Rows[A]], **options: Unpack[Now[Sequence[A]]]) -> list[A]: ...
@overload
def grouped_all_gather(
    xs: Sequence[Rows[A]], **options: Unpack[Later[Sequence[A]]]
) -> Handle[list[A]]: ...
@overload
def grouped_all_gather(xs: Sequence[Input], **options: Unpack[Either]) -> Any: ...
@explained
def grouped_all_gather(
    xs: Sequence[Any],
    *,
    out: Sequence[Any] | None = None,
    name: str | None = None,
    async_op: bool = False,
    group: Group | None = None,
    algorithm: str | None = None,
    timeout: float | None = None,
) -> Any:
    """Gathers every array of a list as :func:`all_gather` does with equal shapes.

    Arguments as in :func:`grouped_all_reduce`.

    Examples:
        >>> [a.shape for a in fd.grouped_all_gather([np.ones((1, 2)), np.arange(3)])]
        [(1, 2), (3,)]
    """

    def joined(shape: Shape, g: Group) -> Shape:
        rows, *rest = shape or (1,)
        return (g.size * rows, *rest)

    options = ("sum", 1.0, 1.0, 0, name, algorithm, None, timeout)
    return _call("all_gather", xs, out, joined, group, async_op, options)


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
def grouped_reduce_scatter(
    xs: Sequence[Any],
    op: str = "sum",
    *,
    out: Sequence[Any] | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    name: str | None = None,
    async_op: bool = False,
    group: Group | None = None,
    algorithm: str | None = None,
    level: str | None = None,
    timeout: float | None = None,
) -> Any:
    """Reduces and scatters every array of a list as :func:`reduce_scatter` does without counts.

    Arguments as in :func:`grouped_all_reduce`.

    Examples:
        >>> [a.tolist() for a in fd.grouped_reduce_scatter([np.ones(2), np.arange(3)])]
        [[1.0, 1.0], [0, 1, 2]]
    """

    def own_part(shape: Shape, g: Group) -> Shape:
        count = math.prod(shape)
        return (count // g.size + (g.rank < count % g.size),)

    options = (op, prescale, postscale, 0, name, algorithm, level, timeout)
    return _call("reduce_scatter", xs, out, own_part, group, async_op, options)
