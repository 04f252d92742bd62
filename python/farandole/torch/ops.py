"""The collectives on tensors, with Horovod's names and signatures.

Operations are keyed by name: ranks submit them in any order, and one runs when all ranks of its
process set have submitted that name. Without a name, the n-th nameless call of a kind meets the
n-th of the other ranks. The forms that end in ``_`` work in place, those with ``_async`` return a
handle for ``synchronize()``. Only the plain forms (``allreduce``, ``allgather``, ``alltoall``,
``broadcast``, ``reducescatter`` and the grouped ones) are differentiable.

Every function raises ``InvalidArgument`` (a ``ValueError``) before anything is sent for a tensor
that cannot be sent (sparse, not contiguous, not on the CPU, of an unsupported dtype), for a name
that is in flight already, and on ranks outside the process set. ``Mismatch`` says on every rank how
the ranks' calls differ: nothing has been reduced, and the next call works.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from farandole import _core
from farandole.torch import _autograd, _calls
from farandole.torch._handles import done, wait
from farandole.torch._process_set import ProcessSet, global_process_set
from farandole.torch._reductions import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    choose_op,
    op_name,
)
from farandole.torch._tensors import check_tensor
from farandole.torch.compression import Compression, Compressor

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "op_name",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "synchronize",
]


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduces equal tensors of all ranks, elementwise; every rank gets the result.

    Args:
        tensor: of any shape; left as it is.
        average: deprecated, see ``op``.
        name: which tensor this is, on every rank.
        compression: what is sent instead.
        op: ``Average`` (the default), ``Sum``, ``Min``, ``Max`` or ``Product``.
        prescale_factor, postscale_factor: factors on every input, and on the result.
        process_set: the ranks that take part.

    Raises:
        InvalidArgument: bad input on this rank; nothing was sent.
        Mismatch: the ranks called with different tensors or options; the next call works.

    Example:
        >>> import torch, farandole.torch as hvd
        >>> hvd.init()
        >>> hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist()
        [1.0, 1.0]
    """
    chosen = choose_op(average, op)
    check_tensor(tensor, "tensor")
    wire, context = compression.compress(tensor)
    result = _autograd.apply(
        _autograd.AllReduce, wire, name, chosen, prescale_factor, postscale_factor, process_set
    )
    return compression.decompress(result, context)


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """:func:`allreduce`, at once with a handle; not differentiable."""
    return _calls.allreduce(
        tensor, name, choose_op(average, op), prescale_factor, postscale_factor, process_set
    )


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """:func:`allreduce` in place."""
    target = _calls.in_place(tensor, "allreduce_")
    handle = _calls.allreduce(
        tensor,
        name,
        choose_op(average, op),
        prescale_factor,
        postscale_factor,
        process_set,
        into=target,
    )
    result: torch.Tensor = wait(handle)
    return result


@_core.quick_submit(_calls.bump_version)
def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """:func:`allreduce` in place, at once with a handle."""
    target = _calls.in_place(tensor, "allreduce_async_")
    return _calls.allreduce(
        tensor,
        name,
        choose_op(average, op),
        prescale_factor,
        postscale_factor,
        process_set,
        into=target,
    )


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """:func:`allreduce` of many tensors as one operation: none starts before all ranks have
    submitted all of them. Dtypes may differ."""
    chosen = choose_op(average, op)
    pairs = []
    for i, tensor in enumerate(tensors):
        check_tensor(tensor, f"tensor {i}")
        pairs.append(compression.compress(tensor))
    if not pairs:
        return []
    how = (name, chosen, prescale_factor, postscale_factor, process_set)
    results = _autograd.apply(
        _autograd.GroupedAllReduce, *(wire for wire, _ in pairs), *how, len(pairs)
    )
    return [
        compression.decompress(result, context)
        for result, (_, context) in zip(results, pairs, strict=True)
    ]


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """:func:`grouped_allreduce`, at once with a handle; not differentiable."""
    return _calls.grouped_allreduce(
        tensors, name, choose_op(average, op), prescale_factor, postscale_factor, process_set
    )


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """:func:`grouped_allreduce` in place."""
    targets = [_calls.in_place(tensor, "grouped_allreduce_") for tensor in tensors]
    handle = _calls.grouped_allreduce(
        tensors,
        name,
        choose_op(average, op),
        prescale_factor,
        postscale_factor,
        process_set,
        into=targets,
    )
    result: list[torch.Tensor] = wait(handle)
    return result


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """:func:`grouped_allreduce` in place, at once with a handle."""
    targets = [_calls.in_place(tensor, "grouped_allreduce_async_") for tensor in tensors]
    return _calls.grouped_allreduce(
        tensors,
        name,
        choose_op(average, op),
        prescale_factor,
        postscale_factor,
        process_set,
        into=targets,
    )


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Returns the root's tensor on every rank; shapes and dtypes are equal on all ranks. Roots are
    ranks of the world, whatever the process set."""
    result: torch.Tensor = _autograd.apply(
        _autograd.Broadcast, tensor, root_rank, name, process_set
    )
    return result


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """:func:`broadcast`, at once with a handle; not differentiable."""
    return _calls.broadcast(tensor, root_rank, name, process_set)


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Overwrites the tensor with the root's."""
    target = _calls.in_place(tensor, "broadcast_")
    result: torch.Tensor = wait(_calls.broadcast(tensor, root_rank, name, process_set, into=target))
    return result


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """:func:`broadcast_`, at once with a handle."""
    target = _calls.in_place(tensor, "broadcast_async_")
    return _calls.broadcast(tensor, root_rank, name, process_set, into=target)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Joins all ranks' tensors along the first dimension, which may differ (and be 0).

    Raises:
        Mismatch: the other dimensions, or the dtypes, differ; the next call works.
    """
    result: torch.Tensor = _autograd.apply(_autograd.AllGather, tensor, name, process_set)
    return result


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """:func:`allgather`, at once with a handle; not differentiable."""
    return _calls.grouped_allgather(tensor, name, process_set, single=True)


def grouped_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """:func:`allgather` of many tensors as one operation."""
    if len(tensors) == 0:
        return []
    return list(_autograd.apply(_autograd.GroupedAllGather, *tensors, name, process_set))


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """:func:`grouped_allgather`, at once with a handle; not differentiable."""
    return _calls.grouped_allgather(tensors, name, process_set)


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
        name, process_set: see :func:`allreduce`.

    Returns:
        The tensor of received rows; with splits also how many came from each rank (int32).

    Example:
        >>> import torch, farandole.torch as hvd
        >>> hvd.init()
        >>> hvd.alltoall(torch.ones(3), splits=[3])[1].tolist()
        [3]
    """
    if splits is not None:
        return _autograd.apply(_autograd.AllToAll, tensor, splits, name, process_set)
    check_tensor(tensor, "tensor")
    even = _calls.even_splits(tensor, process_set)
    return _autograd.apply(_autograd.AllToAll, tensor, even, name, process_set)[0]


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """:func:`alltoall`, at once with a handle; not differentiable."""
    return _calls.alltoall(tensor, splits, name, process_set)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduces as :func:`allreduce` does, and leaves part r of the first dimension on rank r; the
    first ranks get one row more where it does not divide."""
    check_tensor(tensor, "tensor")
    wire, context = compression.compress(tensor)
    how = (name, op, process_set, prescale_factor, postscale_factor)
    return compression.decompress(_autograd.apply(_autograd.ReduceScatter, wire, *how), context)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """:func:`reducescatter`, at once with a handle; not differentiable."""
    return _calls.grouped_reducescatter(
        tensor, name, op, process_set, prescale_factor, postscale_factor, single=True
    )


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """:func:`reducescatter` of many tensors as one operation."""
    pairs = []
    for i, tensor in enumerate(tensors):
        check_tensor(tensor, f"tensor {i}")
        pairs.append(compression.compress(tensor))
    if not pairs:
        return []
    how = (name, op, process_set, prescale_factor, postscale_factor)
    results = _autograd.apply(
        _autograd.GroupedReduceScatter, *(wire for wire, _ in pairs), *how, len(pairs)
    )
    return [
        compression.decompress(result, context)
        for result, (_, context) in zip(results, pairs, strict=True)
    ]


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """:func:`grouped_reducescatter`, at once with a handle; not differentiable."""
    return _calls.grouped_reducescatter(
        tensors, name, op, process_set, prescale_factor, postscale_factor
    )


synchronize = wait


def poll(handle: int) -> bool:
    """Whether ``synchronize(handle)`` would return at once.

    Raises:
        InvalidArgument: the handle is unknown, or was synchronized already.
    """
    return done(handle)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when every rank of the set has called it."""
    wait(_calls.barrier(process_set))


def join(device: int = -1) -> int:  # noqa: ARG001 - Horovod's signature
    """Takes part in the others' operations, with nothing of its own, until all ranks have joined:
    for a rank that has no more batches.

    To a reduction a joined rank adds nothing (zeros, and averages still divide by all ranks); of
    what is gathered it has no rows. A broadcast from a joined rank is a ``Mismatch``.

    Returns:
        The last rank to join.
    """
    last: int = wait(_calls.join())
    return last
