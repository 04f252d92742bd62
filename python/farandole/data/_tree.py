"""Batches are arrays, or dicts, tuples and lists of them; None stands for what is not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from farandole._arguments import shown, type_of
from farandole._core import InvalidArgument


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same structure, of what the function makes of its arrays."""
    if tree is None:
        return None
    if isinstance(tree, dict):
        return {key: map_leaves(function, each) for key, each in tree.items()}
    if isinstance(tree, tuple | list):
        mapped = [map_leaves(function, each) for each in tree]
        return type(tree)(*mapped) if hasattr(tree, "_fields") else type(tree)(mapped)
    return function(tree)


def leaves(tree: Any) -> list[Any]:
    found: list[Any] = []
    map_leaves(found.append, tree)
    return found


def samples(tree: Any, what: str) -> int:
    """The first dimension, which all arrays of a batch share.

    Raises:
        InvalidArgument: there is none, or they differ.
    """
    lengths = []
    for leaf in leaves(tree):
        shape = getattr(leaf, "shape", None)
        if shape is None or len(shape) == 0:
            raise InvalidArgument(
                f"{what} has {type_of(leaf)} without a first dimension, where it has "
                "samples\n  advice: pass batches, as of dataset.batch(…), not single samples"
            )
        lengths.append(int(shape[0]))
    if not lengths:
        raise InvalidArgument(f"{what} has no arrays")
    if len(set(lengths)) > 1:
        raise InvalidArgument(f"{what} has arrays of different lengths: {lengths}")
    return lengths[0]


def as_array(value: Any) -> np.ndarray[Any, Any]:
    """Converts arrays of a framework or of pandas to numpy's.

    Raises:
        InvalidArgument: it is none.
    """
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "to_numpy"):  # pandas
        array: np.ndarray[Any, Any] = value.to_numpy()
        return array[:, None] if array.ndim == 1 else array
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    if not hasattr(value, "shape") or not hasattr(value, "__array__"):
        raise InvalidArgument(
            f"the data have {shown(value)}, which is {type_of(value)}; pass arrays, a "
            "tf.data.Dataset, a PyDataset, a DataLoader or a generator of batches"
        )
    return np.asarray(value)
