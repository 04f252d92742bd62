"""The collectives on tensors, with Horovod's names and signatures.

Operations match in program order, on every rank; names and shapes are compared, not used to find
partners. The forms that end in ``_`` work in place, those with ``_async`` return a handle for
``synchronize()``. Only the plain forms (``allreduce``, ``allgather``, ``broadcast``,
``reducescatter``) are differentiable.

Every function raises ``InvalidArgument`` (a ``ValueError``) for a tensor that cannot be sent
(sparse, not contiguous, not on the CPU, of an unsupported dtype), before anything is sent.
"""

from __future__ import annotations

import torch

from farandole import _world
from farandole.torch import _autograd, _calls
from farandole.torch._handles import handles
from farandole.torch._process_set import ProcessSet, check_process_set, global_process_set
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
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
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
        name: compared between ranks, and part of errors.
        compression: what is sent instead.
        op: ``Average`` (the default), ``Sum``, ``Min``, ``Max`` or ``Product``.
        prescale_factor, postscale_factor: factors on every input, and on the result.
        process_set: only ``global_process_set`` yet.

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
    chosen = choose_op(average, op)
    return _calls.allreduce(
        tensor, name, chosen, prescale_factor, postscale_factor, process_set
    ).start()


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
    chosen = choose_op(average, op)
    return _calls.allreduce(
        tensor, name, chosen, prescale_factor, postscale_factor, process_set, into=target
    ).run()


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
    chosen = choose_op(average, op)
    return _calls.allreduce(
        tensor, name, chosen, prescale_factor, postscale_factor, process_set, into=target
    ).start()


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Returns the root's tensor on every rank; shapes and dtypes are equal on all ranks."""
    return _autograd.apply(_autograd.Broadcast, tensor, root_rank, name, process_set)


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """:func:`broadcast`, at once with a handle; not differentiable."""
    return _calls.broadcast(tensor, root_rank, name, process_set).start()


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Overwrites the tensor with the root's."""
    target = _calls.in_place(tensor, "broadcast_")
    return _calls.broadcast(tensor, root_rank, name, process_set, into=target).run()


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """:func:`broadcast_`, at once with a handle."""
    target = _calls.in_place(tensor, "broadcast_async_")
    return _calls.broadcast(tensor, root_rank, name, process_set, into=target).start()


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Joins all ranks' tensors along the first dimension, which may differ (and be 0).

    Raises:
        Mismatch: the other dimensions, or the dtypes, differ; the next call works.
    """
    return _autograd.apply(_autograd.AllGather, tensor, name, process_set)


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """:func:`allgather` with a handle; not differentiable. The ranks' shapes are exchanged before
    it returns."""
    return _calls.allgather(tensor, name, process_set).start()


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
    result = _autograd.apply(
        _autograd.ReduceScatter, wire, name, op, process_set, prescale_factor, postscale_factor
    )
    return compression.decompress(result, context)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """:func:`reducescatter`, at once with a handle; not differentiable."""
    return _calls.reducescatter(
        tensor, name, op, process_set, prescale_factor, postscale_factor
    ).start()


def synchronize(handle: int) -> torch.Tensor:
    """Waits for an asynchronous operation and returns its result; raises its error.

    Raises:
        InvalidArgument: the handle is unknown, or was synchronized already.
    """
    result: torch.Tensor = handles.wait(handle)
    return result


def poll(handle: int) -> bool:
    """Whether ``synchronize(handle)`` would return at once."""
    done: bool = handles.look(handle).done()
    return done


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when every rank has called it."""
    check_process_set(process_set)
    _world.world().barrier()
