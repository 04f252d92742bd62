"""Ranks whose parameters lie differently in memory train one model, or are told."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from rank_cases import make_tests, on_ranks
from torch import nn

import farandole as fd
import farandole.torch as hvd


class Net(nn.Module):
    """`layout`: of the convolution; `turned`: the other weights are views of their transpose."""

    def __init__(self, layout: torch.memory_format, turned: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=layout)
        weight = torch.randn(16, 5)
        self.weight = nn.Parameter(weight.t().contiguous().t() if turned else weight)
        self.square = nn.Parameter(torch.randn(5, 5).t() if turned else torch.randn(5, 5).t() + 0)
        self.gaps = nn.Parameter(torch.randn(5, 2)[:, 0] if turned else torch.randn(5, 2)[:, 0] + 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.conv(x).tanh().flatten(1) @ self.weight
        return hidden @ self.square * self.gaps


def batch(step: int) -> torch.Tensor:
    return torch.randn(hvd.size(), 2, 3, 4, 4, generator=torch.Generator().manual_seed(step))


KINDS: list[dict[str, Any]] = [
    {}, {"groups": 2}, {"in_place_bytes": 0}, {"bucket_bytes": 0}, {"sharded_update": True},
    {"compression": hvd.Compression.fp16}, {"op": hvd.Adasum},
]  # fmt: skip


def trained(kind: dict[str, Any], *, differs: bool) -> Net:
    odd = differs and hvd.rank() == 1
    model = Net(torch.channels_last if odd else torch.contiguous_format, odd)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.1), model.named_parameters(), **kind
    )
    for step in range(4):
        optimizer.zero_grad()
        model(batch(step)[hvd.rank()]).square().mean().backward()
        optimizer.step()
    return model


@on_ranks(2, 3)
def ranks_may_have_their_own_strides() -> None:
    for kind in KINDS:
        model, whole = trained(kind, differs=True), trained(kind, differs=False)
        for p, q in zip(model.parameters(), whole.parameters(), strict=True):
            tolerance = 1e-2 if "compression" in kind else 1e-5
            torch.testing.assert_close(p, q, rtol=0, atol=tolerance, msg=f"{kind}")
            assert torch.equal(hvd.broadcast(p.detach().contiguous(), 0), p)


@on_ranks(2)
def state_that_is_there_is_laid_out_as_its_parameter() -> None:
    """Also of a parameter that is unfrozen later. A fused optimizer reads both in one order."""

    def trained(*, differs: bool, frozen: bool) -> Net:
        odd = differs and hvd.rank() == 1
        model = Net(torch.channels_last if odd else torch.contiguous_format, False)
        adam = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
        for p in model.parameters():
            first = torch.empty_like(p).copy_(torch.linspace(-1, 1, p.numel()).view(p.shape))
            adam.state[p] = {"step": torch.tensor(2.0), "exp_avg": first, "exp_avg_sq": first**2}
        model.conv.weight.requires_grad_(not frozen)
        optimizer = hvd.DistributedOptimizer(adam, model.named_parameters())
        for step in range(4):
            if step == 2:
                model.conv.weight.requires_grad_(True)
            optimizer.zero_grad()
            model(batch(step)[hvd.rank()]).square().mean().backward()
            optimizer.step()
        state = adam.state[model.conv.weight]["exp_avg"]
        assert state.stride() == model.conv.weight.stride()
        return model

    for frozen in (False, True):
        model, whole = (trained(differs=differs, frozen=frozen) for differs in (True, False))
        for p, q in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=1e-5)


@on_ranks(2)
def equal_strides_of_all_ranks_stay() -> None:
    model = Net(torch.channels_last, True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model(batch(0)[hvd.rank()]).square().mean().backward()
    for p in (model.conv.weight, model.weight, model.square):
        assert p.grad is not None
        assert p.grad.stride() == p.stride()
    optimizer.step()


@on_ranks(2, 3)
def shapes_of_equal_size_are_compared() -> None:
    for options in ({}, {"sharded_update": True}):
        model = nn.Linear(*((4, 3) if hvd.rank() == 1 else (3, 4)), bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        shapes = r"parameter 'weight' has shape \(4, 3\) on rank 0; \(3, 4\) on rank 1"
        with pytest.raises(fd.Mismatch, match=shapes):
            hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)
        assert type(optimizer) is torch.optim.SGD


test_on_ranks = make_tests(__name__, "torch")
