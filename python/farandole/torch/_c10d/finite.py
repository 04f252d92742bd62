"""Whether gradients that PyTorch has reduced are finite (common/_numerics.py).

They are looked at before they are reduced. Neither DistributedDataParallel nor FSDP knows which
step uses gradients: the next optimizer that steps with them does. Their ranks are those of a group,
which need not be a process set of ours.

The hook knows buckets, and the flag goes with the last one of a backward. That makes it an
operation on two arrays, which small ones feel. So ranks tell each other only where
FARANDOLE_NUMERICS is set; else a rank speaks and counts for itself.

The backend sees tensors alone. What is summed up while a backward goes on without recording is a
gradient; anything else may be infinite on purpose. It has no names, so the step looks for them:
sums are not finite where a rank's gradient was not. Where the variable is set, ranks tell each
other when the backward ends.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._C._distributed_c10d import GradBucket
from torch.optim.optimizer import register_optimizer_step_pre_hook

from farandole._numerics import Judge, is_asked_for
from farandole._world import Group
from farandole.torch._finite import exact_kind, kind_of, total_of

_NAME = 200  # bytes of a name, as ranks send it
_all: weakref.WeakSet[_Looks] = weakref.WeakSet()
_graph_task = torch._C._current_graph_task_id  # -1 outside of a backward


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for looks in list(_all):
        looks.before_step(optimizer)


register_optimizer_step_pre_hook(_before_step)


class _Looks:
    """Checks the gradients that one group reduces."""

    def __init__(self, group: Group) -> None:
        self._group, self._judge = group, Judge()
        self.looks = self._judge.looks and group.size > 1
        self._tells = is_asked_for()
        _all.add(self)

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

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._found: tuple[torch.Tensor, int] | None = None  # in this backward
        self._parameters: list[torch.Tensor] = []  # of its last bucket
        self._flag = torch.zeros(0)

    def look(self, bucket: GradBucket) -> torch.Tensor | None:
        """Looks at a bucket before its reduction; with the last one, returns the flag to reduce, if
        there is one."""
        values = bucket.buffer()
        if bucket.index() == 0:
            self._found, self._parameters = None, []
        if self._found is None and values.is_cpu and values.is_floating_point():
            dense = values._values() if values.is_sparse else values
            if kind_of(total_of(dense)) is not None:  # or the sum has overflowed
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

    backward: int
    kind: int
    what: str  # for want of a name
    scattered: bool  # so that only some ranks have what is not finite


class _State:
    scattered = -1  # the last backward that has scattered sums


_state = _State()


class ReductionLooks(_Looks):
    """Checks what a process group of our backend sums up within a backward."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._backward = -1  # the last one that has reduced anything
        self._found: dict[int, _Reduced] = {}  # by rank
        self._stepped = False  # an optimizer has, since

    def look(self, kind: str, op: str, tensors: Sequence[torch.Tensor]) -> None:
        """Looks at tensors that will be reduced, if they are gradients."""
        backward = _graph_task()
        if not self.looks or backward < 0 or torch.is_grad_enabled() or op not in ("sum", "mean"):
            return
        scattered = kind == "reduce_scatter"
        if scattered:
            _state.scattered = backward
        elif _state.scattered == backward:
            return  # the sum of sums, in which other ranks' gradients are
        if backward != self._backward:
            self._begin(backward)
        mine = self._found.get(self._me)
        if mine is not None and mine.backward == backward:
            return
        for tensor in tensors:
            if tensor.is_cpu and tensor.is_floating_point():
                bad = exact_kind(tensor, total_of(tensor))
                if bad is not None:
                    what = f"one of {tensor.numel()} elements of a {kind}"
                    self._found[self._me] = _Reduced(backward, bad, what, scattered)
                    return

    def _begin(self, backward: int) -> None:
        self._backward = backward
        if self._stepped:
            self._found, self._stepped = {}, False
        if self._tells:
            torch.autograd.Variable._execution_engine.queue_callback(self._tell)

    def _tell(self) -> None:
        mine = self._found.get(self._me)
        if mine is not None and mine.backward != self._backward:
            mine = None
        row = None if mine is None else (f"{int(mine.scattered)}{mine.what}", mine.kind)
        for rank, (text, kind) in self._of_all_ranks(row).items():
            self._found[rank] = _Reduced(self._backward, kind, text[1:], text[0] == "1")

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if _graph_task() >= 0:  # it steps by one parameter after the other
            return
        self._stepped = True
        if not self._found or _is_skipped(optimizer):
            return
        rows = [p for group in optimizer.param_groups for p in group["params"]]
        name = _first_bad(optimizer, rows)
        used = {
            rank: (name or found.what, found.kind)
            for rank, found in self._found.items()
            if name is not None or (found.scattered and found.backward == self._backward)
        }
        if used:
            self._found = {}
        self._report(used)


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
