"""What goes over the wire instead of a tensor."""

from __future__ import annotations

from typing import Any, Protocol

import tensorflow as tf

from farandole.common._compression import Half, Plain


class Compressor(Protocol):
    """How a tensor is sent. A class of your own with these two static methods works as well."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]: ...
    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor: ...


class _Half(Half):
    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        return tf.cast(tensor, dtype)

    @staticmethod
    def is_floating(tensor: Any) -> bool:
        return bool(tensor.dtype.is_floating)


class FP16Compressor(_Half):
    wire = tf.float16


NoneCompressor = Plain


class _BFloat16(_Half):
    wire = tf.bfloat16


class Compression:
    """The compressors there are."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = _BFloat16
