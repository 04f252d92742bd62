"""Arrays of numpy, which are sent between stages; every backend makes its tensors of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from farandole import _core
from farandole._core import InvalidArgument
from farandole.pipeline._wire import MOST_TENSORS, Form, Leaf

_Array = np.ndarray[Any, Any]


class Arrays:
    """Numpy arrays for the runner: as the engine's buffers to send, and to receive into."""

    def sent(self, array: _Array) -> Any:
        return _core.Buffer(array.ctypes.data, array.size, array.dtype.name, array)

    def empty(self, leaf: Leaf) -> _Array:
        return np.empty(leaf.shape, _dtype(leaf.dtype))


def _dtype(name: str) -> Any:
    if name == "bfloat16":
        import ml_dtypes

        return ml_dtypes.bfloat16
    return name


def array_of(tensor: Any) -> _Array:
    array: _Array = np.ascontiguousarray(keras.ops.convert_to_numpy(tensor))
    return array.reshape(tuple(tensor.shape))  # ascontiguousarray makes a vector of a scalar


def form_of(tensors: Sequence[Any], *, differentiable: bool) -> tuple[Form, list[_Array]]:
    """The outputs of a stage, to be sent. Raises InvalidArgument."""
    if len(tensors) > MOST_TENSORS:
        raise InvalidArgument(
            f"this stage makes {len(tensors)} tensors; between stages there are at most "
            f"{MOST_TENSORS}"
        )
    arrays = [array_of(each) for each in tensors]
    for each in arrays:
        if each.dtype.name not in _core.dtypes:
            raise InvalidArgument(
                f"this stage makes a tensor of {each.dtype.name}, which is not sent between stages"
            )
    rows = [
        Leaf(each.dtype.name, each.shape, differentiable and _is_float(each)) for each in arrays
    ]
    return Form(None, tuple(rows)), arrays


def _is_float(array: _Array) -> bool:
    return bool(keras.backend.is_float_dtype(array.dtype.name))


def gradients_of(form: Form, gradients: Sequence[Any]) -> tuple[Form, list[_Array | None]]:
    """The gradients of received leaves that want one, to be sent back."""
    rows = zip(form.leaves, gradients, strict=True)
    kept = [
        (leaf._replace(differentiable=False), None if each is None else array_of(each))
        for leaf, each in rows
        if leaf.differentiable
    ]
    return Form(None, tuple(leaf for leaf, _ in kept)), [each for _, each in kept]
