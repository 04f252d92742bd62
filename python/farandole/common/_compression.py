"""The compressors that every framework has. A framework says how it casts."""

from __future__ import annotations

from typing import Any, Protocol

from farandole._arguments import KINDS


class Compressor(Protocol):
    """How a tensor is sent. A class of your own with these two static methods works as well, as
    does an object with two such methods, as long as the compressed tensor has as many elements as
    the tensor (on Keras, its shape)."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]: ...
    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any: ...


class Plain:
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:  # noqa: ARG004
        return tensor


class Half:
    """Floating tensors in 16 bits; sums are rounded to 16 bits at every addition."""

    wire: Any  # the dtype

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        raise NotImplementedError

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        floating = "float" in str(tensor.dtype)  # as every framework calls them
        return (cls.cast(tensor, cls.wire) if floating else tensor), tensor.dtype

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        return cls.cast(tensor, ctx)


KINDS["type[Compressor]"] = KINDS["Compressor"] = (
    "one of Compression, or a class with compress() and decompress()",
    lambda v: hasattr(v, "compress") and hasattr(v, "decompress"),
)
