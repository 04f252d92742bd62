"""PyTorch's reduce operations in the engine's words."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from farandole._core import InvalidArgument

_Op: Any = dist.ReduceOp
# Compared one by one: a ReduceOp equals its RedOpType, but has another hash.
_WORDS = (
    (_Op.SUM, "sum"),
    (_Op.AVG, "mean"),
    (_Op.MAX, "max"),
    (_Op.MIN, "min"),
    (_Op.PRODUCT, "product"),
)
_BITWISE = ((_Op.BAND, "BAND", "min"), (_Op.BOR, "BOR", "max"), (_Op.BXOR, "BXOR", ""))
_LINEAR = ("sum", "mean")


def engine_op(op: Any, tensor: torch.Tensor) -> tuple[str, float] | None:
    """The engine's word and the factor on inputs; None for what the engine does not have."""
    for known, word in _WORDS:
        if op == known:
            if tensor.is_complex() and word not in _LINEAR:
                raise InvalidArgument(f"{word} has no meaning on complex tensors")
            return word, 1.0
    if op == _Op.PREMUL_SUM:
        factor = _factor(op)
        if isinstance(factor, torch.Tensor) and factor.numel() != 1:
            raise InvalidArgument("PREMUL_SUM takes one factor; multiply the tensor before")
        return "sum", float(factor)
    for known, _, of_booleans in _BITWISE:
        if op == known:
            is_known = tensor.dtype == torch.bool and of_booleans
            return (of_booleans, 1.0) if is_known else None
    raise InvalidArgument(f"the reduce operation {op} is unknown")


def name_of(op: Any) -> str:
    """The name of an operation that the engine does not have."""
    return next((name for known, name, _ in _BITWISE if op == known), str(op))


def _factor(op: Any) -> Any:
    return op.factor if hasattr(op, "factor") else op.__getstate__()[1]
