"""The collectives on arrays and pytrees, anywhere in a program.

They run in the order in which they are called (docs/jax.md), on every rank the same ones; all
leaves of a pytree go in one call, small ones packed together by the core. Ranks that come with
different calls get ``Mismatch``: which call this is, ``name`` says; without one, in a program, its
line and its place in the program. Gradients are those of the sum of all ranks' losses.

Bad input raises ``InvalidArgument`` (a ``ValueError``) while the program is traced; what goes wrong
when it runs arrives as ``JaxRuntimeError`` (see :func:`farandole.jax.last_error`).
"""

from __future__ import annotations

import numbers
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypedDict, overload

import jax
import jax.numpy as jnp
import numpy as np

from farandole import _collectives, _core
from farandole._arguments import explained, no_such_dtype, passes_on, shown, type_of
from farandole._core import InvalidArgument
from farandole.common._process_set import ProcessSet, global_process_set
from farandole.jax import _call, _place
from farandole.jax._order import device, group_of_calls, key_of
from farandole.jax._trees import A_TREE, NUMBERS, as_before, as_reals
from farandole.typing import ReduceOp, SumOp

if TYPE_CHECKING:
    from typing_extensions import Unpack

    class Scaled(TypedDict, total=False):
        prescale: float
        postscale: float
        name: str | None
        process_set: ProcessSet


def _fold(
    kind: str,
    leaves: _Leaves,
    op: str,
    title: str = "",
    /,
    *,
    prescale: float = 1.0,
    postscale: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Sequence[Any]:
    _check_factors(prescale=prescale, postscale=postscale)
    options: Any = {"op": op, "prescale": prescale, "postscale": postscale}
    return _run(kind, leaves, name, process_set, title=title, **options)


@explained(tree=A_TREE)
@passes_on(_fold)
def allreduce(tree: Any, op: ReduceOp = "mean", **options: Unpack[Scaled]) -> Any:
    """Reduces equal arrays of all ranks, elementwise; every rank gets the result.

    Args:
        tree: an array, or a pytree of them, of any supported dtypes; numbers count as arrays.
        op: ``mean``, ``sum``, ``min``, ``max`` or ``product``; only the first two have gradients.
        prescale: a factor on every input.
        postscale: a factor on the result.
        name: part of errors and traces; the same on every rank. Without one, calls in programs
            are of the same line on every rank.
        process_set: the ranks that take part; means are theirs.

    Raises:
        InvalidArgument: bad input on this rank, or it is not in the set; nothing was sent.

    Examples:
        >>> import jax, jax.numpy as jnp, farandole.jax as fdj
        >>> fdj.init()
        >>> jax.jit(lambda x: fdj.allreduce(x, "sum"))(jnp.ones(2)).tolist()
        [1.0, 1.0]
    """
    return titled_allreduce("", tree, op, **options)


def titled_allreduce(title: str, tree: Any, op: str, **options: Unpack[Scaled]) -> Any:
    """:func:`allreduce`, called `title` where it has no name."""
    if op not in _core.reduce_ops:
        raise InvalidArgument(f"op {op!r} is unknown; there are {', '.join(_core.reduce_ops)}")
    leaves, restore = _flatten(tree, "allreduce", or_complex=op in ("sum", "mean"))
    scaled = any(options.get(factor, 1) != 1 for factor in ("prescale", "postscale"))
    for path, leaf in leaves:
        if leaf.dtype == bool and (op == "mean" or scaled):
            raise InvalidArgument(f"allreduce: {path} is of booleans, which have no mean or scale")
    return restore(_fold("all_reduce", leaves, op, title, **options))


@explained(trees=A_TREE)
@passes_on(_fold)
def grouped_allreduce(
    trees: Sequence[Any], op: ReduceOp = "mean", **options: Unpack[Scaled]
) -> list[Any]:
    """:func:`allreduce` of a list of arrays or pytrees, in one call.

    Examples:
        >>> [x.tolist() for x in fdj.grouped_allreduce([jnp.ones(1), jnp.arange(2)], "sum")]
        [[1.0], [0, 1]]
    """
    if not isinstance(trees, list | tuple):
        raise InvalidArgument(f"trees is {type_of(trees)}; pass a list of arrays")
    return list(allreduce(list(trees), op, **options))


@explained(tree=A_TREE)
def broadcast(
    tree: Any,
    root: int = 0,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The root's arrays on every rank; shapes and dtypes are equal on all ranks. Also in a set,
    ``root`` is a rank of the world.

    Examples:
        >>> fdj.broadcast(jnp.arange(3)).tolist()
        [0, 1, 2]
    """
    place = place_of(root, process_set)
    leaves, restore = _flatten(tree, "broadcast", or_complex=True)
    return restore(_run("broadcast", leaves, name, process_set, root=place))


@explained(tree=A_TREE)
def allgather(
    tree: Any,
    counts: Sequence[int] | None = None,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Joins the arrays of all ranks along the first dimension, in rank order.

    An array of shape (n, ...) gives (size·n, ...); a number gives (size,). Where ranks have
    differently many rows, ``counts`` says on every rank how many each has: shapes of a program are
    known before it runs, and cannot follow from what other ranks have.

    Args:
        tree: an array, or a pytree of them; with ``counts``, each of as many rows as that says.
        counts: rows of each rank that takes part; the same on all. The result has their sum.
        name: as for :func:`allreduce`.
        process_set: the ranks that take part.

    Raises:
        InvalidArgument: bad input on this rank; nothing was sent.

    Examples:
        >>> fdj.allgather(jnp.ones((2, 3))).shape
        (2, 3)
    """
    leaves, restore = _flatten(tree, "allgather")
    rows = [(path, leaf if leaf.ndim else leaf[None]) for path, leaf in leaves]
    if counts is None:
        return restore(_run("all_gather", rows, name, process_set))
    known = _checked_counts(counts, rows, process_set)
    longest = max(known)
    padded = [(path, _padded(leaf, longest)) for path, leaf in rows]
    of_rows = f" of {known} rows"
    named = name and name + of_rows
    joined = _run("all_gather", padded, named, process_set, title="all_gather" + of_rows)
    return restore([_without_padding(each, known) for each in joined])


@explained(tree=A_TREE)
@passes_on(_fold)
def reducescatter(tree: Any, op: SumOp = "mean", **options: Unpack[Scaled]) -> Any:
    """Reduces as :func:`allreduce` does, and leaves the r-th part of the rows on the r-th rank.

    An array of shape (size·n, ...) gives (n, ...).

    Examples:
        >>> fdj.reducescatter(jnp.arange(2), "sum").tolist()
        [0, 1]
    """
    if op not in ("mean", "sum"):
        raise InvalidArgument(f"op {op!r}: reducescatter reduces with mean or sum")
    leaves, restore = _flatten(tree, "reducescatter")
    process_set = options.get("process_set", global_process_set)
    _require_equal_parts(leaves, "reducescatter", process_set)
    return restore(_fold("reduce_scatter", leaves, op, **options))


@overload
def alltoall(
    x: Any, splits: None = ..., *, name: str | None = ..., process_set: ProcessSet = ...
) -> Any: ...
@overload
def alltoall(
    x: Any, splits: Sequence[int], *, name: str | None = ..., process_set: ProcessSet = ...
) -> tuple[Any, list[int]]: ...
@explained(x=A_TREE)
def alltoall(
    x: Any,
    splits: Sequence[int] | None = None,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends a block of rows to every rank and joins the blocks that come, in rank order.

    Without ``splits``, rows are cut into equal blocks, and the result has the shape of ``x``. With
    ``splits`` the next ``splits[r]`` rows are for the r-th rank that takes part, and
    (array, received) comes back, where ``received[r]`` rows are from it: shapes then follow from
    data, so this is for use outside ``jit`` alone.

    Examples:
        >>> fdj.alltoall(jnp.arange(2)).tolist()
        [0, 1]
    """
    leaves, restore = _flatten(x, "alltoall")
    if splits is None:
        _require_equal_parts(leaves, "alltoall", process_set)
        return restore(_run("all_to_all", leaves, name, process_set))
    if any(isinstance(leaf, jax.core.Tracer) for _, leaf in leaves):
        raise InvalidArgument(
            "alltoall with splits is inside jit, where shapes cannot follow from data\n"
            "  advice: cut equal blocks, or call it outside"
        )
    if len(leaves) != 1:
        raise InvalidArgument("alltoall with splits takes one array")
    rows, received = _collectives.all_to_all(
        np.asarray(leaves[0][1]), splits, name=name, group=group_of_calls(process_set)
    )
    return restore([jnp.asarray(rows)]), received


@explained
def barrier(*, name: str | None = None, process_set: ProcessSet = global_process_set) -> None:
    """Comes after every rank's collectives before it, and before those after it.

    Outside ``jit`` it returns when every rank that takes part has come to it; inside it is one more
    collective.

    Examples:
        >>> fdj.barrier()
    """
    _run("barrier", [], name, process_set)
    _call.settle()


def place_of(root: Any, process_set: ProcessSet) -> int:
    """The position of a rank of the world in the set. Raises InvalidArgument."""
    group_of_calls(process_set)
    ranks = process_set.ranks
    if not isinstance(root, int) or root not in ranks:
        raise InvalidArgument(f"root {root!r} is not a rank that takes part; there are {ranks}")
    return ranks.index(root)


# ---- leaves ----

_Leaves = list[tuple[str, Any]]
_THE_ARRAY = "the array"


def _flatten(tree: Any, what: str, *, or_complex: bool = False) -> tuple[_Leaves, Any]:
    """Arrays with their places in the tree, and how to make such a tree again. `or_complex`: sent
    `as_reals`."""
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree)
    leaves, dtypes = [], []
    for path, leaf in pairs:
        place = f"{_THE_ARRAY} at {jax.tree_util.keystr(path)}" if path else _THE_ARRAY
        array = _checked(leaf, f"{what}: {place}", or_complex=or_complex)
        leaves.append((place, as_reals(array)))
        dtypes.append(array.dtype)

    def restore(results: Sequence[Any]) -> Any:
        arrays = [as_before(array, dtype) for array, dtype in zip(results, dtypes, strict=True)]
        return jax.tree_util.tree_unflatten(structure, arrays)

    return leaves, restore


def _checked(leaf: Any, what: str, *, or_complex: bool = False) -> Any:
    if not isinstance(leaf, NUMBERS):
        raise InvalidArgument(f"{what} is {type_of(leaf)}, which is no array")
    array = jnp.asarray(leaf)
    is_sent = or_complex and jnp.issubdtype(array.dtype, jnp.complexfloating)
    if not is_sent and array.dtype.name not in _core.dtypes:
        raise no_such_dtype(what, array.dtype.name)
    if not isinstance(array, jax.core.Tracer):
        _require_our_device(array, what)
    return array


def _check_factors(**factors: Any) -> None:
    """Checks them here, since a program is compiled after the call has returned."""
    for name, value in factors.items():
        if not isinstance(value, numbers.Real):
            raise InvalidArgument(f"{name} is {shown(value)}; it is a number")


def _require_our_device(array: Any, what: str) -> None:
    ours = device()
    # JAX moves arrays that are not committed to a device.
    if array.committed and array.devices() != {ours}:
        theirs = ", ".join(sorted(map(str, array.devices())))
        raise InvalidArgument(
            f"{what} is on {theirs}; collectives run on one device per rank, {ours}\n"
            f"  advice: jax.device_put(array, jax.devices()[{ours.id}])"
        )


def _checked_counts(counts: Sequence[int], rows: _Leaves, process_set: ProcessSet) -> list[int]:
    """Rows of each rank, which must hold for this one."""
    group = group_of_calls(process_set)
    known = list(counts)
    if len(known) != group.size or any(not isinstance(n, int) or n < 0 for n in known):
        raise InvalidArgument(
            f"allgather: counts={counts!r}; pass a number of rows for each of {group.size} ranks"
        )
    for path, leaf in rows:
        if leaf.shape[0] != known[group.rank]:
            raise InvalidArgument(
                f"allgather: {path} has {leaf.shape[0]} rows, and counts says {known[group.rank]} "
                f"of rank {process_set.ranks[group.rank]}"
            )
    return known


def _padded(leaf: Any, rows: int) -> Any:
    """Parts of one length are what a program can gather."""
    return jnp.pad(leaf, [(0, rows - leaf.shape[0]), *[(0, 0)] * (leaf.ndim - 1)])


def _without_padding(joined: Any, counts: list[int]) -> Any:
    longest = max(counts)
    return jnp.concatenate([joined[r * longest : r * longest + n] for r, n in enumerate(counts)])


def _require_equal_parts(leaves: _Leaves, what: str, process_set: ProcessSet) -> None:
    size = group_of_calls(process_set).size
    for path, leaf in leaves:
        if leaf.ndim == 0:
            raise InvalidArgument(f"{what}: {path} has no dimension to split")
        if leaf.shape[0] % size:
            raise InvalidArgument(
                f"{what}: {path} has {leaf.shape[0]} rows, which {size} ranks do not divide"
            )


def _run(
    kind: str,
    leaves: _Leaves,
    name: str | None,
    process_set: ProcessSet,
    *,
    title: str = "",
    **options: Any,
) -> Sequence[Any]:
    """`title`: what a call without a name is called; its place then tells it from others."""
    group, ranks = group_of_calls(process_set), key_of(process_set)
    if name is not None and not isinstance(name, str):
        raise InvalidArgument(f"name={name!r} is not a string")
    if not leaves and kind != "barrier":
        return []
    arrays = [leaf for _, leaf in leaves]
    by_place = name is None and _call.traced(arrays)
    call = _call.Call(
        kind,
        group.size,
        _label(name or title or kind, leaves),
        line=_place.line_of_caller() if by_place else None,
        ranks=ranks,
        rank=group.rank,
        **options,
    )
    return _call.run(call, arrays)


def _label(name: str, leaves: _Leaves) -> str:
    """The label that ranks compare besides the options; it has the dtypes and shapes of arrays."""
    shapes = [f"{leaf.dtype.name}{list(leaf.shape)}" for _, leaf in leaves]
    if len(leaves) < 2:
        places = [path.removeprefix(_THE_ARRAY) for path, _ in leaves]
        return " ".join([name, *shapes]) + "".join(places)
    whole = "; ".join(f"{path} {shape}" for (path, _), shape in zip(leaves, shapes, strict=True))
    return f"{name}, {len(leaves)} arrays #{zlib.crc32(whole.encode()):08x}"
