"""Tensors of PyTorch among typed values."""

from __future__ import annotations

import math
from typing import Any

from farandole._arguments import type_of
from farandole.common import _typed


def words_beside_tensors(value: Any) -> list[Any] | None:
    """The words for a dtype or a size; None for all else."""
    import torch

    if type(value) is torch.dtype:
        return ["dtype", _name_of(value)]
    return ["size", *value] if type(value) is torch.Size else None


def beside_tensors(kind: str, *words: Any) -> Any:
    """Raises ValueError."""
    import torch

    return torch.Size(words) if kind == "size" else _dtype_of(*words)


def place_of(value: Any) -> tuple[Any, Any]:
    """The memory that a tensor lies in, and what of it. Raises Untyped: it is no plain tensor."""
    import torch

    if (
        type(value) is not torch.Tensor
        or value.layout is not torch.strided
        or value.device.type != "cpu"
        or value.requires_grad
        or not value.is_contiguous()
        or value.is_conj()
        or value.is_neg()
        or value.is_quantized
        or vars(value)
    ):
        raise _typed.Untyped(type_of(value))
    if value.numel() == 0:
        return id(value), id(value)
    memory = value.untyped_storage().data_ptr()
    return memory, (value.data_ptr(), str(value.dtype), tuple(value.shape))


def words_of(tensor: Any) -> tuple[str, list[int], bytes]:
    import torch

    content = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return _name_of(tensor.dtype), list(tensor.shape), content


def made_of(name: str, shape: list[int], content: bytearray) -> Any:
    """Raises ValueError."""
    import torch

    dtype = _dtype_of(name)
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(content):
        raise ValueError(f"a tensor of {name} and shape {shape} in {len(content)} bytes")
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(content, dtype=dtype).reshape(shape)


def _name_of(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype_of(name: str) -> Any:
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return dtype
