"""Copies of pytrees that nothing can touch: programs that are given arrays (``donate_argnums``)
delete them, and numpy's are changed in place.

They are on the host. A copy on the device would take its memory twice and, on the CPU, a call of
JAX for each array; and who commits wants to know that what was computed is there.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives

from farandole._arguments import type_of
from farandole._core import InvalidArgument


@dataclass(frozen=True)
class Kept:
    """An array of JAX."""

    value: np.ndarray[Any, Any]  # of random keys, their data
    weak: bool = False  # its dtype gives way to that of others
    key: Any = None  # how random keys are made of it
    sharding: Any = None  # where it has been put; None: nowhere
    device: Any = None  # where it lies then

    def array(self) -> Any:
        """A new one, which shares no memory with this."""
        if self.sharding is None:
            with jax.default_device(self.device):
                made = _weak(self.value) if self.weak else jnp.array(self.value)
        else:  # JAX may take numpy's memory for the array's
            made = _weak(self.value) if self.weak else self.value.copy()
            made = jax.device_put(made, self.sharding)
        return made if self.key is None else jax.random.wrap_key_data(made, impl=self.key)


def _weak(value: np.ndarray[Any, Any]) -> Any:
    """An array of such a dtype, which jax.numpy has no words for."""
    made = jnp.array(value)
    return primitives.convert_element_type_p.bind(
        made, new_dtype=made.dtype, weak_type=True, sharding=None
    )


def like(leaf: Any, value: np.ndarray[Any, Any], weak: bool) -> Kept:
    """With another value, where that leaf of a tree is, if it is an array of JAX."""
    if not isinstance(leaf, jax.Array):
        return Kept(value, weak)
    key = jax.random.key_impl(leaf) if is_key(leaf) else None
    data: Any = leaf if key is None else jax.random.key_data(leaf)
    if data.committed:
        return Kept(value, weak, key, data.sharding)
    (device,) = data.devices()
    return Kept(value, weak, key, None, device)


def is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def copied(name: str, tree: Any, memo: dict[int, Any]) -> Any:
    """The tree with a `Kept` for each array of JAX; or, of such a tree, with arrays for these.

    Args:
        name: of the tree, for errors.
        memo: of `copy.deepcopy`, of trees that may share objects.

    Raises:
        InvalidArgument: something in it cannot be copied.
        Exception: what JAX raises where the program that made an array has failed.
    """
    leaves, structure = leaves_of(tree)
    for path, leaf in leaves:
        require_plain(name + path, leaf)
    if not any(isinstance(leaf, jax.Array | Kept) for _, leaf in leaves):
        return _deeply(name, tree, memo)
    return structure.unflatten([_copied_leaf(name + path, leaf, memo) for path, leaf in leaves])


def leaves_of(tree: Any) -> tuple[list[tuple[str, Any]], Any]:
    """With their places, and the structure. What JAX takes for no tree is one leaf."""
    try:
        pairs, structure = jax.tree_util.tree_flatten_with_path(tree)
    except (TypeError, ValueError):  # a dict of keys that have no order
        return [("", tree)], jax.tree_util.tree_structure(0)
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in pairs], structure


def _copied_leaf(place: str, leaf: Any, memo: dict[int, Any]) -> Any:
    if isinstance(leaf, Kept):
        return leaf.array()
    if not isinstance(leaf, jax.Array):
        return _deeply(place, leaf, memo)
    data: Any = jax.random.key_data(leaf) if is_key(leaf) else leaf
    try:
        return like(leaf, np.array(data), data.weak_type)
    except RuntimeError as error:
        if not data.is_deleted():
            raise
        raise InvalidArgument(
            f"{place} of the state has been deleted: a program was given it (donate_argnums)\n"
            "  advice: put what the program returns into the state before it is saved"
        ) from error


def require_plain(place: str, leaf: Any) -> None:
    """Raises InvalidArgument where a leaf of a tree is an array that a state cannot keep."""
    if isinstance(leaf, jax.core.Tracer):
        why = "is being traced; states are saved outside of jit"
    elif isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        why = "lies on devices of several processes (jax.distributed), of which each has a part"
    elif isinstance(leaf, jax.Ref):
        why = "is a jax.Ref; keep what it holds, ref[...]"
    else:
        return
    raise InvalidArgument(f"{place} of the state {why}")


def _deeply(place: str, value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:
        raise InvalidArgument(
            f"{place} of the state is {type_of(value)}, which cannot be copied: {error}"
        ) from error
