"""Helpers that test modules of PyTorch share: tensors, an optimizer, a backward that fails."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import farandole.torch as hvd


def numbers(shape: tuple[int, ...], dtype: torch.dtype, rank: int, seed: int = 0) -> torch.Tensor:
    """Small integers: every sum and product of four is exact in every dtype."""
    generator = torch.Generator().manual_seed(1000 * seed + 17 * rank + 1)
    drawn = torch.randint(0, 3, shape, generator=generator)
    if dtype.is_complex:
        other = drawn.flip(-1) if shape else drawn
        return torch.complex(drawn.double(), other.double()).to(dtype)
    return drawn.to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.dtype == b.dtype
    assert a.shape == b.shape, (a.shape, b.shape)
    if a.dtype.itemsize == 1:  # nothing compares floats of 8 bits
        a, b = a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    assert torch.equal(a, b), (a, b)


def wrap(model: nn.Module, lr: float = 0.01, momentum: float = 0.9, **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)


def failing(x: torch.Tensor, now: bool = True) -> torch.Tensor:
    """The same, through which no gradient comes: backward raises ZeroDivisionError, if `now`."""
    return _Raises.apply(x) if now else x  # type: ignore[no-any-return]


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # noqa: ARG004
        raise ZeroDivisionError("of the user")
