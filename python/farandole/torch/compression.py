"""Compressors of the tensors that are sent."""

from __future__ import annotations

from typing import Any

import torch

from farandole.common._compression import Compressor, Half, Plain

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class _Half(Half):
    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        return tensor.to(dtype)


class FP16Compressor(_Half):
    wire = torch.float16


class _BFloat16(_Half):
    wire = torch.bfloat16


NoneCompressor = Plain


class Compression:
    """The compressors there are."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = _BFloat16
