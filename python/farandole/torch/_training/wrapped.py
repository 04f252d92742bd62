"""The base of every kind of DistributedOptimizer, and what all kinds refuse."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar, cast

import torch

from farandole._core import InvalidArgument
from farandole.common._wrapped import child_of
from farandole.torch._training.hooked import Hooked
from farandole.torch._training.weighing import left_open
from farandole.torch._training.weights import Rest


def refuse_unmanaged(parameters: Sequence[torch.Tensor]) -> None:
    """Refuses gradients of parameters that were frozen or empty when the optimizer was wrapped."""
    for p in parameters:
        if p.grad is not None and p.numel() > 0:
            raise InvalidArgument(
                f"a parameter of shape {tuple(p.shape)} was frozen, or had no elements, when "
                "DistributedOptimizer was made, and has a gradient now that no other rank knows\n"
                "  advice: make the DistributedOptimizer after the parameters' requires_grad and "
                "shape are what they will be"
            )


def too_many_passes(passes_per_step: int) -> InvalidArgument:
    return InvalidArgument(
        f"more than backward_passes_per_step={passes_per_step} backward passes without step()\n"
        f"  advice: call step() or zero_grad() after every {passes_per_step} passes"
    )


class WrappedOptimizer(torch.optim.Optimizer):
    """Comes before the optimizer's own class in the MRO, and after the class of its kind."""

    _parameter_names: dict[torch.Tensor, str]  # as Horovod calls it; programs read it
    weighed_only = False  # it is one of a GlobalBatch
    _rest: Rest | None = None  # of it, compared with the parameters
    _open = False  # more micro-batches of the global batch come: step() is refused
    _known: frozenset[int]  # ids of all parameters that it had when it was wrapped

    def _hooked(self) -> Hooked | None:
        """The object that hooks the gradients; None where this rank is alone."""
        return None

    def hold(self, held: bool) -> None:
        """While held, backward passes only accumulate. For farandole.torch.GlobalBatch."""
        self._open = held
        hooked = self._hooked()
        if hooked is not None and not self._in_parts():
            hooked.open = held

    def _in_parts(self) -> bool:
        """Whether gradients are reduced when all parts of a batch have folded, and not before."""
        return False

    def prepare_unscale(self) -> None:
        """A GradScaler is about to read the gradients, and may skip the step: ranks must see the
        same."""
        hooked = self._hooked()
        if hooked is not None and hooked.is_due():
            hooked.reduce_now()

    def take_weighed_losses_only(self) -> None:
        """From now on a backward of another loss is an error, where there are other ranks."""
        self.weighed_only = True
        if (hooked := self._hooked()) is not None:
            hooked.weighed_only = True

    def compare_also(self, rest: Rest) -> None:
        """Adds to what ranks compare, now and in later worlds. Collective."""
        self._rest = rest
        if (hooked := self._hooked()) is not None:
            hooked.compare_also(rest)

    def _refuse_open(self) -> None:
        if self._open:
            hooked = self._hooked()
            if hooked is not None:
                hooked.refuse(left_open())
            raise left_open()

    def _refuse_replaced(self) -> None:
        """Refuses to step where a program has put a parameter into a group by itself."""
        if all(self._known.issuperset(map(id, group["params"])) for group in self.param_groups):
            return
        why = InvalidArgument(
            "a parameter was put into the optimizer's param_groups after it was wrapped, and ranks "
            "do not reduce its gradient\n  advice: make a new optimizer over the present "
            "parameters, and a DistributedOptimizer around it"
        )
        if (hooked := self._hooked()) is not None:
            hooked.refuse(why)
        raise why

    def add_param_group(self, param_group: dict[str, Any]) -> None:  # noqa: ARG002
        raise InvalidArgument(
            "adding parameters to a DistributedOptimizer is not supported; add them to the "
            "optimizer before it is wrapped"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.optim.Optimizer:
        """The optimizer that was wrapped, over copies of its parameters: a copy of a model that
        holds its optimizer is a plain one, which reduces nothing."""
        plain: Any = type(self).__bases__[1]
        copied = memo[id(self)] = plain.__new__(plain)
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return cast(torch.optim.Optimizer, copied)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise InvalidArgument(
            "a DistributedOptimizer cannot be copied or pickled; use state_dict()"
        )


_W = TypeVar("_W", bound=WrappedOptimizer)


def become(
    optimizer: torch.optim.Optimizer, kind: type[_W], named: Sequence[tuple[str, torch.Tensor]]
) -> _W:
    """The same object, as an instance of that kind and still of its own class."""
    optimizer.__class__ = child_of(type(optimizer), kind)
    wrapped = cast(_W, optimizer)
    wrapped._parameter_names = {p: name for name, p in named}
    wrapped._known = frozenset(id(p) for group in wrapped.param_groups for p in group["params"])
    if is_for_schedulers(vars(optimizer).get("step")):
        _step_for_schedulers(wrapped)
    return wrapped


def is_for_schedulers(step: object) -> bool:
    """Whether an LR scheduler has put this step on the optimizer: it calls the step of the class
    that the optimizer had then."""
    return bool(getattr(step, "_wrapped_by_lr_sched", False))


def _step_for_schedulers(optimizer: Any) -> None:
    """Puts the new class' step in its place, saying what schedulers look for: that it ran."""
    reference = weakref.ref(optimizer)

    def step(*args: Any, **kwargs: Any) -> Any:
        present: Any = reference()
        present._opt_called = True
        return type(present).step(present, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step
