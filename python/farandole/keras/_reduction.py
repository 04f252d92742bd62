"""What DistributedOptimizer was asked for: Horovod's arguments, checked, in the engine's words."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from farandole._core import InvalidArgument
from farandole.common._process_set import ProcessSet, number_of
from farandole.common._reductions import Average, Sum, op_name
from farandole.keras._groups import Groups


@dataclass(frozen=True)
class Reduction:
    """How gradients become the ranks' common ones: postscale · fold(prescale · gradient).

    Raises:
        InvalidArgument: arguments that are wrong, or do not go together.
    """

    horovods_op: int
    gradient_predivide_factor: float
    compression: Any
    sparse_as_dense: bool
    groups: Groups
    process_set: ProcessSet
    passes_factor: float  # Keras divides what it accumulates by the passes, Horovod does not
    scale_local_gradients: bool

    def __post_init__(self) -> None:
        factor = self.gradient_predivide_factor
        if self.horovods_op not in (Average, Sum):
            raise InvalidArgument(
                f"op={op_name(self.horovods_op)}: DistributedOptimizer reduces with Average or "
                "Sum only"
            )
        if factor != 1.0 and self.horovods_op != Average:
            raise InvalidArgument("gradient_predivide_factor is supported with op=Average only")
        if not 0 < factor < math.inf:
            raise InvalidArgument(f"gradient_predivide_factor is {factor}")
        number_of(self.process_set)

    @property
    def members(self) -> int:
        """How many ranks add theirs; outside of the process set an optimizer steps by itself."""
        included = self.process_set.included()
        size = self.process_set.size()
        assert size is not None
        return size if included else 1

    @property
    def op(self) -> str:
        """The engine's word."""
        whole = self.gradient_predivide_factor == 1.0
        return "mean" if self.horovods_op == Average and whole else "sum"

    @property
    def prescale(self) -> float:
        return 1 / self.gradient_predivide_factor

    @property
    def postscale(self) -> float:
        divided = self.gradient_predivide_factor != 1.0
        return self.passes_factor * (
            self.gradient_predivide_factor / self.members if divided else 1.0
        )

    @property
    def local_scale(self) -> float:
        """On gradients that stay local."""
        return self.passes_factor / (self.members if self.scale_local_gradients else 1)

    def __str__(self) -> str:
        """Compared between ranks."""
        compressor = getattr(self.compression, "__name__", type(self.compression).__name__)
        return (
            f"op {self.op}, prescale {self.prescale:g}, postscale {self.postscale:g}, "
            f"compression {compressor.strip('_').lower()}"
        )


def check_passes(passes: Any) -> None:
    if not isinstance(passes, int) or isinstance(passes, bool) or passes < 1:
        raise InvalidArgument(
            f"backward_passes_per_step is {passes!r}; it is a whole number of at least 1"
        )
