"""The base of every kind of DistributedOptimizer, and what all kinds refuse."""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections.abc import Callable, Sequence
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


_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)


class OwnStep:
    """A call of the step of the optimizer's class, or of what a program put in its place."""

    def __init__(
        self,
        run: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        *,
        is_programs: bool,
    ) -> None:
        self._run, self._args, self._kwargs = run, args, kwargs
        self.is_programs = is_programs
        first = args[0] if args else kwargs.get("closure")
        # A program's step may take a model, say, which can be called, too.
        is_closure = isinstance(first, _FUNCTIONS) if is_programs else callable(first)
        self.closure: Callable[..., Any] | None = first if is_closure else None

    def __call__(self) -> Any:
        return self._run(*self._args, **self._kwargs)

    def ending_closure(self, end: Callable[[], None]) -> OwnStep:
        """The same, with a closure that calls this, too, whenever it returns."""
        closure = self.closure
        assert closure is not None

        def ended(*args: Any, **kwargs: Any) -> Any:
            loss = closure(*args, **kwargs)
            end()
            return loss

        if self._args:
            args, kwargs = (ended, *self._args[1:]), self._kwargs
        else:
            args, kwargs = (), self._kwargs | {"closure": ended}
        return OwnStep(self._run, args, kwargs, is_programs=self.is_programs)


class WrappedOptimizer(torch.optim.Optimizer):
    """Comes before the optimizer's own class in the MRO, and after the class of its kind."""

    _program_step: Callable[..., Any] | None = None  # a step that a program put in its class' place
    _is_of_scheduler = False  # which calls the step of the class, and does no more
    _runs_program_step = False
    _parameter_names: dict[torch.Tensor, str]  # as Horovod calls it; programs read it
    weighed_only = False  # it is one of a GlobalBatch
    _rest: Rest | None = None  # of it, compared with the parameters
    _open = False  # more micro-batches of the global batch come: step() is refused
    _known: frozenset[int]  # ids of all parameters that it had when it was wrapped

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's own step with its arguments, inside of what this kind does."""
        if self._runs_program_step:  # it goes on to the step of the object's class
            return super().step(*args, **kwargs)
        own = self._program_step is None
        run = super().step if own else self._run_program_step
        is_programs = not own and not self._is_of_scheduler
        return self._distributed_step(OwnStep(run, args, kwargs, is_programs=is_programs))

    step.hooked = True  # type: ignore[attr-defined]  # step hooks run in that of its own class

    def _run_program_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._program_step is not None
        self._runs_program_step = True
        try:
            return self._program_step(*args, **kwargs)
        finally:
            self._runs_program_step = False

    def _distributed_step(self, own: OwnStep) -> Any:
        """A step of this kind; returns what the optimizer's own returns."""
        raise NotImplementedError

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
            self.refuse(left_open())

    def refuse(self, why: InvalidArgument) -> NoReturn:
        """Raises it, and tells the other ranks, which may have begun a step."""
        hooked = self._hooked()
        if hooked is not None:
            hooked.refuse(why)
        raise why

    def _refuse_replaced(self) -> None:
        """Refuses to step where a program has put a parameter into a group by itself."""
        if all(self._known.issuperset(map(id, group["params"])) for group in self.param_groups):
            return
        self.refuse(
            InvalidArgument(
                "a parameter was put into the optimizer's param_groups after it was wrapped, and "
                "ranks do not reduce its gradient\n  advice: make a new optimizer over the present "
                "parameters, and a DistributedOptimizer around it"
            )
        )

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
    plain = type(optimizer)
    optimizer.__class__ = child_of(plain, kind)
    wrapped = cast(_W, optimizer)
    wrapped._parameter_names = {p: name for name, p in named}
    wrapped._known = frozenset(id(p) for group in wrapped.param_groups for p in group["params"])
    replaced = vars(optimizer).get("step")
    if replaced is not None:
        wrapped._program_step = replaced
        wrapped._is_of_scheduler = getattr(replaced, "__wrapped__", None) is plain.step
        optimizer.step = _InPlaceOf(replaced, optimizer)  # type: ignore[method-assign]
    return wrapped


class _InPlaceOf:
    """Stands where a program had put a step on the optimizer, which would hide the new class'. Has
    its attributes, as LR schedulers look for those of theirs."""

    def __init__(self, replaced: Callable[..., Any], optimizer: torch.optim.Optimizer) -> None:
        self._replaced, self._optimizer = replaced, weakref.ref(optimizer)

    @property
    def __func__(self) -> Any:
        """A scheduler that is made later calls it."""
        kind: Any = type(self._optimizer())
        return kind.step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self._optimizer(), *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_replaced", "_optimizer"):  # of a copy in the making
            raise AttributeError(name)
        return getattr(self._replaced, name)

    def __copy__(self) -> _InPlaceOf:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> _InPlaceOf:
        """As functions are copied."""
        return self
