"""Training over TCP connections gives the bits that it gives over shared memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch")

import torch
from rank_cases import begin_torch
from torch import nn

import farandole.torch as hvd
from harness import World


def train(steps: int) -> bytes:
    begin_torch()
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(33, 257), nn.Tanh(), nn.Linear(257, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    torch.manual_seed(10 + hvd.rank())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 33)).square().mean().backward()
        optimizer.step()
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    return bytes(flat.numpy().tobytes())


@pytest.mark.parametrize("size", [2, 3])
def test_steps_are_equal_bit_for_bit(spawn: Callable[..., World], size: int) -> None:
    weights = {
        bits
        for transport in ("shm", "tcp")
        for bits in spawn(size, "torch", env={"FARANDOLE_TRANSPORT": transport}).run(train, 3)
    }
    assert len(weights) == 1
