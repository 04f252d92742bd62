"""Pytrees of arrays: a check of arguments, and complex numbers as real ones."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

NUMBERS = (jax.Array, np.ndarray, np.generic, bool, int, float)


def as_reals(array: Any) -> Any:
    """Complex numbers as pairs of real ones, in a last dimension: sums and means are theirs."""
    if not jnp.issubdtype(array.dtype, jnp.complexfloating):
        return array
    return jnp.stack([array.real, array.imag], -1)


def as_before(array: Any, dtype: Any) -> Any:
    """The inverse of `as_reals`, for an array of that dtype."""
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        return array
    return jax.lax.complex(array[..., 0], array[..., 1])


def _is_tree(value: Any) -> bool:
    return all(map(_is_array, jax.tree_util.tree_leaves(value)))


def _is_array(leaf: Any) -> bool:
    try:
        return isinstance(leaf, NUMBERS) and jnp.asarray(leaf) is not None
    except (OverflowError, TypeError, ValueError):
        return False


A_TREE = ("an array, or a pytree of arrays and numbers that JAX holds", _is_tree)
