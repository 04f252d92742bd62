"""Gradients that notice changes which PyTorch's version counter does not count.

A program may write by way of `p.grad.data`, `p.grad.numpy()` or a view, as `p.grad.view(-1).data`.
A watched gradient gets a checksum as a program first asks for such a way, and is compared with it
when that matters. Programs that ask for none pay for a mark on the tensor, 0.6 µs, and for each
function that they call with it, 2 µs. Our own code reads it unheard().

Compiled functions take plain tensors alone: once a program compiles something while gradients are
watched, none is any more. Those on devices are not, as a checksum would copy them to the host.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch

from farandole.torch._training.weights import checksums_of

_F = TypeVar("_F", bound=Callable[..., Any])
_Plain: Any = torch.Tensor
_is_alias_of: Any = vars(torch._C)["_is_alias_of"]


class Watched(torch.Tensor):
    """The class of a gradient while it is watched; results of functions are plain tensors."""

    _before: int | None = None  # its checksum, since a program can write uncounted

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """PyTorch calls this for every function of a watched gradient."""
        del types
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
            for each in args:
                if isinstance(each, Watched) and _gives_way(function, result, each):
                    each._begin()
        return result

    def has_changed(self) -> bool:
        """Whether a program has written into it uncounted since watch()."""
        return self._before is not None and _checksum(self) != self._before

    def _begin(self) -> None:
        if self._before is None:
            self._before = _checksum(self)

    # Copies and pictures are those of a plain tensor.

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied: torch.Tensor = _Plain.__deepcopy__(_plain(self), memo)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _Plain.__reduce_ex__(_plain(self), protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return _Plain.__repr__(_plain(self), tensor_contents=tensor_contents)


_WAYS = {_Plain.numpy, _Plain.__array__, _Plain.__dlpack__, _Plain.untyped_storage}


def _gives_way(function: Any, result: Any, gradient: torch.Tensor) -> bool:
    """Whether a program can write into the gradient by what a function of it has returned."""
    if function in _WAYS:
        return True
    few = result if isinstance(result, (tuple, list)) else (result,)
    return any(
        isinstance(each, torch.Tensor)
        and each is not gradient
        and each.layout == torch.strided
        and _is_alias_of(each, gradient)
        for each in few
    )


def unheard(function: _F) -> _F:
    """Decorates our own functions, which read gradients and write into none uncounted."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    return cast(_F, run)


class _State:
    hears = False  # when PyTorch compiles
    compiles = False


_state = _State()
# Those of all optimizers, by who knows them (hooked.py).
every_gradient: Callable[[], Iterable[torch.Tensor | None]] = tuple


@unheard
def watch(gradient: torch.Tensor | None) -> None:
    """Begins anew. Looks at once where a program may have kept a way to write uncounted."""
    if isinstance(gradient, Watched):
        if gradient._before is not None:
            gradient._before = _checksum(gradient)
        return
    if gradient is None or type(gradient) is not _Plain or _state.compiles:
        return
    if gradient.is_cpu and gradient.layout == torch.strided:
        if not _state.hears:
            _hear_of_compiling()
        gradient.__class__ = Watched


def _hear_of_compiling() -> None:
    """PyTorch loads what compiles as the first optimizer steps."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    handler = getattr(getattr(dynamo, "callback", None), "callback_handler", None)
    if handler is not None:
        _state.hears = True
        handler.register_start_callback(lambda *_: _stop())


def _stop() -> None:
    for gradient in every_gradient():
        _state.compiles |= isinstance(gradient, Watched)
        unwatch(gradient)


def unwatch(gradient: torch.Tensor | None) -> None:
    """Makes it a plain tensor again, as optimizers choose their loops by the class."""
    if isinstance(gradient, Watched):
        vars(gradient).pop("_before", None)
        gradient.__class__ = _Plain


def has_changed(gradient: torch.Tensor | None) -> bool:
    """Whether it is watched, and a program has written into it uncounted."""
    return isinstance(gradient, Watched) and gradient.has_changed()


def _plain(gradient: torch.Tensor) -> torch.Tensor:
    tensor: torch.Tensor = _Plain.detach(gradient)
    return tensor


@unheard
def _checksum(gradient: torch.Tensor) -> int:
    return checksums_of([_plain(gradient)])[0]
