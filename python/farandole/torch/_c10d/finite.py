"""Whether gradients that PyTorch has reduced are finite (common/_numerics.py).

They are looked at before they are reduced. Neither DistributedDataParallel nor FSDP knows which
step uses gradients: the next optimizer that steps with them does. Their ranks are those of a group,
which need not be a process set of ours.

The hook knows buckets, and the flag goes with the last one of a backward. That makes it an
operation on two arrays, which small ones feel. So ranks tell each other only where
FARANDOLE_NUMERICS is set on all of them; else a rank speaks and counts for itself.

The backend sees tensors alone. What is summed up while a backward goes on without recording is a
gradient; anything else may be infinite on purpose. It has no names, so the step looks for them:
sums are not finite where a rank's gradient was not. Sums that are scattered lie on some rank or
other, so that those since the last step count as used. Where the variable is set, ranks tell each
other when the backward ends. A group that sums up what another has scattered passes on what that
one has been told, and finds nothing by itself: the sums have other ranks' gradients in them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._C._distributed_c10d import GradBucket
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_pre_hook

from farandole._numerics import Judge
from farandole._world import Group
from farandole.torch._finite import exact_kind, kind_of, total_of

_NAME = 200  # bytes of a name, as ranks send it
# In the order in which ranks make groups, as they may ask each other in several of them.
_all: weakref.WeakKeyDictionary[_Looks, None] = weakref.WeakKeyDictionary()
_graph_task = torch._C._current_graph_task_id  # -1 outside of a backward


class _State:
    steps = 0  # outside of a backward, in which one steps with one parameter after the other


_state = _State()


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    _state.steps += _graph_task() < 0
    for looks in list(_all):
        looks.before_step(optimizer)


register_optimizer_step_pre_hook(_before_step)


class _Looks:
    """Checks the gradients that one group reduces.

    Args:
        tells: whether its ranks tell each other what they find; alike on all of them.
    """

    def __init__(self, group: Group, tells: bool) -> None:
        self._group, self._judge = group, Judge()
        self.looks = self._judge.looks and group.size > 1
        self._tells = self.looks and tells
        _all[self] = None

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Reports gradients that are not finite, if this optimizer steps with them."""
        raise NotImplementedError

    @property
    def _me(self) -> int:
        return self._group.ranks[self._group.rank]

    def _of_all_ranks(self, mine: tuple[str, int] | None) -> dict[int, tuple[str, int]]:
        """Name and kind by rank, of those that give some. Collective."""
        row = np.zeros(_NAME + 1, np.uint8)
        if mine is not None:
            name = mine[0].encode()[:_NAME]
            row[0] = mine[1] + 1
            row[1 : 1 + len(name)] = np.frombuffer(name, np.uint8)
        theirs = np.empty((self._group.size, len(row)), np.uint8)
        self._group.run("all_gather", row, theirs, name="gradients that are not finite")
        return {
            rank: (each[1:].tobytes().rstrip(b"\0").decode(errors="replace"), int(each[0]) - 1)
            for rank, each in zip(self._group.ranks, theirs, strict=True)
            if each[0]
        }

    def _report(self, found: dict[int, tuple[str, int]]) -> None:
        if found:
            speaks = self._me in (self._group.ranks[0], *found)
            self._judge.judge(found, speaks=speaks)


class BucketLooks(_Looks):
    """Checks the buckets of DistributedDataParallel, for the hook."""

    def __init__(self, group: Group, tells: bool) -> None:
        super().__init__(group, tells)
        self._found: tuple[torch.Tensor, int] | None = None  # in this backward
        self._parameters: list[torch.Tensor] = []  # of its last bucket
        self._flag = torch.zeros(0)

    def look(self, bucket: GradBucket) -> torch.Tensor | None:
        """Looks at a bucket before its reduction; with the last one, returns the flag to reduce, if
        there is one."""
        values = bucket.buffer()
        if bucket.index() == 0:
            self._found, self._parameters = None, []
        looks = self._found is None and values.is_cpu and values.is_floating_point()
        if looks and kind_of(total_of(values)) is not None:  # or the sum has overflowed
            self._found = _found_in(bucket)
        if not bucket.is_last():
            return None
        self._parameters = bucket.parameters()
        if not self._tells:
            return None
        self._flag = torch.full((1,), float(self._found is not None), dtype=values.dtype)
        return self._flag

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Collective where there is a flag, and it is up."""
        if not self._parameters:
            return
        rows = [p for group in optimizer.param_groups for p in group["params"]]
        if not any(p is self._parameters[0] for p in rows):
            return
        self._parameters = []
        if not (self._flag.item() if self._tells else self._found):
            return
        if _is_skipped(optimizer):
            return
        mine = None
        if self._found is not None:
            mine = _name_of(self._found[0], optimizer, rows), self._found[1]
        if self._tells:
            self._report(self._of_all_ranks(mine))
        elif mine is not None:
            self._report({self._me: mine})


class _Reduced(NamedTuple):
    """A tensor that was not finite before it was reduced."""

    kind: int
    what: str  # for want of a name
    scattered: bool  # so that only some ranks have what is not finite


class ReductionLooks(_Looks):
    """Checks what a process group of our backend sums up within a backward."""

    def __init__(self, group: Group, tells: bool) -> None:
        super().__init__(group, tells)
        self._backward = -1  # the last one that has reduced anything
        self._steps = 0  # before that
        self._found: dict[int, _Reduced] = {}  # by rank, since the last step
        self._due = False  # ranks have not told each other since then
        self._below: weakref.ref[ReductionLooks] | None = None

    @property
    def _reporter(self) -> ReductionLooks:
        """The looks that also report what these find: of the group whose sums this one sums up."""
        below = None if self._below is None else self._below()
        return below or self

    def look(
        self,
        kind: str,
        op: str,
        tensors: Sequence[torch.Tensor],
        scattered: torch.Tensor | None = None,
    ) -> None:
        """Looks at tensors that will be reduced, if they are gradients. `scattered`: where this
        rank's part of the sum will be."""
        backward = _graph_task()
        if not self.looks or backward < 0 or torch.is_grad_enabled() or op not in ("sum", "mean"):
            return
        if backward != self._backward:
            self._begin(backward)
        if scattered is not None:
            _scattered[_place_of(scattered)] = weakref.ref(self)
        for tensor in tensors:
            if _scattered and (below := _scattered.get(_place_of(tensor))):
                self._below = below
            elif tensor.is_cpu and tensor.is_floating_point():
                self._look_at(tensor, kind, scattered is not None)

    def _look_at(self, tensor: torch.Tensor, kind: str, scattered: bool) -> None:
        found = self._reporter._found
        mine = found.get(self._me)
        if mine is not None and mine.scattered >= scattered:
            return
        bad = exact_kind(tensor, total_of(tensor))
        if bad is not None:
            what = f"one of {tensor.numel()} elements of a {kind}"
            found[self._me] = _Reduced(bad, what, scattered)

    def _begin(self, backward: int) -> None:
        self._backward, self._below = backward, None
        if self._steps != _state.steps:
            self._found, self._steps = {}, _state.steps
        for place in [each for each in _scattered if each[0].expired()]:
            del _scattered[place]
        if self._tells:
            self._due = True
            torch.autograd.Variable._execution_engine.queue_callback(self._tell)

    def _tell(self) -> None:
        if not self._due:
            return
        self._due = False
        reporter = self._reporter
        if reporter is not self:
            reporter._tell()  # first, as these pass it on
        found = reporter._found
        rank = self._me if self._me in found else min(found, default=None)
        row = None
        if rank is not None:
            row = f"{rank} {int(found[rank].scattered)} {found[rank].what}", found[rank].kind
        for text, kind in self._of_all_ranks(row).values():
            whose, scattered, what = text.split(" ", 2)
            found.setdefault(int(whose), _Reduced(kind, what, scattered == "1"))

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if _graph_task() >= 0 or not self._found:
            return
        rows = [p for group in optimizer.param_groups for p in group["params"]]
        name = _first_bad(optimizer, rows)
        used = {
            rank: (name or found.what, found.kind)
            for rank, found in self._found.items()
            if name is not None or found.scattered
        }
        if used:
            self._found = {}
            if not _is_skipped(optimizer):
                self._report(used)


# By the place of sums that have been scattered, as long as it lasts: who has looked at them.
_scattered: dict[tuple[Any, ...], weakref.ref[ReductionLooks]] = {}


def _place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Its memory, which a later tensor never has while this is kept, and where it lies there."""
    storage: Any = StorageWeakRef
    return storage(tensor.untyped_storage()), tensor.storage_offset(), tensor.numel()


def _is_skipped(optimizer: torch.optim.Optimizer) -> bool:
    found = vars(optimizer).get("found_inf")  # of a scaler
    return found is not None and bool(found.item())


def _first_bad(optimizer: torch.optim.Optimizer, rows: list[torch.Tensor]) -> str | None:
    """The parameter whose gradient is not finite; of several, the last one, whose comes first."""
    for p in reversed(rows):
        grad: Any = p.grad
        if grad is None:
            continue
        here = grad.to_local() if hasattr(grad, "to_local") else grad  # of a DTensor
        if exact_kind(here, total_of(here)) is not None:
            return _name_of(p, optimizer, rows)
    return None


def _found_in(bucket: GradBucket) -> tuple[torch.Tensor, int] | None:
    for p, values in zip(bucket.parameters(), bucket.gradients(), strict=True):
        kind = exact_kind(values, total_of(values))
        if kind is not None:
            return p, kind
    return None


def _name_of(p: torch.Tensor, optimizer: torch.optim.Optimizer, rows: list[torch.Tensor]) -> str:
    """The parameter's name in the optimizer, or else its number there."""
    names = [name for group in optimizer.param_groups for name in group.get("param_names", ())]
    for i, row in enumerate(rows):
        if row is p:
            return names[i] if len(names) == len(rows) else f"parameter {i} of {tuple(p.shape)}"
    return f"a parameter of {tuple(p.shape)}, of another optimizer"
