"""Tensors of PyTorch among typed values, with their dtypes and sizes."""

from __future__ import annotations

from typing import Any

from farandole._arguments import type_of
from farandole.common._typed import Untyped, elements_of


def words_of(value: Any) -> tuple[Any, ...]:
    """The words and the content. Raises Untyped."""
    import torch

    if type(value) is torch.dtype:
        return "dtype", _name_of(value), b""
    if type(value) is torch.Size:
        return "size", list(value), b""
    if type(value) is not torch.Tensor or not _is_plain(value):
        raise Untyped(type_of(value))
    strides: tuple[int, ...] = value.stride()
    order = sorted(range(value.dim()), key=lambda i: (-strides[i], i))
    dense = value.permute(order)  # channels that come last lie so, too
    if not dense.is_contiguous():
        raise Untyped(f"{type_of(value)} with gaps")
    content = dense.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
    return "tensor", _name_of(value.dtype), list(value.shape), list(strides), content


def made_of(kind: str, *words: Any) -> Any:
    """Raises ValueError."""
    import torch

    *rest, content = words
    if kind == "dtype":
        return _dtype_of(*rest)
    if kind == "size":
        elements_of(*rest)
        return torch.Size(*rest)
    name, shape, strides = rest
    dtype = _dtype_of(name)
    if elements_of(shape) * dtype.itemsize != len(content):
        raise ValueError(f"a tensor of {name} and shape {shape} in {len(content)} bytes")
    if not content:
        return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
    return torch.frombuffer(content, dtype=dtype).as_strided(shape, strides)


def _is_plain(tensor: Any) -> bool:
    import torch

    return (
        tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_quantized
        and not vars(tensor)
    )


def _name_of(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype_of(name: str) -> Any:
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return dtype
