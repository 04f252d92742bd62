"""Optimizers that no DistributedOptimizer is made of, though all ranks began with their weights.

Of two models that a program broadcasts it may wrap one optimizer alone. The other one steps by each
rank's own gradients, and its model parts in silence. Where fewer bytes were exchanged than such
gradients have, ranks cannot have reduced them by hand either, and rank 0 says so.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing import reductions
from torch.optim.optimizer import register_optimizer_step_post_hook

from farandole import _core, _unreduced, _world
from farandole._limits import setting
from farandole.torch._training.passes import untraced
from farandole.torch._training.wrapped import WrappedOptimizer

_WeakMemory: Any = reductions.StorageWeakRef
_PATIENCE = 100  # steps; ranks that average weights by hand do so more often, or at the end
_NARROW = 4  # a gradient may travel in as many times fewer bytes than it has


class _Steps:
    """The steps of an optimizer in this world, and what was exchanged since the first one."""

    def __init__(self, bytes_: int, shape: torch.Size) -> None:
        self.count, self._bytes, self._shape = 0, bytes_, shape
        self._begun = _core.bytes_begun_by_hand()

    def warn_if_alone(self) -> None:
        exchanged = _core.bytes_begun_by_hand() - self._begun
        if self._bytes == 0 or exchanged * _NARROW >= self._bytes:
            return
        self._bytes = 0  # once
        if _world.rank() == 0 and setting("FARANDOLE_LOG") != "error":
            print(
                f"farandole rank 0: warning: after {self.count} steps of an optimizer that is no "
                f"DistributedOptimizer, whose first parameter has shape {tuple(self._shape)}, "
                "ranks have not reduced its gradients, though they began with the same weights: "
                "each rank has a model of its own\n  advice: make a DistributedOptimizer of every "
                "optimizer whose parameters are broadcast; where ranks differ on purpose, set "
                "FARANDOLE_LOG=error",
                file=sys.stderr,
                flush=True,
            )


# Memory that was broadcast in this world, by the address of a tensor there.
_given: dict[int, Any] = {}
_steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Steps] = weakref.WeakKeyDictionary()
_known: list[_Steps] = []  # also of optimizers that are gone


def note_broadcast(tensors: Iterable[torch.Tensor]) -> None:
    """These have the same values on all ranks now."""
    if _world.size() > 1:
        _given.update((t.data_ptr(), _WeakMemory(t.untyped_storage())) for t in tensors)
        _watch_steps()


def _is_given(p: torch.Tensor) -> bool:
    memory = _given.get(p.data_ptr())
    return memory is not None and not memory.expired()


@functools.cache
def _watch_steps() -> None:
    register_optimizer_step_post_hook(_note_step)


@untraced
def _note_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if not _given or isinstance(optimizer, WrappedOptimizer) or _trains_otherwise():
        return
    steps = _steps.get(optimizer)
    if steps is None:
        every = [p for group in optimizer.param_groups for p in group["params"]]
        ours = [p for p in every if p.grad is not None and _is_given(p)]
        size = sum(p.numel() * p.element_size() for p in ours)
        steps = _steps[optimizer] = _Steps(size, ours[0].shape if ours else torch.Size())
        if ours:
            _known.append(steps)
    steps.count += 1
    if steps.count == _PATIENCE:
        steps.warn_if_alone()


def _trains_otherwise() -> bool:
    """Whether ranks may reduce gradients, or go without, in ways that are not counted."""
    distributed: Any = torch.distributed
    by_pytorch = distributed.is_available() and distributed.is_initialized()
    return by_pytorch or _unreduced.trains_by_messages()


def _leave() -> None:
    if _unreduced.is_silent():
        for steps in _known:
            if steps.count > 1:
                steps.warn_if_alone()
    for each in (_given, _steps, _known):
        each.clear()


_world.before_leaving(_leave)
