"""What a tensor of TensorFlow's graphs is made of."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

WEIGHTS = {"ReadVariableOp", "VarHandleOp"}
DATA = {"IteratorGetNext", "Placeholder"}


def follows_from(tensor: Any, given: Mapping[int, Any] = MappingProxyType({})) -> bool:
    """Whether a tensor of a graph is made of the given ones, of weights and numbers alone. An array
    may be of this process' own."""
    if not hasattr(tensor, "graph") or hasattr(tensor, "dense_shape"):
        return False
    waiting, seen = [tensor], set()
    while waiting:
        each = waiting.pop()
        op = each.op
        if id(each) in given or id(op) in seen or op.type in WEIGHTS:
            continue
        seen.add(id(op))
        is_number = op.type == "Const" and (each.shape.rank == 0 or each.dtype.is_integer)
        if op.type in DATA or not (op.inputs or is_number) or "Random" in op.type:
            return False
        waiting += op.inputs
    return True
