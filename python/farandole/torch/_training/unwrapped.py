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
from torch.optim.optimizer import register_optimizer_step_post_hook

from farandole import _core, _unreduced, _world
from farandole._limits import setting
from farandole.torch._training import names
from farandole.torch._training.hooked import hearing
from farandole.torch._training.passes import untraced
from farandole.torch._training.wrapped import WrappedOptimizer

_PATIENCE = 1000  # steps; ranks that average weights by hand do so more often, or at the end
_NARROW = 4  # a gradient may travel in as many times fewer bytes than it has


class _Steps:
    """The steps of an optimizer in this world, and what was exchanged since the first one."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self.count = 0
        self._sizes = {id(p): p.numel() * p.element_size() for p in parameters}
        self._shape = parameters[0].shape if parameters else torch.Size()
        self._begun = _core.bytes_begun_by_hand()

    def is_alone(self) -> bool:
        """Whether ranks cannot have reduced its gradients. Another optimizer's hooks may."""
        hooked = {id(p) for each in hearing for p in each.managed()}
        size = sum(size for key, size in self._sizes.items() if key not in hooked)
        return (_core.bytes_begun_by_hand() - self._begun) * _NARROW < size

    def warn(self) -> None:
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


class _State:
    has_warned = False  # once in a world is enough


_steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Steps] = weakref.WeakKeyDictionary()
_first: list[_Steps] = []  # at most one: of an optimizer that may be gone, and has stepped twice


def note_broadcast(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """These have the same values on all ranks now."""
    if _world.size() > 1:
        names.note_broadcast(named)
        _watch_steps()


@functools.cache
def _watch_steps() -> None:
    register_optimizer_step_post_hook(_note_step)


@untraced
def _note_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if not names.were_broadcast() or isinstance(optimizer, WrappedOptimizer) or _trains_otherwise():
        return
    steps = _steps.get(optimizer)
    if steps is None:
        every = [p for group in optimizer.param_groups for p in group["params"]]
        ours = [p for p in every if p.grad is not None and names.name_of(p) is not None]
        steps = _steps[optimizer] = _Steps(ours)
    steps.count += 1
    if steps.count == 2 and not _first and steps.is_alone():
        _first.append(steps)
    if steps.count == _PATIENCE:
        _warn_if_alone(steps)


def _warn_if_alone(steps: _Steps) -> None:
    if not _state.has_warned and steps.is_alone():
        _state.has_warned = True
        steps.warn()


_state = _State()


def _trains_otherwise() -> bool:
    """Whether ranks may reduce gradients, or go without, in ways that are not counted."""
    distributed: Any = torch.distributed
    by_pytorch = distributed.is_available() and distributed.is_initialized()
    return by_pytorch or _unreduced.trains_by_messages()


def _leave() -> None:
    if _unreduced.is_silent():
        for steps in (*_first, *_steps.values()):
            if steps.count > 1:
                _warn_if_alone(steps)
    for each in (_steps, _first):
        each.clear()
    _state.has_warned = False


_world.before_leaving(_leave)
