"""All-reduces of tensors: alone and in groups, in place and not, at once and with a handle."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from farandole import _core
from farandole.common._process_set import ProcessSet, global_process_set
from farandole.common._reduction import choose_op
from farandole.torch._entries import public
from farandole.torch._operations import autograd, calls
from farandole.torch._operations.calls import How
from farandole.torch._operations.handles import wait
from farandole.torch.compression import Compression, Compressor
from farandole.typing import HandleNumber

__all__ = [
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
]


@public
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
        op: ``Average`` (the default), ``Sum``, ``Adasum`` (of floating dtypes), ``Min``, ``Max`` or
            ``Product``. The gradient of the first three is the same operation on the gradients.
        prescale_factor: a factor on every input.
        postscale_factor: a factor on the result.
        process_set: the ranks that take part.

    Raises:
        InvalidArgument: bad input on this rank; nothing was sent.
        Mismatch: the ranks called with different tensors or options; the next call works.

    Examples:
        >>> import torch, farandole.torch as hvd
        >>> hvd.init()
        >>> hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist()
        [1.0, 1.0]
    """
    how = How(name, choose_op(average, op), prescale_factor, postscale_factor, process_set)
    return autograd.reduced_alone(autograd.AllReduce, tensor, compression, how)


@public
def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> HandleNumber[torch.Tensor]:
    """:func:`allreduce`, at once with a handle; not differentiable."""
    how = How(name, choose_op(average, op), prescale_factor, postscale_factor, process_set)
    return calls.allreduce(tensor, how, single=True)


@public
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
    how = How(name, choose_op(average, op), prescale_factor, postscale_factor, process_set)
    target = calls.in_place(tensor, "allreduce_")
    result: torch.Tensor = wait(calls.allreduce(tensor, how, target, single=True))
    return result


@_core.quick_submit(calls.bump_version)
@public
def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> HandleNumber[torch.Tensor]:
    """:func:`allreduce` in place, at once with a handle."""
    how = How(name, choose_op(average, op), prescale_factor, postscale_factor, process_set)
    target = calls.in_place(tensor, "allreduce_async_")
    return calls.allreduce(tensor, how, target, single=True)


@public
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
    how = How(name, choose_op(average, op), prescale_factor, postscale_factor, process_set)
    return autograd.reduced(autograd.AllReduce, tensors, compression, how)


@public
def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> HandleNumber[list[torch.Tensor]]:
    """:func:`grouped_allreduce`, at once with a handle; not differentiable."""
    how = How(name, choose_op(average, op), prescale_factor, postscale_factor, process_set)
    return calls.allreduce(tensors, how)


@public
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
    how = How(name, choose_op(average, op), prescale_factor, postscale_factor, process_set)
    targets = [calls.in_place(tensor, "grouped_allreduce_") for tensor in tensors]
    results: list[torch.Tensor] = wait(calls.allreduce(tensors, how, targets))
    return results


@public
def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> HandleNumber[list[torch.Tensor]]:
    """:func:`grouped_allreduce` in place, at once with a handle."""
    how = How(name, choose_op(average, op), prescale_factor, postscale_factor, process_set)
    targets = [calls.in_place(tensor, "grouped_allreduce_async_") for tensor in tensors]
    return calls.allreduce(tensors, how, targets)
