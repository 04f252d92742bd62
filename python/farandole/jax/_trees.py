"""What counts as a pytree of arrays, for messages about one that is none."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

NUMBERS = (jax.Array, np.ndarray, np.generic, bool, int, float)


def _is_tree(value: Any) -> bool:
    return all(map(_is_array, jax.tree_util.tree_leaves(value)))


def _is_array(leaf: Any) -> bool:
    try:
        return isinstance(leaf, NUMBERS) and jnp.asarray(leaf) is not None
    except (OverflowError, TypeError, ValueError):
        return False


A_TREE = ("an array, or a pytree of arrays and numbers that JAX holds", _is_tree)
