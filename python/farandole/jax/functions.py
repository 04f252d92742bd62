"""One rank's parameters and objects for all ranks. Outside ``jit``."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from farandole import _collectives, _core, _exchange, _grouped
from farandole._core import InvalidArgument, Mismatch
from farandole._world import world

# Objects travel as pickles: the ranks of a job are processes of one user on one host, which is
# checked when they meet, and run the same program.


def broadcast_object(obj: Any, root: int = 0, *, name: str | None = None) -> Any:
    """The root's object on every rank; it is pickled.

    Example:
        >>> import farandole.jax as fdj
        >>> fdj.init()
        >>> fdj.broadcast_object({"epoch": 3})
        {'epoch': 3}
    """
    label = name or "object"
    is_root = world().rank == root
    data = np.frombuffer(pickle.dumps(obj), np.uint8) if is_root else np.empty(0, np.uint8)
    size = _collectives.broadcast(np.array([data.size]), root, name=f"{label}.size")
    if not is_root:
        data = np.empty(int(size[0]), np.uint8)
    data = _collectives.broadcast(data, root, name=f"{label}.data")
    return obj if is_root else pickle.loads(data.tobytes())


def allgather_object(obj: Any, *, name: str | None = None) -> list[Any]:
    """Every rank's object, in rank order; they are pickled.

    Example:
        >>> import farandole.jax as fdj
        >>> fdj.init()
        >>> fdj.allgather_object("a")
        ['a']
    """
    data = np.frombuffer(pickle.dumps(obj), np.uint8)
    sizes = _exchange.all_gather(np.array([data.size]), name=f"{name or 'object'}.size").tolist()
    whole = _exchange.all_gather(data, counts=sizes, name=f"{name or 'object'}.data").tobytes()
    ends = np.cumsum(sizes).tolist()
    return [pickle.loads(whole[e - n : e]) for n, e in zip(sizes, ends, strict=True)]


def broadcast_parameters(tree: Any, root: int = 0) -> Any:
    """The root's pytree on every rank: parameters, an optimizer's state, random keys.

    Args:
        tree: arrays and numbers, in the same structure on every rank.
        root: whose values.

    Returns:
        A tree of the same structure; arrays are new.

    Raises:
        InvalidArgument: a leaf is no array, of an unsupported dtype, or being traced.
        Mismatch: the ranks' trees differ; says where, and who has what. Nothing was sent.

    Example:
        >>> import jax.numpy as jnp, farandole.jax as fdj
        >>> fdj.init()
        >>> fdj.broadcast_parameters({"w": jnp.ones(2)})["w"].tolist()
        [1.0, 1.0]
    """
    if not isinstance(root, int) or not 0 <= root < world().size:
        raise InvalidArgument(f"root {root!r} is not a rank of this world of {world().size}")
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree)
    names = [jax.tree_util.keystr(path) or "the array" for path, _ in pairs]
    arrays = [_on_host(leaf, name) for name, (_, leaf) in zip(names, pairs, strict=True)]
    _agree([f"'{n}' {a.dtype.name}{list(a.shape)}" for n, a in zip(names, arrays, strict=True)])
    if not arrays:
        return tree
    sent = _grouped.grouped_broadcast(arrays, root, name="parameters")
    leaves = [_like(leaf, array) for (_, leaf), array in zip(pairs, sent, strict=True)]
    return jax.tree_util.tree_unflatten(structure, leaves)


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _key_data(key: Any) -> Any:
    return jax.random.key_data(key)


def _on_host(leaf: Any, name: str) -> np.ndarray[Any, Any]:
    if isinstance(leaf, jax.core.Tracer):
        raise InvalidArgument(
            f"'{name}' is being traced; call broadcast_parameters outside jit, or broadcast inside"
        )
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float):
        raise InvalidArgument(f"'{name}' is a {type(leaf).__name__}, which is no array")
    array = np.asarray(_key_data(leaf) if _is_key(leaf) else jnp.asarray(leaf))
    if array.dtype.name not in _core.dtypes:
        raise InvalidArgument(
            f"'{name}' has dtype {array.dtype.name}, which is not supported; there are "
            + ", ".join(_core.dtypes)
        )
    return np.ascontiguousarray(array).reshape(array.shape)


def _like(leaf: Any, array: np.ndarray[Any, Any]) -> Any:
    if _is_key(leaf):
        return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(leaf))
    if isinstance(leaf, bool | int | float):
        return type(leaf)(array[()])
    return jnp.asarray(array)


def _agree(rows: Sequence[str]) -> None:
    """Raises Mismatch on every rank unless all ranks have the same rows."""
    by_rank = allgather_object(list(rows), name="parameters")
    for i in range(max(map(len, by_rank))):
        values = [theirs[i] if i < len(theirs) else "nothing" for theirs in by_rank]
        if len(set(values)) > 1:
            given = "; ".join(f"rank {r}: {value}" for r, value in enumerate(values))
            raise Mismatch(
                f"ranks disagree on the parameters, number {i}: {given}\n"
                "  advice: build the same model on every rank"
            )
