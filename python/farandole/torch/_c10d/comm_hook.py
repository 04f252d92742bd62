"""DistributedDataParallel keeps its process group and its buckets; farandole reduces them."""

# Without postponed annotations: register_comm_hook compares them as objects.

import weakref
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from farandole import _world
from farandole._arguments import explained, one_of, type_of
from farandole._core import InvalidArgument
from farandole._world import Group
from farandole.common._numerics import FLAG
from farandole.torch._c10d.bucket_views import keep_views
from farandole.torch._c10d.engine_group import EngineGroup
from farandole.torch._c10d.fallbacks import note_fallback
from farandole.torch._c10d.finite import BucketLooks
from farandole.torch._c10d.meeting import meet_beside
from farandole.torch._c10d.shared_buckets import move_when_it_stays
from farandole.torch._c10d.works import Work
from farandole.torch._tensors import borrow

__all__ = ["ddp_comm_hook"]


@explained(bucket=one_of("what DistributedDataParallel passes", GradBucket))
def ddp_comm_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook for DistributedDataParallel: the mean over all ranks, by farandole.

    Gradients are reduced in place in DDP's own buckets, by an order of operations that nothing else
    uses, while backward goes on. DDP's process group, of any backend, does the rest, such as
    sparse gradients (``farandole.torch.distributed.fallbacks()`` counts them). Ranks that have not
    called ``farandole.init()`` meet through the group's store, at the first bucket.

    Args:
        state: the process group that DDP was given, or None for all ranks.
        bucket: what DDP passes.

    Returns:
        A future of the bucket's buffer. An error is raised by ``backward()``.

    Examples:
        >>> import farandole.torch
        >>> def wrap(model):
        ...     ddp = torch.nn.parallel.DistributedDataParallel(model)
        ...     ddp.register_comm_hook(None, farandole.torch.ddp_comm_hook)
        ...     return ddp
    """
    group, looks = _beside_of(state)
    dense = bucket.buffer().layout == torch.strided
    if dense:
        keep_views(bucket, bucket.buffer())
    flag = looks.look(bucket) if looks.looks else None
    if not dense:
        if flag is not None:
            group.run("all_reduce", borrow(flag), borrow(flag), "max", name=FLAG)
        return _by_ddps_group(state, bucket.buffer())
    tensor = bucket.buffer()
    if tensor.is_cpu:
        tensor = move_when_it_stays(bucket, group)
    name = f"DDP bucket {bucket.index()}"
    given = borrow(tensor, name)
    how = (None, "mean", 1.0, 1.0, 0, name)
    if flag is None:
        handle = group.start("all_reduce", given, given, *how)
    else:
        both = [given, borrow(flag, name)]
        handle = group.start_grouped("all_reduce", both, both, *how)
    group.turn()
    return cast("torch.futures.Future[torch.Tensor]", Work(handle, tensor).get_future())


def _by_ddps_group(state: Any, gradient: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """A sparse gradient is a bucket of its own, and lies in no buffer."""
    group = _process_group(state)
    if not isinstance(group, EngineGroup):  # which counts by itself
        note_fallback("all_reduce of sparse tensors")
    mean = gradient / group.size()
    done = cast("dist.Work", dist.all_reduce(mean, group=group, async_op=True)).get_future()
    return cast("torch.futures.Future[torch.Tensor]", done.then(lambda f: f.value()[0]))


# By process group: a farandole group of the same ranks, its looks, and the world it belongs to.
_Beside = tuple[Group, BucketLooks, Group]
_beside: "weakref.WeakKeyDictionary[Any, _Beside]" = weakref.WeakKeyDictionary()


def _process_group(state: Any) -> dist.ProcessGroup:
    group = dist.group.WORLD if state is None else state
    if not isinstance(group, dist.ProcessGroup):
        raise InvalidArgument(
            f"the state of ddp_comm_hook is {type_of(state)}; give the process group of "
            "DistributedDataParallel, or None for all ranks"
        )
    return group


def _beside_of(state: Any) -> tuple[Group, BucketLooks]:
    group = _process_group(state)
    if group not in _beside or _beside[group][2] is not _world._state.group:
        met = meet_beside(group, "ddp_comm_hook")
        _beside[group] = (met.group, BucketLooks(met.group, met.tells), _world.world())
    return _beside[group][:2]
