"""Compressors of tensors that are sent."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from farandole.common._compression import Compressor, Half, Plain

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class _Half(Half):
    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        return tf.cast(tensor, dtype)


class FP16Compressor(_Half):
    wire = tf.float16


class _BFloat16(_Half):
    wire = tf.bfloat16


NoneCompressor = Plain


class Compression:
    """The compressors there are."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = _BFloat16
