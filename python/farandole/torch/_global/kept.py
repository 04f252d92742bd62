"""Notices a program that drops the gradients of a batch's earlier micro-batches, as one does that
calls zero_grad() at the top of its loop, by whatever way."""

from __future__ import annotations

from typing import Any

import torch

from farandole.torch._entries import entry
from farandole.torch._training.passes import Pass, graph_task, has_no_end
from farandole.torch._training.weighing import zeroed_midway
from farandole.torch._training.wrapped import WrappedOptimizer

_LOOKS = 3  # on a device, where the program waits for it


def trained_by(optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    groups = [] if optimizer is None else optimizer.param_groups
    return [p for group in groups for p in group["params"]]


class KeptGradients:
    """The gradients of micro-batches, as each backward leaves them for the next.

    Args:
        optimizer: of the GlobalBatch, if it has one; else nothing is noticed.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._looks = _LOOKS
        self._earlier: list[torch.Tensor] = []  # had gradients as the micro-batch before this ended
        self._stood: list[torch.Tensor] = []  # as the last backward ended
        self._witness: torch.Tensor | None = None  # one of these, whose gradient was not all zeros

    def begin(self, *, first: bool) -> None:
        """A micro-batch is given out, the first one of a batch or another."""
        if first:
            self._forget()
        self._earlier = self._stood

    def _forget(self) -> None:
        self._earlier, self._stood, self._witness = [], [], None

    def watch(self, loss: torch.Tensor) -> None:
        """Looks at the backwards of a loss."""
        hook: Any = loss.register_hook
        hook(self._begin_backward)

    @entry()
    def _begin_backward(self, _: torch.Tensor) -> None:
        if self._earlier and self._are_gone():
            self._forget()
            if isinstance(self._optimizer, WrappedOptimizer):
                self._optimizer.refuse(zeroed_midway())
            raise zeroed_midway()
        if not has_no_end(graph_task()):
            Pass(self).enter(graph_task())

    def _are_gone(self) -> bool:
        gradients = [p.grad for p in self._earlier if p.grad is not None]
        if not gradients:
            return True
        witness = None if self._witness is None else self._witness.grad
        if witness is None or bool(witness.any()):
            return False
        return not any(bool(grad.any()) for grad in gradients)

    def end(self, *, failed: bool) -> None:
        """A backward is over."""
        if failed:  # gradients were dropped, and the program knows
            self._forget()
            return
        self._stood = [p for p in trained_by(self._optimizer) if p.grad is not None]
        self._witness = self._find_witness()

    def _find_witness(self) -> torch.Tensor | None:
        """The smallest one will do."""
        for p in sorted(self._stood, key=torch.Tensor.numel):
            assert p.grad is not None
            if self._looks == 0 and not p.grad.is_cpu:
                continue
            self._looks -= not p.grad.is_cpu
            if bool(p.grad.any()):
                return p
        return None
