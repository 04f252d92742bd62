"""DistributedOptimizer(...) as most are: gradients are reduced while backward runs."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from farandole._core import InvalidArgument
from farandole.common._process_set import group_of
from farandole.common._reduction import Reduction, check_passes
from farandole.torch._training import worlds
from farandole.torch._training.exchange import GradientExchange
from farandole.torch._training.hooked import Hooked, take_over
from farandole.torch._training.parameters import Named, gets_gradients
from farandole.torch._training.parts import PartGradients
from farandole.torch._training.readers import watch_readers
from farandole.torch._training.wrapped import OwnStep, WrappedOptimizer, become, refuse_unmanaged

_UPDATED_BY_HAND = InvalidArgument(
    "a step() that the program put on the optimizer has updated parameters itself, with gradients "
    "that were accumulated and not reduced\n  advice: call synchronize() first, or update by the "
    "step of the optimizer's class"
)


class ReducedOptimizer(WrappedOptimizer):
    """The class that DistributedOptimizer puts before the optimizer's own."""

    _exchange: GradientExchange | None  # None where there is one rank, and outside the process set
    _unmanaged: list[torch.Tensor]  # frozen or empty when the optimizer was wrapped
    _skip: bool
    _make: _Make  # makes the exchange
    _alone: worlds.Alone | None = None  # in an elastic job, where there is no exchange
    _parts: PartGradients | None = None  # where batches are computed in parts

    def _distributed_step(self, own: OwnStep) -> Any:
        """Gradients that were accumulated and not reduced yet (an interrupted accumulation) are
        reduced first; with a closure, whenever it returns."""
        self._refuse_open()
        exchange, parts = self._exchange, self._parts
        if parts is not None:
            if own.closure is None:
                parts.finish()
            else:
                own = own.ending_closure(parts.finish)
        if exchange is None:
            if self._alone is not None:
                self._alone.check()
            return own()
        exchange.check_alive()
        self._refuse_replaced()
        refuse_unmanaged([p for p in self._unmanaged if not p.requires_grad])
        if own.closure is None:
            if not exchange.silence.over:
                exchange.refuse_silence()
            if own.is_programs:  # it may go on to the update in some of its calls alone
                return self._step_of_program(own, exchange)
            self._reduce_rest()
        else:  # other ranks may have gradients where this closure made none
            own = own.ending_closure(self._reduce_rest)
        result = own()
        exchange.note_step()
        return result

    def _step_of_program(self, own: OwnStep, exchange: GradientExchange) -> Any:
        """Reduces what is left when the program's step comes to that of the optimizer's class."""
        steps = []

        def before_update(*_: Any) -> None:
            self._reduce_rest()
            steps.append(True)

        before = self._values() if exchange.is_due() else None
        hook = self.register_step_pre_hook(before_update)
        try:
            result = own()
        finally:
            hook.remove()
        if steps:
            exchange.note_step()
        elif before not in (None, self._values()):
            exchange.refuse(_UPDATED_BY_HAND)
        return result

    def _values(self) -> list[tuple[int, int]]:
        """These change when a parameter gets another value."""
        return [(p.data_ptr(), p._version) for group in self.param_groups for p in group["params"]]

    def _hooked(self) -> Hooked | None:
        return self._exchange or self._alone

    def prepare_unscale(self) -> None:
        if self._parts is not None and self._parts.is_due():
            self._parts.reduce_now()
        super().prepare_unscale()

    def _in_parts(self) -> bool:
        return self._parts is not None

    def _reduce_rest(self) -> None:
        if not self._skip:
            self.synchronize()
        if self._exchange is not None:
            self._exchange.show_plain()
            self._exchange.finite.note_skip(vars(self).get("found_inf"))
            self._exchange.finite.note_use()

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
        elif self._alone is not None:
            self._alone.check()

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
        self._make.options["passes_per_step"] = passes
        if self._exchange is not None:
            self._exchange.set_passes_per_step(passes)

    def compute_in_parts(self, of_batch: int) -> PartGradients:
        """From now on batches are computed in this many parts, which a GlobalBatch gives out."""
        self._parts = PartGradients(self._make.managed, self._unmanaged, self._exchange, of_batch)
        return self._parts

    @property
    def parts(self) -> PartGradients | None:
        """The gradients of parts; None unless batches are computed in parts."""
        return self._parts

    # In an elastic job (worlds.py).

    def is_superseded(self) -> bool:
        hooked = self._hooked()
        return hooked is not None and hooked.taken is not None

    def described(self) -> str:
        name, _ = self._make.named[0]
        return f"an optimizer of {len(self._make.named)} parameters, the first '{name}'"

    def leave_world(self) -> None:
        if self._parts is not None:
            self._parts.forget()
        if self._exchange is not None:
            self._exchange.retire()
        self._exchange, self._alone = None, worlds.Alone(self._make.managed, outside=True)

    def enter_world(self) -> None:
        """Drops all local gradients, and begins in the new world. Collective."""
        for _, p in self._make.managed:
            p.grad = None
        self._exchange, self._alone = self._make(), None
        if self._exchange is None:
            self._alone = worlds.Alone(self._make.managed, outside=False)
        if self._parts is not None:
            self.compute_in_parts(self._parts.of_batch)
        if self.weighed_only:
            self.take_weighed_losses_only()
        if self._rest is not None:
            self.compare_also(self._rest)


def distribute(
    optimizer: torch.optim.Optimizer, named: Named, reduction: Reduction, **options: Any
) -> None:
    """Makes the optimizer reduce gradients; in a world of one rank, it steps by itself. Collective,
    except in an elastic job.

    Args:
        named: the optimizer's parameters in registration order.
        options: those of GradientExchange.
    """
    watch_readers()
    options["optimizer"] = weakref.ref(optimizer)  # which holds what is made
    make, later = _Make(named, reduction, options), worlds.makes_later()
    exchange = None if later else make()
    distributed = become(optimizer, ReducedOptimizer, named)
    distributed._exchange, distributed._make = exchange, make
    distributed._unmanaged = [p for _, p in named if not gets_gradients(p)]
    distributed._skip = False
    if later:
        distributed._alone = worlds.Alone(make.managed, outside=True)
        worlds.follow(distributed)
    elif exchange is None:
        take_over(p for _, p in named)


class _Make:
    """Makes the exchange of an optimizer in the present world; None where it is alone there."""

    def __init__(self, named: Named, reduction: Reduction, options: dict[str, Any]) -> None:
        self.named, self.options = named, options
        self.managed = [(n, p) for n, p in named if gets_gradients(p)]
        self._reduction = reduction

    def __call__(self) -> GradientExchange | None:
        reduction = self._reduction
        if reduction.members == 1:
            return None
        group = group_of(reduction.process_set)
        assert group is not None
        order = list(reversed(self.managed))
        return GradientExchange(group, order, reduction, weights=self.named, **self.options)
