"""What goes over the wire instead of a gradient, on any backend of Keras."""

from __future__ import annotations

from typing import Any, Protocol

import keras

from farandole.common._compression import Half, Plain


class Compressor(Protocol):
    """How a tensor is sent. A class of your own with these two static methods, or an object with
    two such methods, works as well, as long as the compressed tensor has the tensor's shape."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]: ...
    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any: ...


class _Half(Half):
    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        return keras.ops.cast(tensor, keras.backend.standardize_dtype(dtype))

    @staticmethod
    def is_floating(tensor: Any) -> bool:
        return "float" in keras.backend.standardize_dtype(tensor.dtype)


class _Float16(_Half):
    wire = "float16"


class _BFloat16(_Half):
    wire = "bfloat16"


class Compression:
    """The compressors there are."""

    none = Plain
    fp16 = _Float16
    bf16 = _BFloat16
