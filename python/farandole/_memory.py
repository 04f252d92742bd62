"""Memory that all ranks of this host map."""

from __future__ import annotations

import math
from collections.abc import Iterable
from operator import index
from typing import Any, SupportsIndex, TypeVar, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

from farandole._arguments import explained, shown
from farandole._core import InvalidArgument, ResourceError
from farandole._world import world

Shape = SupportsIndex | Iterable[SupportsIndex]
_S = TypeVar("_S", bound=np.generic)

__all__ = ["allocate"]


@overload
def allocate(shape: Shape) -> NDArray[np.float32]: ...
@overload
def allocate(shape: Shape, dtype: np.dtype[_S] | type[_S]) -> NDArray[_S]: ...
@overload
def allocate(shape: Shape, dtype: DTypeLike) -> NDArray[Any]: ...
@explained
def allocate(
    shape: SupportsIndex | Iterable[SupportsIndex], dtype: Any = np.float32
) -> NDArray[Any]:
    """A zeroed array in memory that all ranks of this host map; collectives on it copy less.

    It is this rank's own: allocating is not collective. Released with its last view.

    Raises:
        ResourceError: the shared arena is full (``FARANDOLE_ARENA_BYTES``).

    Examples:
        >>> import farandole as fd
        >>> fd.init()
        >>> fd.allocate(4, "float64").tolist()
        [0.0, 0.0, 0.0, 0.0]
    """
    try:
        kind = np.dtype(dtype)
    except (TypeError, ValueError):
        raise InvalidArgument(f"dtype is {shown(dtype)}, which numpy does not know") from None
    try:
        dims = tuple(map(index, shape if isinstance(shape, Iterable) else (shape,)))
    except TypeError:
        raise InvalidArgument(f"shape {shown(shape)} is not an integer or integers") from None
    if any(d < 0 for d in dims):
        raise InvalidArgument(f"shape {dims} has a negative dimension")
    count = math.prod(dims)
    group = world()
    if count * kind.itemsize >= 1 << 63:
        raise ResourceError(f"no machine has {count * kind.itemsize} bytes of memory")
    memory = group.allocate(max(1, count * kind.itemsize))
    # Its type has no buffer protocol before Python 3.12.
    view = memoryview(memory)  # type: ignore[arg-type, unused-ignore]
    array: NDArray[Any] = np.frombuffer(view, kind, count).reshape(dims)
    return array
