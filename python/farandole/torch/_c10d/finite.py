"""Whether the gradients in DistributedDataParallel's buckets are finite (common/_numerics.py).

Each bucket is looked at before it is reduced, and the flag goes with the last one of a backward.
DDP does not know which step uses gradients: the next optimizer that steps with parameters of that
bucket does. Its ranks are those of DDP's group, which need not be a process set of ours.

The flag makes the last bucket an operation on two arrays, which small ones feel. So ranks tell each
other only where FARANDOLE_NUMERICS is set; else a rank speaks and counts for itself.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch
from torch._C._distributed_c10d import GradBucket
from torch.optim.optimizer import register_optimizer_step_pre_hook

from farandole._numerics import Judge, is_asked_for
from farandole._world import Group
from farandole.torch._finite import exact_kind, kind_of, total_of

_NAME = 200  # bytes of a name, as ranks send it
_all: weakref.WeakSet[BucketLooks] = weakref.WeakSet()


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for looks in list(_all):
        looks.before_step(optimizer)


register_optimizer_step_pre_hook(_before_step)


class BucketLooks:
    """Checks the gradient buckets of one process group."""

    def __init__(self, group: Group) -> None:
        self._group, self._judge = group, Judge()
        self.looks = self._judge.looks and group.size > 1
        self._tells = is_asked_for()
        self._found: tuple[torch.Tensor, int] | None = None  # in this backward
        self._parameters: list[torch.Tensor] = []  # of its last bucket
        self._flag = torch.zeros(0)
        _all.add(self)

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
        """Reports gradients that are not finite. Collective where there is a flag, and it is up."""
        if not self._parameters:
            return
        rows = [p for group in optimizer.param_groups for p in group["params"]]
        if not any(p is self._parameters[0] for p in rows):
            return
        self._parameters = []
        if not (self._flag.item() if self._tells else self._found):
            return
        skips = vars(optimizer).get("found_inf")  # of a scaler
        if skips is None or not skips.item():
            self._report(optimizer, rows)

    def _report(self, optimizer: torch.optim.Optimizer, rows: list[torch.Tensor]) -> None:
        ranks = self._group.ranks
        me = ranks[self._group.rank]
        if not self._tells:
            assert self._found is not None
            p, kind = self._found
            self._judge.judge({me: (_name_of(p, optimizer, rows), kind)}, speaks=True)
            return
        mine = np.zeros(_NAME + 1, np.uint8)
        if self._found is not None:
            p, kind = self._found
            name = _name_of(p, optimizer, rows).encode()[:_NAME]
            mine[0] = kind + 1
            mine[1 : 1 + len(name)] = np.frombuffer(name, np.uint8)
        theirs = np.empty((self._group.size, len(mine)), np.uint8)
        self._group.run("all_gather", mine, theirs, name="DDP's gradients that are not finite")
        found = {
            rank: (row[1:].tobytes().rstrip(b"\0").decode(errors="replace"), int(row[0]) - 1)
            for rank, row in zip(ranks, theirs, strict=True)
            if row[0]
        }
        if found:
            self._judge.judge(found, speaks=me in (ranks[0], *found))


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
