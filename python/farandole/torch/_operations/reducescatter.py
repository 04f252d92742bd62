"""Reduce-scatters of tensors: every rank is left with its rows of the sum."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from farandole.common._process_set import ProcessSet, global_process_set
from farandole.common._reduction import Average
from farandole.torch._entries import public
from farandole.torch._operations import autograd, calls
from farandole.torch._operations.calls import How
from farandole.torch.compression import Compression, Compressor
from farandole.typing import HandleNumber

__all__ = [
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "reducescatter",
    "reducescatter_async",
]


@public
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
    how = How(name, op, prescale_factor, postscale_factor, process_set)
    return autograd.reduced_alone(autograd.ReduceScatter, tensor, compression, how)


@public
def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> HandleNumber[torch.Tensor]:
    """:func:`reducescatter`, at once with a handle; not differentiable."""
    how = How(name, op, prescale_factor, postscale_factor, process_set)
    return calls.reducescatter(tensor, how, single=True)


@public
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
    how = How(name, op, prescale_factor, postscale_factor, process_set)
    return autograd.reduced(autograd.ReduceScatter, tensors, compression, how)


@public
def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> HandleNumber[list[torch.Tensor]]:
    """:func:`grouped_reducescatter`, at once with a handle; not differentiable."""
    how = How(name, op, prescale_factor, postscale_factor, process_set)
    return calls.reducescatter(tensors, how)
