"""Tensors whose values ranks compare: all that an optimizer holds, also frozen ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from farandole import _core
from farandole.common._weights import Weights, in_steps, period
from farandole.torch import _devices
from farandole.torch._tensors import as_reals, borrow

BROADCAST = "hvd.broadcast_parameters(model.state_dict(), root_rank=0)"


def checksums_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Of their values in the order of indices: strides may differ between ranks. What lies on a
    device is copied here first."""
    here = (_devices.on_host(tensor.detach()).contiguous() for tensor in tensors)
    return _core.checksums([borrow(as_reals(tensor)) for tensor in here])


def watch_weights(
    what: _core.Reducer | _core.ShardedUpdate,
    named: Sequence[tuple[str, torch.Tensor]],
    line: str = BROADCAST,
) -> None:
    """Makes it compare them as often as the setting says. In the model's order."""
    steps = period()
    if steps is not None:
        what.watch_weights([name for name, _ in named], in_steps(steps), line)


class TensorWeights(Weights):
    """Of an optimizer that exchanges in its step.

    Args:
        label: of this model, the same on every rank.
        named: in the model's order.
    """

    def __init__(self, label: str, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        super().__init__(label, [name for name, _ in named], BROADCAST)
        self._tensors = [tensor for _, tensor in named]

    def compare(self) -> None:
        """As a step begins. Raises Mismatch."""
        self.begin_step(lambda: checksums_of(self._tensors))
