"""One rank's parameters and objects for all ranks. Outside ``jit``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from farandole import _collectives, _core
from farandole._arguments import explained, no_such_dtype, type_of
from farandole._core import InvalidArgument
from farandole._unreduced import note_broadcast
from farandole.common import _objects
from farandole.common._process_set import ProcessSet, global_process_set
from farandole.jax._order import group_of_calls
from farandole.jax._trees import A_TREE, NUMBERS
from farandole.jax._weights import rows_of
from farandole.jax.ops import place_of


@explained
def broadcast_object(
    obj: Any,
    root: int = 0,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The root's object on every rank; it is pickled, by cloudpickle where that is installed.

    Raises:
        InvalidArgument: it cannot be pickled, on every rank; or there is no such root.

    Examples:
        >>> fdj.broadcast_object({"epoch": 3})
        {'epoch': 3}
    """
    place_of(root, process_set)
    return _objects.broadcast_object(obj, root, name, process_set)


@explained
def allgather_object(
    obj: Any, *, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Every rank's object, in rank order; pickled as :func:`broadcast_object` does.

    Raises:
        InvalidArgument: one cannot be pickled; on every rank, naming the first.

    Examples:
        >>> fdj.allgather_object("a")
        ['a']
    """
    group_of_calls(process_set)
    return _objects.allgather_object(obj, name, process_set)


@explained(tree=A_TREE)
def broadcast_parameters(
    tree: Any, root: int = 0, *, process_set: ProcessSet = global_process_set
) -> Any:
    """The root's pytree on every rank: parameters, an optimizer's state, random keys.

    Args:
        tree: arrays and numbers, in the same structure on every rank.
        root: whose values; a rank of the world.
        process_set: the ranks that take part.

    Returns:
        A tree of the same structure; arrays are new.

    Raises:
        InvalidArgument: a leaf is no array, of an unsupported dtype, or being traced; or there is
            no such root. On every rank of the set, naming the first rank that has it. Also on a
            rank that is not in the set.
        Mismatch: the ranks' trees differ; says where, and who has what. On every rank.

    Examples:
        >>> fdj.broadcast_parameters({"w": jnp.ones(2)})["w"].tolist()
        [1.0, 1.0]
    """
    group = group_of_calls(process_set)
    named = rows_of(tree)
    place = 0
    arrays: list[np.ndarray[Any, Any]] = []
    refusal = ""
    try:
        place = place_of(root, process_set)
        arrays = [_on_host(leaf, name) for name, leaf in named]
    except InvalidArgument as error:
        refusal = str(error)  # sent to the other ranks, which wait
    rows = [
        f"'{name}' {array.dtype.name}{list(array.shape)}"
        for (name, _), array in zip(named, arrays, strict=not refusal)
    ]
    _agree(rows, refusal, process_set)
    note_broadcast("broadcast_parameters")
    if not arrays:
        return tree
    reals = [_as_reals(array) for array in arrays]
    sent = _collectives.grouped_broadcast(reals, place, name="parameters", group=group)
    leaves = [
        _like(leaf, array.view(mine.dtype).reshape(mine.shape))
        for (_, leaf), array, mine in zip(named, sent, arrays, strict=True)
    ]
    return jax.tree_util.tree_structure(tree).unflatten(leaves)


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _on_host(leaf: Any, name: str) -> np.ndarray[Any, Any]:
    if isinstance(leaf, jax.core.Tracer):
        raise InvalidArgument(
            f"'{name}' is being traced; call broadcast_parameters outside jit, or broadcast inside"
        )
    if not isinstance(leaf, NUMBERS):
        raise InvalidArgument(f"'{name}' is {type_of(leaf)}, which is no array")
    array = np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else jnp.asarray(leaf))
    is_given = isinstance(leaf, jax.Array) or array.dtype.kind not in "iu"
    if not is_given and not np.array_equal(array, leaf):
        raise InvalidArgument(
            f"'{name}' has numbers beyond those of {array.dtype}, which JAX makes of it\n"
            "  advice: jax_enable_x64, or fdj.broadcast_object"
        )
    if array.dtype.name not in _core.dtypes and array.dtype.kind != "c":
        raise no_such_dtype(f"'{name}'", array.dtype.name)
    return np.ascontiguousarray(array).reshape(array.shape)


def _as_reals(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Complex numbers as pairs of real ones, in the same memory."""
    return array.reshape(-1).view(array.real.dtype) if array.dtype.kind == "c" else array


def _like(leaf: Any, array: np.ndarray[Any, Any]) -> Any:
    if _is_key(leaf):
        return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(leaf))
    if isinstance(leaf, bool | int | float):
        return type(leaf)(array[()])
    return jnp.asarray(array)


def _agree(rows: Sequence[str], refusal: str, process_set: ProcessSet) -> None:
    """Compares the rows of all ranks of the set, unless one of them refuses.

    Raises:
        InvalidArgument: a rank has given a refusal; on every rank.
        Mismatch: the rows differ; on every rank, naming the first that does.
    """
    mine, ranks = (list(rows), refusal), process_set.ranks
    gathered = allgather_object(mine, name="parameters", process_set=process_set)
    for rank, (_, why) in zip(ranks, gathered, strict=True):
        if why:
            raise InvalidArgument(f"broadcast_parameters on rank {rank}: {why}")
    _objects.compare(
        "the parameters", {r: rows for r, (rows, _) in zip(ranks, gathered, strict=True)}
    )
