"""Operations that move tensors and compute nothing: broadcast, allgather, alltoall."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch

from farandole.common._process_set import ProcessSet, global_process_set
from farandole.torch._entries import public
from farandole.torch._operations import autograd, calls
from farandole.torch._operations.handles import wait
from farandole.torch._tensors import check_tensor
from farandole.typing import HandleNumber

Splits = torch.Tensor | Sequence[int]

__all__ = [
    "allgather",
    "allgather_async",
    "alltoall",
    "alltoall_async",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
]


@public
def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Returns the root's tensor on every rank; shapes and dtypes are equal on all ranks. Roots are
    ranks of the world, whatever the process set."""
    result: torch.Tensor = autograd.apply(autograd.Broadcast, tensor, root_rank, name, process_set)
    return result


@public
def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> HandleNumber[torch.Tensor]:
    """:func:`broadcast`, at once with a handle; not differentiable."""
    return calls.broadcast(tensor, root_rank, name, process_set)


@public
def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Overwrites the tensor with the root's."""
    target = calls.in_place(tensor, "broadcast_")
    result: torch.Tensor = wait(calls.broadcast(tensor, root_rank, name, process_set, into=target))
    return result


@public
def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> HandleNumber[torch.Tensor]:
    """:func:`broadcast_`, at once with a handle."""
    target = calls.in_place(tensor, "broadcast_async_")
    return calls.broadcast(tensor, root_rank, name, process_set, into=target)


@public
def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Joins all ranks' tensors along the first dimension, which may differ (and be 0).

    Raises:
        Mismatch: the other dimensions, or the dtypes, differ; the next call works.
    """
    result: torch.Tensor = autograd.apply(autograd.AllGather, name, process_set, True, tensor)[0]
    return result


@public
def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> HandleNumber[torch.Tensor]:
    """:func:`allgather`, at once with a handle; not differentiable."""
    return calls.allgather(tensor, name, process_set, single=True)


@public
def grouped_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """:func:`allgather` of many tensors as one operation."""
    given = calls.listed(tensors)
    return list(autograd.apply(autograd.AllGather, name, process_set, False, *given))


@public
def grouped_allgather_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> HandleNumber[list[torch.Tensor]]:
    """:func:`grouped_allgather`, at once with a handle; not differentiable."""
    return calls.allgather(tensors, name, process_set)


@overload
def alltoall(
    tensor: torch.Tensor, splits: None = ..., name: str | None = ..., process_set: ProcessSet = ...
) -> torch.Tensor: ...
@overload
def alltoall(
    tensor: torch.Tensor, splits: Splits, name: str | None = ..., process_set: ProcessSet = ...
) -> tuple[torch.Tensor, torch.Tensor]: ...
@public
def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends rows of the first dimension to each rank and joins those that come, by sender.

    Args:
        tensor: its rows, in the order of the ranks they go to.
        splits: how many rows go to each rank of the set; default: equally many.
        name: see :func:`allreduce`.
        process_set: the ranks that take part.

    Returns:
        The tensor of received rows; with splits also how many came from each rank (int32).

    Examples:
        >>> import torch, farandole.torch as hvd
        >>> hvd.init()
        >>> hvd.alltoall(torch.ones(3), splits=[3])[1].tolist()
        [3]
    """
    if splits is not None:
        return autograd.apply(autograd.AllToAll, tensor, splits, name, process_set)
    check_tensor(tensor, "tensor")
    even = calls.even_splits(tensor, process_set)
    return autograd.apply(autograd.AllToAll, tensor, even, name, process_set)[0]


@overload
def alltoall_async(
    tensor: torch.Tensor, splits: None = ..., name: str | None = ..., process_set: ProcessSet = ...
) -> HandleNumber[torch.Tensor]: ...
@overload
def alltoall_async(
    tensor: torch.Tensor, splits: Splits, name: str | None = ..., process_set: ProcessSet = ...
) -> HandleNumber[tuple[torch.Tensor, torch.Tensor]]: ...
@public
def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> HandleNumber[torch.Tensor | tuple[torch.Tensor, torch.Tensor]]:
    """:func:`alltoall`, at once with a handle; not differentiable."""
    return calls.alltoall(tensor, splits, name, process_set)
