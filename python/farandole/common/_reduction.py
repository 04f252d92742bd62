"""The arguments of a reduction: Horovod's, checked and translated for the engine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral
from typing import Any, ClassVar, Final

from farandole._arguments import shown
from farandole._core import InvalidArgument
from farandole.common._compression import Plain
from farandole.common._deprecated import warn_deprecated
from farandole.common._process_set import ProcessSet, global_process_set

Average: Final = 0
Sum: Final = 1
Adasum: Final = 2
Min: Final = 3
Max: Final = 4
Product: Final = 5

_OPS = {Average: "mean", Sum: "sum", Min: "min", Max: "max", Product: "product"}
HOROVODS_NAMES = ("Average", "Sum", "Adasum", "Min", "Max", "Product")


def op_name(op: Any) -> str:
    """The name of an operation, for messages."""
    known = isinstance(op, int) and 0 <= op < len(HOROVODS_NAMES)
    return HOROVODS_NAMES[op] if known else shown(op)


def share(rows: int, size: int, place: int) -> int:
    """A member's rows of what is scattered: the first have one more where they do not divide."""
    return rows // size + (place < rows % size)


def core_op(op: Any) -> str:
    """The engine's name of an operation."""
    if op == Adasum:
        raise InvalidArgument("op=Adasum is for allreduce and grouped_allreduce, and optimizers")
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


def check_passes(passes: object) -> None:
    """Raises InvalidArgument for what backward_passes_per_step cannot be."""
    if not isinstance(passes, int) or isinstance(passes, bool) or passes < 1:
        raise InvalidArgument(
            f"backward_passes_per_step is {passes!r}; it is a whole number of at least 1"
        )


@dataclass(frozen=True)
class Reduction:
    """How gradients become the ranks' common ones: postscale · fold(prescale · gradient).

    Raises:
        InvalidArgument: an argument is wrong, or they do not go together.
    """

    ops: ClassVar[tuple[int, ...]] = (Average, Sum)  # a framework's side may have more

    horovods_op: int
    gradient_predivide_factor: float = 1.0
    compression: Any = Plain
    sparse_as_dense: bool = False
    process_set: ProcessSet = global_process_set

    def __post_init__(self) -> None:
        op, factor = self.horovods_op, self.gradient_predivide_factor
        if op not in self.ops:
            *others, last = map(op_name, self.ops)
            raise InvalidArgument(
                f"op={op_name(op)}: DistributedOptimizer reduces with {', '.join(others)} or "
                f"{last} only"
            )
        if factor != 1.0 and op != Average:
            raise InvalidArgument("gradient_predivide_factor is supported with op=Average only")
        if not 0 < factor < math.inf:
            raise InvalidArgument(f"gradient_predivide_factor is {factor}")
        if not (hasattr(self.compression, "compress") and hasattr(self.compression, "decompress")):
            raise InvalidArgument(
                f"compression={self.compression!r} is not one of Compression.none, .fp16, .bf16, "
                "or a class with compress() and decompress()"
            )

    @property
    def members(self) -> int:
        """How many ranks add theirs; outside of the process set an optimizer steps by itself."""
        included, size = self.process_set.included(), self.process_set.size()
        assert size is not None
        return size if included else 1

    @property
    def _divided(self) -> bool:
        return self.gradient_predivide_factor != 1.0

    @property
    def op(self) -> str:
        """The engine's word."""
        return "sum" if self._divided else core_op(self.horovods_op)

    @property
    def prescale(self) -> float:
        return 1 / self.gradient_predivide_factor

    @property
    def postscale(self) -> float:
        return self.gradient_predivide_factor / self.members if self._divided else 1.0
