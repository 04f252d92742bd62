"""All-reduces of tensors: alone and in groups, in place and not, at once and with a handle."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from farandole import _core
from farandole._arguments import takes
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


# ---- what they take ----


def _one(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, How]:
    how = How(name, choose_op(average, op), prescale_factor, postscale_factor, process_set)
    return tensor, how


def _one_compressed(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, type[Compressor], How]:
    how = How(name, choose_op(average, op), prescale_factor, postscale_factor, process_set)
    return tensor, compression, how


def _many(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[Sequence[torch.Tensor], How]:
    how = How(name, choose_op(average, op), prescale_factor, postscale_factor, process_set)
    return tensors, how


def _many_compressed(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[Sequence[torch.Tensor], type[Compressor], How]:
    how = How(name, choose_op(average, op), prescale_factor, postscale_factor, process_set)
    return tensors, compression, how


# ---- the functions ----


@public
@takes(_one_compressed)
def allreduce(given: tuple[torch.Tensor, type[Compressor], How]) -> torch.Tensor:
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
    return autograd.reduced_alone(autograd.AllReduce, *given)


@public
@takes(_one)
def allreduce_async(given: tuple[torch.Tensor, How]) -> HandleNumber[torch.Tensor]:
    """:func:`allreduce`, at once with a handle; not differentiable."""
    return calls.allreduce(*given, single=True)


@public
@takes(_one)
def allreduce_(given: tuple[torch.Tensor, How]) -> torch.Tensor:
    """:func:`allreduce` in place."""
    target = calls.in_place(given[0], "allreduce_")
    result: torch.Tensor = wait(calls.allreduce(*given, target, single=True))
    return result


@_core.quick_submit(calls.bump_version)
@public
@takes(_one)
def allreduce_async_(given: tuple[torch.Tensor, How]) -> HandleNumber[torch.Tensor]:
    """:func:`allreduce` in place, at once with a handle."""
    target = calls.in_place(given[0], "allreduce_async_")
    return calls.allreduce(*given, target, single=True)


@public
@takes(_many_compressed)
def grouped_allreduce(
    given: tuple[Sequence[torch.Tensor], type[Compressor], How],
) -> list[torch.Tensor]:
    """:func:`allreduce` of many tensors as one operation: none starts before all ranks have
    submitted all of them. Dtypes may differ."""
    return autograd.reduced(autograd.AllReduce, *given)


@public
@takes(_many)
def grouped_allreduce_async(
    given: tuple[Sequence[torch.Tensor], How],
) -> HandleNumber[list[torch.Tensor]]:
    """:func:`grouped_allreduce`, at once with a handle; not differentiable."""
    return calls.allreduce(*given)


@public
@takes(_many)
def grouped_allreduce_(given: tuple[Sequence[torch.Tensor], How]) -> list[torch.Tensor]:
    """:func:`grouped_allreduce` in place."""
    targets = [calls.in_place(tensor, "grouped_allreduce_") for tensor in given[0]]
    results: list[torch.Tensor] = wait(calls.allreduce(*given, targets))
    return results


@public
@takes(_many)
def grouped_allreduce_async_(
    given: tuple[Sequence[torch.Tensor], How],
) -> HandleNumber[list[torch.Tensor]]:
    """:func:`grouped_allreduce` in place, at once with a handle."""
    targets = [calls.in_place(tensor, "grouped_allreduce_async_") for tensor in given[0]]
    return calls.allreduce(*given, targets)
