"""The collectives on arrays: numpy's, and any with the buffer protocol or DLPack."""

from __future__ import annotations

import math
from collections.abc import Iterable
from operator import index
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from farandole import _core
from farandole._core import Handle, InvalidArgument, ResourceError
from farandole._world import Group, _state, world

__all__ = [
    "Handle",
    "all_gather",
    "all_reduce",
    "allocate",
    "barrier",
    "broadcast",
    "reduce_scatter",
]


def _like(x: Any, shape: tuple[int, ...]) -> Any:
    """An uninitialised array of x's kind and dtype, in this process' memory."""
    if isinstance(x, (np.ndarray, np.generic)):
        return np.empty(shape, x.dtype)
    if type(x).__module__.split(".")[0] == "torch":
        import torch

        return torch.empty(shape, dtype=x.dtype)
    if hasattr(x, "__dlpack__") or hasattr(x, "__array__"):
        return np.empty(shape, np.asarray(x).dtype)
    view = memoryview(x)
    return np.empty(shape, np.dtype(view.format))


_BFLOAT16 = "E"  # the type character of ml_dtypes.bfloat16
_SCALARS = (np.generic, bool, int, float)


def _is_plain(x: Any) -> bool:
    """numpy's own arrays need no looking at: a small collective takes less than a microsecond."""
    return type(x) is np.ndarray and x.dtype.char != _BFLOAT16


def _input(x: Any) -> Any:
    """x itself if it is an array; numpy scalars and Python numbers become arrays."""
    if _is_plain(x):
        return x
    if isinstance(x, _SCALARS):
        return np.asarray(x)
    if isinstance(x, list | tuple):
        raise InvalidArgument(
            f"input is a {type(x).__name__}; pass an array, as in numpy.asarray(...)"
        )
    if not _is_array(x):
        raise InvalidArgument(
            f"input is a {type(x).__name__}, which has neither the buffer protocol nor __dlpack__"
        )
    return x


def _is_array(x: Any) -> bool:
    if isinstance(x, (np.ndarray, _core.Buffer)) or hasattr(x, "__dlpack__"):
        return True
    try:
        memoryview(x).release()
    except TypeError:
        return False
    return True


def _borrowable(x: Any) -> Any:
    """x as the native core takes it: numpy has no buffer protocol for bfloat16."""
    if not _is_plain(x) and isinstance(x, np.ndarray) and x.dtype.name == "bfloat16":
        return _core.Buffer(x.ctypes.data, x.size, "bfloat16", x) if x.flags.c_contiguous else x
    return x


def _shape(x: Any) -> tuple[int, ...]:
    shape = getattr(x, "shape", None)
    return tuple(shape) if shape is not None else tuple(memoryview(x).shape or ())


def _call(
    kind: str, x: Any, out: Any, group: Group | None, async_op: bool, options: tuple[Any, ...]
) -> Any:
    """Runs or starts a collective; `options` go by position, which costs a fifth of keywords."""
    group = group if group is not None else world()
    source = _borrowable(x)
    target = source if out is x else _borrowable(out)
    if async_op:
        return group.start(kind, source, target, out, *options)
    group.run(kind, source, target, *options)
    return out


@_core.quick_call("all_reduce", _state)
def all_reduce(
    x: Any,
    op: str = "sum",
    *,
    out: Any = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    name: str | None = None,
    async_op: bool = False,
    group: Group | None = None,
    algorithm: str | None = None,
    level: str | None = None,
    timeout: float | None = None,
) -> Any:
    """Reduces equal arrays of all ranks, elementwise; every rank gets the result.

    The result has the same bits on every rank, and for any algorithm of level ``canonical``: it is
    defined by docs/determinism.md.

    Args:
        x: a contiguous array in host memory; any shape. dtypes: float16, bfloat16, float32,
            float64, signed and unsigned integers of 8 to 64 bits, bool.
        op: ``sum``, ``mean``, ``min``, ``max`` or ``product``.
        out: where the result goes; ``out=x`` reduces in place. Default: a new array like ``x``.
        prescale, postscale: factors on every input, and on the result.
        name: compared between ranks, and part of errors and traces.
        async_op: return a ``Handle`` at once; ``Handle.wait()`` gives the result.
        group: default: all ranks. Operations of a group match in program order.
        algorithm: force a path (``lines``, ``one_shot``, ``window``, ``staged``) or a planner; the
            error for an unknown name lists the planners.
        level: ``canonical`` or ``fast``; default ``FARANDOLE_LEVEL``.
        timeout: seconds until the operation fails, 0: never; default ``FARANDOLE_TIMEOUT``.

    Raises:
        InvalidArgument: bad input on this rank; nothing was sent.
        Mismatch: the ranks submitted different operations; the group lives on.
        PeerLost, EarlyExit, Stalled, RemoteError: the group has failed.

    Example:
        >>> import farandole as fd, numpy as np
        >>> fd.init()
        >>> float(fd.all_reduce(np.float32(3), op="mean"))
        3.0
    """
    x = _input(x)
    if out is None:
        out = _like(x, _shape(x))
    return _call(
        "all_reduce", x, out, group, async_op,
        (op, prescale, postscale, 0, name, algorithm, level, timeout),
    )  # fmt: skip


@_core.quick_call("all_gather", _state)
def all_gather(
    x: Any,
    *,
    out: Any = None,
    name: str | None = None,
    async_op: bool = False,
    group: Group | None = None,
    algorithm: str | None = None,
    timeout: float | None = None,
) -> Any:
    """Joins equal-shaped arrays of all ranks along the first dimension, in rank order.

    ``x`` of shape (n, ...) gives (size·n, ...); a 0-dimensional ``x`` gives (size,). Arguments and
    errors as in :func:`all_reduce`.

    Example:
        >>> import farandole as fd, numpy as np
        >>> fd.init()
        >>> fd.all_gather(np.arange(2)).tolist()
        [0, 1]
    """
    x = _input(x)
    shape = _shape(x) or (1,)
    size = (group if group is not None else world()).size
    if out is None:
        out = _like(x, (size * shape[0], *shape[1:]))
    return _call(
        "all_gather", x, out, group, async_op,
        ("sum", 1.0, 1.0, 0, name, algorithm, None, timeout),
    )  # fmt: skip


@_core.quick_call("reduce_scatter", _state)
def reduce_scatter(
    x: Any,
    op: str = "sum",
    *,
    out: Any = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    name: str | None = None,
    async_op: bool = False,
    group: Group | None = None,
    algorithm: str | None = None,
    level: str | None = None,
    timeout: float | None = None,
) -> Any:
    """Reduces as :func:`all_reduce` does, and leaves part r of the elements on rank r.

    The elements of ``x``, flattened, are split evenly; the first ranks get one more where they do
    not divide. The result has one dimension, unless ``out`` is given.

    Example:
        >>> import farandole as fd, numpy as np
        >>> fd.init()
        >>> fd.reduce_scatter(np.arange(3)).tolist()
        [0, 1, 2]
    """
    x = _input(x)
    g = group if group is not None else world()
    if out is None:
        count = math.prod(_shape(x))
        out = _like(x, (count // g.size + (g.rank < count % g.size),))
    return _call(
        "reduce_scatter", x, out, group, async_op,
        (op, prescale, postscale, 0, name, algorithm, level, timeout),
    )  # fmt: skip


@_core.quick_call("broadcast", _state)
def broadcast(
    x: Any,
    root: int = 0,
    *,
    out: Any = None,
    name: str | None = None,
    async_op: bool = False,
    group: Group | None = None,
    algorithm: str | None = None,
    timeout: float | None = None,
) -> Any:
    """Copies the root's array to every rank; shapes and dtypes are equal on all ranks.

    ``root`` is a rank of ``group``. Arguments and errors as in :func:`all_reduce`; ``out=x``
    overwrites ``x`` on the other ranks.

    Example:
        >>> import farandole as fd, numpy as np
        >>> fd.init()
        >>> fd.broadcast(np.arange(3), root=0).tolist()
        [0, 1, 2]
    """
    x = _input(x)
    if out is None:
        out = _like(x, _shape(x))
    return _call(
        "broadcast", x, out, group, async_op,
        ("sum", 1.0, 1.0, root, name, algorithm, None, timeout),
    )  # fmt: skip


def barrier(
    *, group: Group | None = None, name: str | None = None, timeout: float | None = None
) -> None:
    """Returns when every rank of the group has called it."""
    (group if group is not None else world()).barrier(name, timeout)


def allocate(
    shape: SupportsIndex | Iterable[SupportsIndex], dtype: Any = np.float32
) -> NDArray[Any]:
    """A zeroed array in memory that all ranks of this host map; collectives on it copy less.

    It is this rank's own: allocating is not collective. Released with its last view.

    Raises:
        ResourceError: the shared arena is full (``FARANDOLE_ARENA_BYTES``).

    Example:
        >>> import farandole as fd
        >>> fd.init()
        >>> fd.allocate(4, "float64").tolist()
        [0.0, 0.0, 0.0, 0.0]
    """
    kind = np.dtype(dtype)
    try:
        dims = tuple(map(index, shape if isinstance(shape, Iterable) else (shape,)))
    except TypeError:
        raise InvalidArgument(f"shape {shape} is not an integer or integers") from None
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
