"""Tensors as the engine's buffers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from farandole import _core, _world
from farandole._arguments import no_such_dtype, type_of
from farandole._core import InvalidArgument
from farandole.torch import _devices

# The engine's dtypes that this PyTorch has, by PyTorch's own object.
DTYPE_NAMES: dict[torch.dtype, str] = {
    getattr(torch, name): name for name in _core.dtypes if hasattr(torch, name)
}

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def dtype_name(dtype: torch.dtype, what: str) -> str:
    try:
        return DTYPE_NAMES[dtype]
    except KeyError:
        raise no_such_dtype(what, dtype, DTYPES) from None


def as_reals(tensor: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs of real ones in the same memory: sums and means are the same."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def check_tensor(tensor: Any, what: str, *, or_complex: bool = False) -> None:
    """Refuses what the engine cannot send, whatever its strides. `or_complex`: it is sent
    `as_reals`."""
    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgument(f"{what} is {type_of(tensor)}, not a torch.Tensor")
    if tensor.layout != torch.strided:
        raise InvalidArgument(
            f"{what} is sparse ({tensor.layout}), which is not supported yet; pass a dense tensor"
        )
    if tensor.device.type not in ("cpu", "cuda"):
        raise InvalidArgument(
            f"{what} is on {tensor.device}; tensors are on the CPU or on a CUDA device"
        )
    if or_complex and tensor.is_conj():
        raise InvalidArgument(f"{what} is a lazy view; pass tensor.resolve_conj()")
    dtype_name(tensor.dtype.to_real() if or_complex else tensor.dtype, what)


def check_on_host(tensor: Any, what: str) -> None:
    """Refuses tensors on devices, too: for callers that work on the memory itself."""
    check_tensor(tensor, what)
    if _devices.device_of(tensor) is not None:
        raise InvalidArgument(
            f"{what} is on {tensor.device}; only CPU tensors are supported here yet"
        )


def borrow(tensor: Any, what: str = "tensor") -> Any:
    """The tensor's memory, for as long as the result lives. Raises InvalidArgument."""
    check_tensor(tensor, what)
    if not tensor.is_contiguous():
        raise InvalidArgument(
            f"{what} of shape {tuple(tensor.shape)} is not contiguous; pass tensor.contiguous()"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise InvalidArgument(f"{what} is a lazy view; pass tensor.resolve_neg()")
    return pointed(tensor)


def pointed(tensor: torch.Tensor, *, in_graphs: bool = False) -> Any:
    """The same of a tensor that was checked before. `in_graphs`: operations on it can be part of a
    CUDA graph."""
    dtype, device = DTYPE_NAMES[tensor.dtype], _devices.device_of(tensor)
    if device is None:
        return _core.Buffer(tensor.data_ptr(), tensor.numel(), dtype, tensor)
    current = _devices.current_stream_or_graph if in_graphs else _devices.current_stream
    current(device)  # refused before anything is begun
    stream = partial(current, device)
    return _core.DeviceBuffer(tensor.data_ptr(), tensor.numel(), dtype, device, stream, tensor)


def exchange(kind: str, mine: torch.Tensor, target: torch.Tensor, name: str) -> None:
    """Runs one operation of the world to its end; does nothing for an empty tensor."""
    if mine.numel() > 0:
        _world.world().run(kind, borrow(mine), borrow(target), name=name)
