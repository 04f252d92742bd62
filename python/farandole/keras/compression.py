"""Compressors of gradients that are sent, on any backend of Keras."""

from __future__ import annotations

from typing import Any

import keras

from farandole.common._compression import Compressor, Half, Plain

__all__ = ["Compression", "Compressor"]


class _Half(Half):
    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        return keras.ops.cast(tensor, keras.backend.standardize_dtype(dtype))


class _Float16(_Half):
    wire = "float16"


class _BFloat16(_Half):
    wire = "bfloat16"


class Compression:
    """The compressors there are."""

    none = Plain
    fp16 = _Float16
    bf16 = _BFloat16
