"""What goes over the wire instead of a tensor."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from farandole.common._compression import Half, Plain


class Compressor(Protocol):
    """How a tensor is sent. A class of your own with these two static methods works as well, as
    long as the compressed tensor has as many elements as the tensor."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]: ...
    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor: ...


class _Half(Half):
    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        return tensor.to(dtype)

    @staticmethod
    def is_floating(tensor: Any) -> bool:
        floating: bool = tensor.is_floating_point()
        return floating


class FP16Compressor(_Half):
    wire = torch.float16


NoneCompressor = Plain


class _BFloat16(_Half):
    wire = torch.bfloat16


class Compression:
    """The compressors there are."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = _BFloat16
