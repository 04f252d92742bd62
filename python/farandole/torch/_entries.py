"""How PyTorch enters what exchanges data: where Dynamo stops, and what a profiler shows.

Note [Entries]
Other backends are native: Dynamo ends its graph before a call into them and traces nothing in it.
Ours are Python functions, and must say so: Dynamo neither traces into an entry nor compiles the
frames below it, which PyTorch's C++ also calls. This is what ``torch.compiler.disable`` does, whose
import takes seconds that programs which compile nothing need not spend.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch._C._dynamo.eval_frame as _frames

from farandole._arguments import KINDS, explained, one_of


def _are_tensors(value: Any) -> bool:
    return isinstance(value, Sequence) and all(isinstance(each, torch.Tensor) for each in value)


KINDS |= {
    "torch.Tensor": one_of("a tensor of PyTorch", torch.Tensor),
    "Sequence[torch.Tensor]": ("a list of tensors of PyTorch", _are_tensors),
    "Iterable[tuple[str, torch.Tensor]]": one_of("named parameters", Iterable),
    "torch.dtype": one_of("a dtype of PyTorch", torch.dtype),
    "torch.nn.Module": one_of("a module of PyTorch", torch.nn.Module),
    "torch.optim.Optimizer": one_of("an optimizer of PyTorch", torch.optim.Optimizer),
}

_F = TypeVar("_F", bound=Callable[..., Any])
_profiled = torch._C._autograd._profiler_enabled
_Range: Any = torch._C._profiler._RecordFunctionFast
_set_eval_frame: Any = _frames.set_eval_frame


def _leave_alone(code: Any) -> None:
    """Frames of this code are never compiled."""
    frames: Any = _frames
    if hasattr(frames, "skip_code"):  # before PyTorch 2.7
        frames.skip_code(code)
    else:
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))


def entry(shown: str = "") -> Callable[[_F], _F]:
    """Marks a function that PyTorch or a program calls. `shown`: its range in a profile, as
    PyTorch's own dispatcher names it over other backends."""

    def decorate(function: _F) -> _F:
        @functools.wraps(function)
        def enter(*args: Any, **kwargs: Any) -> Any:
            prior = _set_eval_frame(None)
            try:
                if shown and _profiled():
                    with _Range(shown):
                        return function(*args, **kwargs)
                return function(*args, **kwargs)
            finally:
                _set_eval_frame(prior)

        entered: Any = enter
        entered._torchdynamo_disable = True
        entered._torchdynamo_disable_msg = "it is the backend's own"
        _leave_alone(entered.__code__)
        return cast("_F", entered)

    return decorate


def public(function: _F) -> _F:
    """Marks a function of farandole.torch: an entry, whose wrong arguments are named."""
    return cast("_F", entry()(explained(function)))


_no_range = contextlib.nullcontext()


def operation_range(kind: str, *tensors: torch.Tensor | None) -> Any:
    """While an operation is submitted, or run where the caller waits: a range under gloo's name,
    with the shapes of its tensors. It does not reach into what the caller does meanwhile, since a
    profile would take that for a part of it."""
    if not _profiled():
        return _no_range
    return _Range(f"gloo:{kind}", [t for t in tensors if t is not None])
