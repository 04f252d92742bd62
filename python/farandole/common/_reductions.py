"""Horovod's numbers for reductions, and the engine's words for them."""

from __future__ import annotations

import warnings
from typing import Any

from farandole._core import InvalidArgument

Average, Sum, Adasum, Min, Max, Product = range(6)

_OPS = {Average: "mean", Sum: "sum", Min: "min", Max: "max", Product: "product"}
HOROVODS_NAMES = ("Average", "Sum", "Adasum", "Min", "Max", "Product")


def op_name(op: Any) -> str:
    """For messages."""
    known = isinstance(op, int) and 0 <= op < len(HOROVODS_NAMES)
    return HOROVODS_NAMES[op] if known else repr(op)


def share(rows: int, size: int, place: int) -> int:
    """A member's rows of what is scattered: the first have one more where they do not divide."""
    return rows // size + (place < rows % size)


def core_op(op: Any) -> str:
    """The engine's word."""
    if op == Adasum:
        raise InvalidArgument("op=Adasum is for allreduce and DistributedOptimizer only")
    if op not in _OPS:
        raise InvalidArgument(f"op={op!r} is unknown; there are Average, Sum, Min, Max and Product")
    return _OPS[op]


def choose_op(average: bool | None, op: int | None) -> int:
    """Out of a public function's two arguments; a warning points at that function's caller."""
    if average is None:
        return Average if op is None else op
    if op is not None:
        raise InvalidArgument("average and op are both given; average is the deprecated one")
    warnings.warn("average= is deprecated; use op=", DeprecationWarning, stacklevel=3)
    return Average if average else Sum
