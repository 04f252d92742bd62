"""A small training with PyTorch, by ranks and by a process alone, which makes the gradients of each
rank's part of a batch for itself and takes their mean: both have the same bits where reductions and
what PyTorch does are right."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from cases import Skipped, asked, my_device, needs

import farandole as fd

# cuBLAS gives the same bits each time with memory of its own for each stream.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

WIDE, ROWS = 64, 8  # of an input, and of a rank's part of a batch


def begin() -> None:
    """PyTorch on this rank's device; Skipped where it has none."""
    needs("torch")
    import torch

    if not asked.host and not torch.cuda.is_available():
        raise Skipped("this PyTorch sees no device")
    torch.use_deterministic_algorithms(True)
    fd.init()
    if not asked.host:
        torch.cuda.set_device(my_device(torch.cuda.device_count()))


def device() -> Any:
    import torch

    return torch.device("cpu") if asked.host else torch.device("cuda", torch.cuda.current_device())


def rest() -> None:
    """All that was put into the device's streams is done."""
    import torch

    if not asked.host:
        torch.cuda.synchronize()


def network(dtype: Any = None) -> Any:
    """With weights of its own on each call, the same on all ranks."""
    import torch
    from torch import nn

    torch.manual_seed(3)
    layers = [nn.Linear(WIDE, 256), nn.Tanh(), nn.Linear(256, 300), nn.Tanh(), nn.Linear(300, 7)]
    return nn.Sequential(*layers).to(device(), dtype)


def batch(step: int, rank: int) -> Any:
    """A rank's part."""
    import torch

    seed = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(ROWS, WIDE, generator=seed).to(device())


def loss_of(model: Any, x: Any) -> Any:
    dtype = next(model.parameters()).dtype
    return (model(x.to(dtype)).float() - 1).square().mean()


def mean_of_parts(parameters: Iterable[Any], backward: Callable[[int], None]) -> None:
    """Sets each `p.grad` to the mean of the gradients that `backward` makes for each rank."""
    parts, held = [], list(parameters)
    for rank in range(fd.size()):
        for p in held:
            p.grad = None
        backward(rank)
        parts.append([p.grad for p in held])
    for p, *gradients in zip(held, *parts, strict=True):
        p.grad = sum(gradients[1:], gradients[0]) / fd.size()


def on_host(tensors: Iterable[Any]) -> list[Any]:
    """As arrays of float64, in which all values of each narrower type are."""
    rest()
    return [each.detach().cpu().double().numpy() for each in tensors]
