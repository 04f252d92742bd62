"""What goes over the wire instead of a tensor."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Compressor(Protocol):
    """How a tensor is sent. A class of your own with these two static methods works as well, as
    long as the compressed tensor has as many elements as the tensor."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]: ...
    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor: ...


class _None:
    """As it is."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:  # noqa: ARG004
        return tensor


class _Half:
    """Floating tensors in 16 bits; sums are rounded to 16 bits at every addition."""

    wire: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return (tensor.to(cls.wire) if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


class _Float16(_Half):
    wire = torch.float16


class _BFloat16(_Half):
    wire = torch.bfloat16


class Compression:
    """The compressors there are."""

    none = _None
    fp16 = _Float16
    bf16 = _BFloat16
