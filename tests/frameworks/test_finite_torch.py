"""A gradient that is NaN or infinite on one rank: named on every rank, counted, or an error."""

from __future__ import annotations

import math
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from rank_cases import make_tests, numerics, on_ranks, told
from torch import nn

import farandole as fd
import farandole.torch as hvd

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "halves": {"compression": hvd.Compression.fp16},
    "in place": {"in_place_bytes": 1, "op": hvd.Sum},
    "buckets": {"bucket_bytes": 64, "first_bucket_bytes": 40},
    "buckets of halves": {"bucket_bytes": 32, "compression": hvd.Compression.fp16},
    "sharded": {"sharded_update": True},
    "adasum": {"op": hvd.Adasum},
}


def make(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    plain = torch.optim.SGD(model.parameters(), lr=1e-3)
    return model, hvd.DistributedOptimizer(plain, model.named_parameters(), **options)


def step(model: nn.Module, optimizer: Any, bad: float | None = None) -> None:
    """`bad`: what the last rank's gradient of one weight has."""
    optimizer.zero_grad()

    def spoilt(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient[1, 2] = bad
        return gradient

    hook = None
    if bad is not None and hvd.rank() == hvd.size() - 1:
        hook = model[0].weight.register_hook(spoilt)
    model(torch.ones(2, 3)).sum().backward()
    if hook is not None:
        hook.remove()
    optimizer.step()


@on_ranks(2, 3)
def it_is_told_once_and_counted() -> None:
    speaks = hvd.rank() in (0, hvd.size() - 1)
    for kind, options in KINDS.items():
        for bad, word in (math.nan, "NaN"), (-math.inf, "infinite"):
            model, optimizer = make(**options)
            before = fd.nonfinite_steps()
            step(model, optimizer)
            assert fd.nonfinite_steps() == before, kind
            with told(speaks) as texts:
                for _ in range(3):
                    step(model, optimizer, bad)
            assert fd.nonfinite_steps() == before + 3, kind
            for text in texts:
                assert f"rank {hvd.size() - 1} has a gradient that is {word} in step 2" in text
                assert "'0.weight'" in text


@on_ranks(2, 3)
def it_is_an_error_on_every_rank_before_weights_change() -> None:
    with numerics("error"):
        for kind, options in KINDS.items():
            model, optimizer = make(**options)
            step(model, optimizer)
            weights = [p.detach().clone() for p in model.parameters()]
            with pytest.raises(fd.NumericsError) as caught:
                step(model, optimizer, math.nan)
            error: Any = caught.value
            assert (error.rank, error.tensor) == (hvd.size() - 1, "0.weight"), kind
            assert error.step == 2
            for p, old in zip(model.parameters(), weights, strict=True):
                assert torch.equal(p, old), kind
            step(model, optimizer)  # training may go on


@on_ranks(2)
def nobody_looks_where_it_is_off() -> None:
    with numerics("off"), told(0):
        for options in KINDS.values():
            model, optimizer = make(**options)
            before = fd.nonfinite_steps()
            step(model, optimizer, math.nan)
            assert fd.nonfinite_steps() == before


@on_ranks(2)
def a_step_that_a_scaler_skips_is_none() -> None:
    for fused in False, True:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        plain = torch.optim.Adam(model.parameters(), fused=fused)
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
        before = fd.nonfinite_steps()
        with numerics("error"), told(0):
            for _ in range(2):
                optimizer.zero_grad()
                scaler.scale(model(torch.full((2, 3), 1e3)).sum()).backward()
                scaler.step(optimizer)
                scaler.update()
        assert scaler.get_scale() < 2.0**127
        assert fd.nonfinite_steps() == before


@on_ranks(2)
def sums_that_overflow_of_gradients_that_do_not_are_no_fault() -> None:
    with numerics("error"):
        model, optimizer = make()
        optimizer.zero_grad()
        for p in model.parameters():
            p.grad = torch.full_like(p, 3e38)
        optimizer.step()


@on_ranks(2)
def what_a_program_clears_before_it_steps_is_not_used() -> None:
    with numerics("error"), told(0):
        model, optimizer = make()
        optimizer.zero_grad()
        (model(torch.ones(2, 3)).sum() * math.nan).backward()
        optimizer.zero_grad()
        step(model, optimizer)


@on_ranks(2)
def a_wrong_setting_is_refused() -> None:
    with numerics("loud"), pytest.raises(fd.InvalidArgument, match="FARANDOLE_NUMERICS"):
        make()


test_on_ranks = make_tests(__name__, "torch")
