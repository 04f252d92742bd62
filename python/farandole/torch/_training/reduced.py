"""DistributedOptimizer(...) as most are: gradients are reduced while backward runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from farandole._core import InvalidArgument
from farandole._world import Group
from farandole.common._reduction import Reduction, check_passes
from farandole.torch._training.exchange import GradientExchange
from farandole.torch._training.hooked import take_over
from farandole.torch._training.parameters import Named
from farandole.torch._training.parts import PartGradients
from farandole.torch._training.wrapped import WrappedOptimizer, become, refuse_unmanaged


class ReducedOptimizer(WrappedOptimizer):
    """What DistributedOptimizer puts before the optimizer's own class."""

    _exchange: GradientExchange | None  # None where there is one rank, and outside the process set
    _unmanaged: list[torch.Tensor]  # frozen when the optimizer was wrapped
    _skip: bool
    _parts: PartGradients | None = None  # where batches are computed in parts

    def step(self, closure: Any = None) -> Any:
        """The optimizer's own step. Gradients that were accumulated and not reduced yet (an
        interrupted accumulation) are reduced first; with a closure, whenever it returns."""
        self._refuse_open()
        exchange, parts = self._exchange, self._parts
        if parts is not None:
            if closure is None:
                parts.finish()
            else:
                closure = partial(_finished, parts, closure)
        if exchange is None:
            return super().step(closure)
        exchange.check_alive()
        refuse_unmanaged(self._unmanaged)
        if closure is None:
            if not exchange.silence.over:
                exchange.refuse_silence()
            self._reduce_rest()
            result = super().step()
        else:
            result = super().step(partial(self._reduced, closure))
        exchange.note_step()
        return result

    def _hooked(self) -> GradientExchange | None:
        return self._exchange

    def _in_parts(self) -> bool:
        return self._parts is not None

    def _reduced(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        self._reduce_rest()  # other ranks may have gradients where this closure made none
        return loss

    def _reduce_rest(self) -> None:
        if not self._skip:
            self.synchronize()

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._parts is not None:
            self._parts.refuse_zero_grad()
        if self._exchange is not None:
            self._exchange.note_zero_grad()
        super().zero_grad(set_to_none)

    def synchronize(self) -> None:
        """Reduces what was accumulated and not reduced yet. Not needed before clipping: gradients
        are reduced when ``backward()`` returns."""
        if self._exchange is not None:
            self._exchange.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Steps inside reduce nothing."""
        before, self._skip = self._skip, True
        try:
            yield
        finally:
            self._skip = before

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside only accumulate; the first one outside reduces the sum."""
        if self._parts is not None:
            raise InvalidArgument(
                "no_sync() with logical_ranks, whose bits would depend on the number of ranks\n"
                "  advice: leave it out; gradients of several batches add up without it"
            )
        if self._exchange is None:
            return nullcontext()
        self._exchange.check_alive()
        return self._exchange.held()

    def set_backward_passes_per_step(self, passes: int) -> None:
        check_passes(passes)
        if self._parts is not None and passes != 1:
            raise InvalidArgument(f"backward_passes_per_step={passes} with logical_ranks")
        if self._exchange is not None:
            self._exchange.set_passes_per_step(passes)

    def compute_in_parts(self, of_batch: int) -> PartGradients:
        """From now on batches are computed in so many parts, which a GlobalBatch gives out."""
        named = [(n, p) for p, n in self._parameter_names.items()]
        managed = [(n, p) for n, p in named if p.requires_grad and p.numel() > 0]
        self._parts = PartGradients(managed, self._unmanaged, self._exchange, of_batch)
        return self._parts

    @property
    def parts(self) -> PartGradients | None:
        """Where batches are computed in parts."""
        return self._parts


def _finished(parts: PartGradients, closure: Callable[[], Any]) -> Any:
    loss = closure()
    parts.finish()
    return loss


def distribute(
    optimizer: torch.optim.Optimizer,
    named: Named,
    group: Group | None,
    reduction: Reduction,
    **options: Any,
) -> None:
    """Collective. Where there is nobody to reduce with, the optimizer steps by itself.

    Args:
        named: the optimizer's parameters in registration order.
        options: those of GradientExchange.
    """
    exchange = None
    if group is not None:
        managed = [(n, p) for n, p in reversed(named) if p.requires_grad and p.numel() > 0]
        exchange = GradientExchange(group, managed, reduction, weights=named, **options)
    distributed = become(optimizer, ReducedOptimizer, named)
    distributed._exchange = exchange
    distributed._unmanaged = [p for _, p in named if not p.requires_grad]
    distributed._skip = False
    if exchange is None:
        take_over(p for _, p in named)
