"""The table of collectives, from which those of one array and of many follow.

A public function hands its options to :func:`fold` or :func:`move`, and they to what runs it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from farandole import _core
from farandole._arguments import explained, passes_on
from farandole._collectives.arrays import borrowable, input_array, like, shape_of
from farandole._core import InvalidArgument
from farandole._world import Group, _state, world

Shape = tuple[int, ...]
Options = tuple[Any, ...]  # by position, as the core takes them: keywords cost a fifth more
# By array, group and timeout: the shape of this rank's result, and the elements of each rank.
Shares = Callable[[Any, Group, "float | None"], tuple[Shape, list[int]]]
ROOT = 3  # among options
_F = TypeVar("_F", bound=Callable[..., Any])


def _same(shape: Shape, _: Group) -> Shape:
    return shape


def _joined(shape: Shape, group: Group) -> Shape:
    rows, *rest = shape or (1,)
    return (group.size * rows, *rest)


def _own_part(shape: Shape, group: Group) -> Shape:
    count = math.prod(shape)
    return (count // group.size + (group.rank < count % group.size),)


class Operation(NamedTuple):
    """A row."""

    kind: str
    shape: Callable[[Shape, Group], Shape] = _same  # of a rank's result, by its input's
    to_root: bool = False  # the others get None


How = tuple[Operation, Options, Any, bool, Group]  # which, its options, `out`, whether at once
Run = Callable[[Any, How, Any], Any]

ALL_REDUCE = Operation("all_reduce")
REDUCE = Operation("reduce", to_root=True)
REDUCE_SCATTER = Operation("reduce_scatter", _own_part)
BROADCAST = Operation("broadcast")
ALL_GATHER = Operation("all_gather", _joined)
GATHER = Operation("gather", _joined, to_root=True)
ALL_TO_ALL = Operation("all_to_all")
SCATTER = Operation("scatter")


def fold(
    run: Run,
    row: Operation,
    x: Any,
    op: str,
    root: int = 0,
    more: Any = None,
    /,
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
    """Calls `run` for a collective that folds."""
    options = (op, prescale, postscale, root, name, algorithm, level, timeout)
    return run(x, (row, options, out, async_op, group if group is not None else world()), more)


def move(
    run: Run,
    row: Operation,
    x: Any,
    root: int = 0,
    more: Any = None,
    /,
    *,
    out: Any = None,
    name: str | None = None,
    async_op: bool = False,
    group: Group | None = None,
    algorithm: str | None = None,
    timeout: float | None = None,
) -> Any:
    """Calls `run` for a collective that folds nothing."""
    options = ("sum", 1.0, 1.0, root, name, algorithm, None, timeout)
    return run(x, (row, options, out, async_op, group if group is not None else world()), more)


def collective(row: Operation, hands_to: Callable[..., Any]) -> Callable[[_F], _F]:
    """Makes a public collective of a function that hands its options to :func:`fold`, say."""

    def public(function: Any) -> Any:
        slow = explained(passes_on(hands_to)(function))
        return _core.quick_call(row.kind, _state)(slow)

    return public


def one(x: Any, how: How, shares: Shares | None) -> Any:
    """Runs or starts a collective of one array. `shares`: where ranks' may differ."""
    row, options, out, async_op, group = how
    x = input_array(x)
    shape = None
    if shares is not None:
        shape, counts = shares(x, group, options[-1])
        options = (*options, counts)
    if row.to_root and group.rank != options[ROOT]:
        out = None
    elif out is None:
        out = like(x, row.shape(shape_of(x), group) if shape is None else shape)
    return call(x, (row, options, out, async_op, group))


def call(x: Any, how: How) -> Any:
    """Runs or starts what is known."""
    row, options, out, async_op, group = how
    source = borrowable(x)
    target = source if out is x else borrowable(out)
    if async_op:
        return group.start(row.kind, source, target, out, *options)
    group.run(row.kind, source, target, *options)
    return out


def many(xs: Sequence[Any], how: How, _: None) -> Any:
    """Runs or starts a collective of each of many arrays."""
    row, options, out, async_op, group = how
    if not isinstance(xs, list | tuple):
        raise InvalidArgument(
            f"a grouped collective takes a list of arrays, not {type(xs).__name__}"
        )
    inputs = [input_array(x) for x in xs]
    outs = [like(x, row.shape(shape_of(x), group)) for x in inputs] if out is None else list(out)
    sources = [borrowable(x) for x in inputs]
    targets = [
        source if x is o else borrowable(o)
        for x, source, o in zip(inputs, sources, outs, strict=False)
    ] + outs[len(inputs) :]
    if async_op:
        return group.start_grouped(row.kind, sources, targets, outs, *options)
    group.run_grouped(row.kind, sources, targets, *options)
    return outs
