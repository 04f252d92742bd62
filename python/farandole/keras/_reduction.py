"""The options of a DistributedOptimizer of Keras, checked."""

from __future__ import annotations

from dataclasses import dataclass

from farandole.common import _reduction
from farandole.common._groups import Groups
from farandole.common._process_set import number_of


@dataclass(frozen=True)
class Reduction(_reduction.Reduction):
    """The options of all frameworks, with those that Keras adds.

    Raises:
        InvalidArgument: an argument is wrong, or they do not go together.
    """

    groups: Groups = 0
    passes_factor: float = 1.0  # Keras divides what it accumulates by the passes, Horovod does not
    scale_local_gradients: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        number_of(self.process_set)

    @property
    def postscale(self) -> float:
        return self.passes_factor * super().postscale

    @property
    def local_scale(self) -> float:
        """The factor of gradients that stay local."""
        return self.passes_factor / (self.members if self.scale_local_gradients else 1)

    def __str__(self) -> str:
        """A line that ranks compare."""
        compressor = getattr(self.compression, "__name__", type(self.compression).__name__)
        return (
            f"op {self.op}, prescale {self.prescale:g}, postscale {self.postscale:g}, "
            f"compression {compressor.strip('_').lower()}"
        )
