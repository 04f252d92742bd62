"""Turns the data of fit, evaluate or predict into this rank's parts of their batches.

Keras reads the parts with its own adapters: data with random access become a PyDataset, while a
tf.data.Dataset or a DataLoader keeps its type.
"""

from __future__ import annotations

import math
import sys
import types
from typing import Any

import keras

from farandole._core import InvalidArgument
from farandole.data import FromRank0
from farandole.data._tree import as_array, map_leaves, samples
from farandole.keras._global.arrays import of_arrays
from farandole.keras._global.batches import of_generator, of_py_dataset
from farandole.keras._global.datasets import of_dataset, of_loader
from farandole.keras._global.dealt import of_rank_0
from farandole.keras._global.how import How, Source
from farandole.keras._global.leading import led

_Data = tuple[Any, Any, Any]  # inputs, targets, weights


def source_of(data: _Data, how: How) -> Source:
    """Raises InvalidArgument for data that cannot be split, or that do not go together."""
    x, y, sample_weight = data
    if how.policy == "leader":
        return led(x, lambda whole: source_of(data, whole), how)
    for kind, is_it, make in (
        ("a tf.data.Dataset", _is(x, "tensorflow", "data.Dataset"), of_dataset),
        ("a DataLoader", _is(x, "torch", "utils.data.DataLoader"), of_loader),
        ("a PyDataset", isinstance(x, keras.utils.PyDataset), of_py_dataset),
        ("a FromRank0", isinstance(x, FromRank0), of_rank_0),
        ("a generator", isinstance(x, types.GeneratorType), of_generator),
    ):
        if is_it:
            _require_alone(kind, how, y=y, sample_weight=sample_weight, batch_size=how.batch_size)
            return make(x, how)
    return of_arrays(x, y, sample_weight, how)


def _is(x: Any, module: str, path: str) -> bool:
    """Whether it is of a class of a framework that the program has imported."""
    kind: Any = sys.modules.get(module)
    for name in path.split("."):
        kind = getattr(kind, name, None)
    return isinstance(kind, type) and isinstance(x, kind)


def _require_alone(kind: str, how: How, **others: Any) -> None:
    for name, value in others.items():
        if value is not None:
            raise how.error(
                f"x is {kind}, whose batches have their targets, weights and size; {name} goes "
                "with arrays only"
            )


def are_arrays(data: Any) -> bool:
    return isinstance(data, tuple | list | dict) or hasattr(data, "__array__")


def unpacked(data: Any) -> _Data:
    """Inputs, targets and weights of validation_data, as fit() takes it."""
    if not isinstance(data, tuple | list):
        return data, None, None
    if not 1 <= len(data) <= 3:
        raise InvalidArgument(
            f"validation_data has {len(data)} parts; they are inputs, targets, weights"
        )
    x, y, weight = [*data, None, None][:3]
    return x, y, weight


def held_out(data: _Data, fraction: float) -> tuple[_Data, _Data]:
    """Training data, and the last samples, as Keras splits them."""
    arrays = [map_leaves(as_array, each) for each in data]
    n = samples(arrays, "fit(validation_split=…): the data")
    at = math.floor(n * (1.0 - fraction))
    if not 0 < at < n:
        raise InvalidArgument(
            f"fit(): validation_split={fraction} of {n} samples leaves none on one side"
        )

    def part(rows: slice) -> _Data:
        x, y, weight = (map_leaves(lambda leaf: leaf[rows], each) for each in arrays)
        return x, y, weight

    return part(slice(at)), part(slice(at, None))
