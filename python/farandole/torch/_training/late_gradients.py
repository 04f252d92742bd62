"""Gradients of one optimizer that a program sets by itself when backward has reduced the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from farandole.common._reduction import Average, Reduction, Sum
from farandole.torch._operations import calls
from farandole.torch._operations.handles import wait
from farandole.torch._tensors import check_tensor


class LateGradients:
    """They go by name: a rank that alone has one is told of, and meets no step of the others.

    Args:
        label: equal on all ranks, and no other optimizer's.
        named: names and parameters by number.
    """

    def __init__(
        self, label: str, named: Sequence[tuple[str, torch.Tensor]], reduction: Reduction
    ) -> None:
        self.places: Sequence[int] = ()  # where no rank had one when the others were reduced
        self._names = [f"{label}: {name}" for name, _ in named]
        self._parameters = [p for _, p in named]
        self._reduction = reduction

    def leave_out(self, parameters: Sequence[torch.Tensor]) -> None:
        """These have gradients again that were reduced before."""
        known = set(map(id, parameters))
        self.places = [i for i in self.places if id(self._parameters[i]) not in known]

    def awaits(self, p: torch.Tensor) -> bool:
        """Whether a gradient that this parameter gets now is one of these."""
        return any(self._parameters[i] is p for i in self.places)

    def are_there(self) -> bool:
        """Whether this rank has any."""
        return any(self._parameters[i].grad is not None for i in self.places)

    def reduce(self) -> None:
        """Reduces those that are there now."""
        late = [i for i in self.places if self._parameters[i].grad is not None]
        flights = [self._start(i) for i in late]
        for i, (handle, context) in zip(late, flights, strict=True):
            self._parameters[i].grad = self._reduction.compression.decompress(wait(handle), context)
        if late:
            self.places = [i for i in self.places if i not in late]

    def _start(self, i: int) -> tuple[int, object]:
        gradient = self._parameters[i].grad
        assert gradient is not None
        check_tensor(gradient, f"gradient '{self._names[i]}'", or_complex=True)
        how = self._reduction
        wire, context = how.compression.compress(gradient.detach())
        op = Average if how.op == "mean" else Sum
        request = calls.How(self._names[i], op, how.prescale, how.postscale, how.process_set)
        return calls.allreduce(wire.contiguous(), request, single=True), context
