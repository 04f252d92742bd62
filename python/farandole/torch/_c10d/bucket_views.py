"""Gradients that DistributedDataParallel shows as views of its buckets, and a program replaces.

With gradient_as_bucket_view the tensor that `p.grad` shows is the one by which DDP writes into its
bucket. A program that replaces its memory (`p.grad.data = ...`, `p.grad.set_()`, `share_memory()`)
takes the bucket away from DDP, which would reduce the same old numbers for ever. The hook knows the
views of each bucket, and sets them onto the bucket again.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import GradBucket

_is_alias_of: Any = vars(torch._C)["_is_alias_of"]


class _View(NamedTuple):
    tensor: weakref.ref[torch.Tensor]  # alive as long as DDP has it
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


_views: dict[int, dict[int, _View]] = {}  # by address of a bucket, and number in it


@torch.no_grad()
def keep_views(bucket: GradBucket, whole: torch.Tensor) -> None:
    """Notes the views of a bucket. Sets those that a program has set elsewhere onto it again, with
    their numbers. While a hook runs, a gradient is its view, or None if the parameter is unused."""
    known = _views.setdefault(whole.data_ptr(), {})
    parameters: Any = bucket.parameters()
    for i, p in enumerate(parameters):
        grad, noted = p.grad, known.get(i)
        view = None if noted is None else noted.tensor()
        if grad is not None and _is_alias_of(grad, whole):
            if view is not grad:
                here = grad.storage_offset(), grad.size(), grad.stride()
                known[i] = _View(weakref.ref(grad), *here)
        elif noted and view is not None and (grad is None or grad is view):
            numbers = view.clone()
            view.set_(whole.untyped_storage(), *noted[1:])
            view.copy_(numbers)
