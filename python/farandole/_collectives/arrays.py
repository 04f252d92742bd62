"""Arguments of collectives: numpy's arrays, any with the buffer protocol or DLPack, and those on
CUDA's devices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import index
from typing import Any, SupportsIndex

import numpy as np

from farandole import _core
from farandole._arguments import type_of
from farandole._core import InvalidArgument


def like(x: Any, shape: tuple[int, ...]) -> Any:
    """An uninitialised array of x's kind and dtype, where x lies."""
    if isinstance(x, (np.ndarray, np.generic)):
        return np.empty(shape, x.dtype)
    if hasattr(x, "new_empty"):  # a tensor, which makes others of its kind
        return x.new_empty(shape)
    if is_on_device(x):
        return _like_on_device(x, shape)
    if hasattr(x, "__dlpack__") or hasattr(x, "__array__"):
        return np.empty(shape, np.asarray(x).dtype)
    view = memoryview(x)
    try:
        dtype = np.dtype(view.format)
    except TypeError:  # one that numpy has not
        raise InvalidArgument(
            f"input has an unsupported element type (format '{view.format}')"
        ) from None
    return np.empty(shape, dtype)


_CUDA = 2  # DLPack's number


def is_on_device(x: Any) -> bool:
    """Whether x lies in the memory of a CUDA device."""
    if hasattr(x, "__dlpack_device__"):
        return bool(x.__dlpack_device__()[0] == _CUDA)
    return hasattr(x, "__cuda_array_interface__")


def _like_on_device(x: Any, shape: tuple[int, ...]) -> Any:
    if not hasattr(x, "__array_namespace__"):
        raise InvalidArgument(
            f"{type_of(x)} on a device does not say how to make another one; pass out="
        )
    return x.__array_namespace__().empty(shape, dtype=x.dtype, device=x.device)


_BFLOAT16 = "E"  # the type character of ml_dtypes.bfloat16
_SCALARS = (np.generic, bool, int, float)


def _is_plain(x: Any) -> bool:
    """numpy's own arrays need no looking at: a small collective takes less than a microsecond."""
    return type(x) is np.ndarray and x.dtype.char != _BFLOAT16


def input_array(x: Any) -> Any:
    """x itself if it is an array; numpy scalars and Python numbers become arrays."""
    if _is_plain(x):
        return x
    if isinstance(x, _SCALARS):
        return np.asarray(x)
    if isinstance(x, list | tuple):
        raise InvalidArgument(f"input is {type_of(x)}; pass an array, as in numpy.asarray(...)")
    if not _is_array(x):
        raise InvalidArgument(
            f"input is {type_of(x)}, which has neither the buffer protocol nor __dlpack__"
        )
    return x


def _is_array(x: Any) -> bool:
    if isinstance(x, (np.ndarray, _core.Buffer)) or hasattr(x, "__dlpack__"):
        return True
    if hasattr(x, "__cuda_array_interface__"):
        return True
    try:
        memoryview(x).release()
    except TypeError:
        return False
    return True


def borrowable(x: Any) -> Any:
    """x as the native core takes it: numpy has no buffer protocol for bfloat16."""
    if not _is_plain(x) and isinstance(x, np.ndarray) and x.dtype.name == "bfloat16":
        return _core.Buffer(x.ctypes.data, x.size, "bfloat16", x) if x.flags.c_contiguous else x
    return x


def shape_of(x: Any) -> tuple[int, ...]:
    shape = getattr(x, "shape", None)
    if shape is None and hasattr(x, "__cuda_array_interface__"):
        shape = x.__cuda_array_interface__["shape"]
    return tuple(shape) if shape is not None else tuple(memoryview(x).shape or ())


def rows_of(x: Any, verb: str) -> tuple[int, tuple[int, ...], int]:
    """The length of x's first dimension, the other dimensions, and elements in a row."""
    shape = shape_of(x)
    if not shape:
        raise InvalidArgument(f"{verb} splits the first dimension, and this array has none")
    return shape[0], shape[1:], math.prod(shape[1:])


def checked_counts(counts: Sequence[SupportsIndex], size: int, what: str) -> list[int]:
    """One count for each rank."""
    try:
        checked = [index(n) for n in counts]
    except TypeError:
        raise InvalidArgument(f"{what}={counts!r} is not a sequence of integers") from None
    if len(checked) != size or any(n < 0 for n in checked):
        raise InvalidArgument(
            f"{what}={checked} is not one number of rows, at least 0, for each of {size} ranks"
        )
    return checked
