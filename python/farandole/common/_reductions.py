"""Horovod's numbers for reductions, and the engine's words for them."""

from __future__ import annotations

from numbers import Integral
from typing import Any

from farandole._arguments import shown
from farandole._core import InvalidArgument
from farandole.common._deprecated import warn_deprecated

Average, Sum, Adasum, Min, Max, Product = range(6)

_OPS = {Average: "mean", Sum: "sum", Min: "min", Max: "max", Product: "product"}
HOROVODS_NAMES = ("Average", "Sum", "Adasum", "Min", "Max", "Product")


def op_name(op: Any) -> str:
    """For messages."""
    known = isinstance(op, int) and 0 <= op < len(HOROVODS_NAMES)
    return HOROVODS_NAMES[op] if known else shown(op)


def share(rows: int, size: int, place: int) -> int:
    """A member's rows of what is scattered: the first have one more where they do not divide."""
    return rows // size + (place < rows % size)


def core_op(op: Any) -> str:
    """The engine's word."""
    if op == Adasum:
        raise InvalidArgument("op=Adasum is for allreduce and DistributedOptimizer only")
    if not isinstance(op, Integral) or op not in _OPS:
        raise InvalidArgument(
            f"op={shown(op)} is unknown; there are Average, Sum, Min, Max and Product"
        )
    return _OPS[int(op)]


def choose_op(average: bool | None, op: int | None) -> int:
    """Out of a public function's two arguments; a warning points at that function's caller."""
    if average is None:
        return Average if op is None else op
    if op is not None:
        raise InvalidArgument("average and op are both given; average is the deprecated one")
    warn_deprecated("average= is deprecated; use op=")
    return Average if average else Sum
