"""A model whose parameters lie on devices, and training steps of it that go wrong."""

from __future__ import annotations

import gc
from typing import Any

import torch
from fake_device import Rank
from fake_tensors import Tensors, parameters_on
from fault_work import let_fail, verdict_of

import farandole.torch as hvd


class Model(torch.nn.Module):
    """Several buckets, one tensor alone, one that some ranks do not use, and one that none uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(300, 400)
        self.large = torch.nn.Linear(400, 700)
        self.sometimes = torch.nn.Linear(700, 40)
        self.otherwise = torch.nn.Linear(700, 40)
        self.never = torch.nn.Linear(3, 3)
        self.last = torch.nn.Linear(40, 1)

    def forward(self, x: torch.Tensor, way: bool) -> torch.Tensor:
        x = torch.relu(self.large(torch.relu(self.first(x))))
        way_on = self.sometimes if way else self.otherwise
        result: torch.Tensor = self.last(torch.relu(way_on(x)))
        return result


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + hvd.rank())
    return torch.randn(8, 300, generator=generator)


def place(tensors: Tensors | None, model: Model, where: str) -> None:
    """`where`: which ranks' parameters lie on devices, or which parameters."""
    half = [model.first, model.sometimes, model.never]
    moved: dict[str, list[tuple[torch.nn.Module, int]]] = {
        "all": [(model, 0)],
        "one rank": [(model, 0)] if hvd.rank() == 1 else [],
        "some": [(model.large, 0), (model.sometimes, 0), (model.never, 0)],
        "none": [],
        # Not the same ones on the two ranks.
        "two devices": [
            (module, int((module in half) == (hvd.rank() == 0))) for module in model.children()
        ],
        "two devices and the host": [
            (model.large, hvd.rank() % 2),
            (model.sometimes, 1),
            (model.last, 0),
        ],
    }
    for module, device in moved[where]:
        assert tensors is not None
        list(parameters_on(tensors, module, device))


def small(tensors: Tensors, **how: Any) -> tuple[torch.nn.Module, Any]:
    model = torch.nn.Linear(30, 20)
    torch.nn.init.constant_(model.weight, 0.5)
    torch.nn.init.constant_(model.bias, 0.5)
    list(parameters_on(tensors, model))
    return model, hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), **how
    )


def goes_wrong(call: str, nth: int, how: dict[str, Any]) -> tuple[str, int | None, list[str]]:
    """Training steps in which rank 1's nth such call of the driver fails: the verdict, the rank
    that it names, and what the fake driver says."""
    rank = Rank()
    found = _verdict_of_steps(rank, Tensors(rank), call, nth, how)
    gc.collect()
    return *found, list(rank.machine.leave())


def _verdict_of_steps(
    rank: Rank, tensors: Tensors, call: str, nth: int, how: dict[str, Any]
) -> tuple[str, int | None]:
    model, optimizer = small(tensors, **how)
    let_fail(rank, call, nth)

    def train_step(step: int) -> None:
        optimizer.zero_grad()
        model(batch(step)[:, :30]).sum().backward()
        tensors.settle()
        optimizer.step()
        tensors.settle()

    return verdict_of(train_step)
