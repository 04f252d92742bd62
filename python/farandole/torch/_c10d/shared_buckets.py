"""Moves the buckets of DistributedDataParallel into memory that all ranks map.

Reducing a process' own memory takes a copy more than reducing memory that the others see: a third
of the time of a large bucket. Where gradients are views of their bucket (gradient_as_bucket_view),
the views that DDP writes through are, while its hook runs, the gradients that the parameters show.
They and the bucket are set onto shared memory, once, and DDP goes on with them. Each rank decides
alone, since operations tell the others where the data are.
"""

from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket

from farandole._core import InternalError
from farandole._world import Group
from farandole.torch._c10d.bucket_views import keep_views

_seen: set[int] = set()  # addresses of buckets; DDP makes new ones after its first backward
_moved: dict[int, bool] = {}  # by address in shared memory: whether it was checked since


def move_when_it_stays(bucket: GradBucket, group: Group) -> torch.Tensor:
    """The bucket's tensor, in shared memory from the second time on, where DDP allows it."""
    whole = bucket.buffer()
    address = whole.data_ptr()
    if address in _moved:
        if not _moved[address]:
            _check(bucket, whole)
            _moved[address] = True
    elif address in _seen:
        _seen.discard(address)
        _move(bucket, whole, group)
    else:
        _seen.add(address)
    return whole


def _move(bucket: GradBucket, whole: torch.Tensor, group: Group) -> None:
    gradients = [p.grad for p in bucket.parameters()]
    inside = [g for g in gradients if g is not None and _is_within(g, whole)]
    if group.size == 1 or not inside or sum(g.numel() for g in inside) != whole.numel():
        return  # not views, or some parameters have none in this step
    shared: Any = group.allocate(whole.numel() * whole.element_size())
    # torch.frombuffer holds the memory object, which holds the memory.
    here = torch.frombuffer(shared, dtype=whole.dtype)
    begin = whole.storage_offset()
    with torch.no_grad():
        here.copy_(whole)
        for view in inside:
            offset = view.storage_offset() - begin
            view.set_(here.untyped_storage(), offset, view.size(), view.stride())
        whole.set_(here.untyped_storage(), 0, whole.size(), whole.stride())
    _moved[whole.data_ptr()] = False
    keep_views(bucket, whole)


def _check(bucket: GradBucket, whole: torch.Tensor) -> None:
    """Raises InternalError if DDP has written gradients outside of the bucket since its move."""
    for p in bucket.parameters():
        if p.grad is not None and not _is_within(p.grad, whole):
            raise InternalError(
                f"DDP bucket {bucket.index()} was moved into shared memory, but PyTorch "
                f"{torch.__version__} writes gradients elsewhere\n"
                "  advice: gradient_as_bucket_view=False"
            )


def _is_within(grad: torch.Tensor, whole: torch.Tensor) -> bool:
    same = grad.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    return same and grad.dtype == whole.dtype
