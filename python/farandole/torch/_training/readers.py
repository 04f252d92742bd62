"""Functions of PyTorch that read gradients after backward: clipping and loss scaling.

Gradients that have only accumulated are this rank's own: those of a window of
backward_passes_per_step that ends early, of a last pass under no_sync(), or those that a program
sets by hand. A scaler would then skip the step on one rank alone, and each rank would clip by
a norm of its own. So these functions reduce first; ranks call them at the same point of a program.

The function objects themselves are changed, because programs import them by name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, GeneratorType
from typing import Any

import torch
from torch.nn.utils import clip_grad

from farandole.torch._training.hooked import Hooked, hearing
from farandole.torch._training.passes import untraced
from farandole.torch._training.wrapped import WrappedOptimizer

_CLIP = ("clip_grad_norm_", "clip_grad_value_", "_clip_grads_with_norm_")
_NORM = ("_get_total_norm",)


@functools.cache
def watch_readers() -> None:
    """Once in a process, when gradients are reduced for the first time."""
    for names, around in ((_CLIP, _around_clip), (_NORM, _around_norm)):
        for name in names:
            if hasattr(clip_grad, name):  # the last two are of PyTorch 2.6
                _wrap(name, around)
    scaler: Any = torch.amp.GradScaler
    scaler._unscale_grads_ = _around_unscale(scaler._unscale_grads_)


def _wrap(name: str, around: Callable[[Any], Any]) -> None:
    """Puts `around` between the public function, whatever holds it, and its body."""
    function = getattr(clip_grad, name)
    for cell in function.__closure__ or ():
        body = cell.cell_contents
        if isinstance(body, FunctionType) and body.__name__ == name:
            cell.cell_contents = around(body)
            return
    setattr(clip_grad, name, around(function))
    if hasattr(torch.nn.utils, name):
        setattr(torch.nn.utils, name, getattr(clip_grad, name))


class _State:
    reads = False  # one of these functions runs, which may call others of them


_state = _State()


@contextmanager
def _reading() -> Iterator[None]:
    _state.reads = True
    try:
        yield
    finally:
        _state.reads = False


def _around_clip(body: Any) -> Any:
    @functools.wraps(body)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if _state.reads:
            return body(parameters, *args, **kwargs)
        kept = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if is_any_due():
            reduce_those_of(kept)
        if not isinstance(parameters, torch.Tensor):
            # PyTorch warns of an empty generator, and of no other empty list.
            parameters = (p for p in kept) if isinstance(parameters, GeneratorType) else kept
        with _reading():
            result = body(parameters, *args, **kwargs)
        note_alike(kept)
        return result

    return clip


def _around_norm(body: Any) -> Any:
    @functools.wraps(body)
    def norm(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if not _state.reads and is_any_due():
            tensors = reduced([tensors] if isinstance(tensors, torch.Tensor) else list(tensors))
        return body(tensors, *args, **kwargs)

    return norm


def _around_unscale(method: Any) -> Any:
    @functools.wraps(method)
    def unscale(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(optimizer, WrappedOptimizer):
            _prepare(optimizer)
        result = method(scaler, optimizer, *args, **kwargs)
        note_alike([p for group in optimizer.param_groups for p in group["params"]])
        return result

    return unscale


@untraced
def _prepare(optimizer: WrappedOptimizer) -> None:
    optimizer.prepare_unscale()


@untraced
def is_any_due() -> bool:
    """Whether some gradients may still have to be reduced."""
    return any(each.is_due() for each in hearing)


@untraced
def note_alike(parameters: Iterable[torch.Tensor]) -> None:
    """Ranks have changed the gradients of these by the same function."""
    for owner in dict.fromkeys(_owners_of(parameters)):
        owner.note_alike()


@untraced
def reduce_those_of(parameters: Iterable[torch.Tensor]) -> None:
    """Reduces gradients that are due, in the order of `parameters`, the same on all ranks."""
    for owner in _owners_of(parameters):
        if owner.is_due():
            owner.reduce_now()


def _owners_of(parameters: Iterable[torch.Tensor]) -> list[Hooked]:
    owners: dict[int, Hooked] = {id(p): each for each in hearing for p in each.managed()}
    found = (owners.get(id(p)) for p in parameters)
    return [owner for owner in found if owner is not None]


@untraced
def reduced(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same gradients after their reduction, which can be other tensors."""
    of = {id(p.grad): p for each in hearing for p in each.managed() if p.grad is not None}
    owners = [of.get(id(gradient)) for gradient in gradients]
    reduce_those_of([p for p in owners if p is not None])
    shown = [g if p is None else p.grad for g, p in zip(gradients, owners, strict=True)]
    return [g for g in shown if g is not None]
