"""How data are read and from where: the values that a model and its data pass on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import keras

from farandole._core import InvalidArgument
from farandole.data import ReadBatches
from farandole.data._logical import Block, ranks_own
from farandole.data._policy import Policy, refuse_index
from farandole.data._tree import leaves


@dataclass(frozen=True)
class How:
    """How data are read."""

    what: str  # the call, for errors
    seed: int
    batch_size: int | None = None
    steps: int | None = None
    shuffle: Any = False
    class_weight: Mapping[int, float] | None = None
    passes: int = 0  # over training data, before this call
    block: Block | None = None  # of logical ranks, where a rank is several
    policy: Policy = "auto"

    @property
    def here(self) -> Block:
        """This rank's parts of a batch."""
        return self.block or ranks_own()

    def error(self, why: str) -> InvalidArgument:
        return InvalidArgument(f"{self.what}: {why}")

    def refuse_index(self, what: str) -> None:
        """Raises InvalidArgument if the policy is "index"."""
        if self.policy == "index":
            raise refuse_index(what, "what is asked for is a whole batch")


@dataclass
class Source:
    """Data as one rank reads them."""

    data: Any  # what Keras reads
    sample: Callable[[], Any]  # a batch as KerasTensors, to build the model with
    rows: list[str]  # what ranks compare
    batch: int | None = None  # samples of a whole batch, where that is known
    read: ReadBatches = field(default_factory=ReadBatches)
    # Keras builds a model by a first batch, on JAX and PyTorch: its own loop takes the next order.
    is_looked_into: bool = False

    def begin_at(self, epoch: int) -> None:
        """Training goes on at this epoch, with its order of samples."""
        begin_at = getattr(self.data, "begin_at", None)
        if begin_at is not None:
            begin_at(epoch)


def symbol(shape: Any, dtype: Any, count: int) -> Any:
    """A KerasTensor of that many samples."""
    dims = [None if d is None else int(d) for d in shape]
    return keras.KerasTensor((max(count, 1), *dims), _dtype(dtype))


def _dtype(dtype: Any) -> str:
    if getattr(dtype, "kind", "") in ("O", "S", "U"):
        return "string"
    name: str = keras.backend.standardize_dtype(dtype)
    floatx: str = keras.config.floatx()
    return floatx if name == "float64" else name


def shapes(data: Any) -> list[str]:
    """A line for each array, which ranks compare."""
    return [f"array {i}: {list(a.shape[1:])} {a.dtype}" for i, a in enumerate(leaves(data))]


def as_tuple(batch: Any) -> tuple[Any, ...]:
    """Inputs, targets, weights, as far as they are there."""
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,)
