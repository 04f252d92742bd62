"""Buckets follow the order in which gradients became ready in the first step."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from rank_cases import make_tests, on_ranks
from torch import nn
from torch_work import failing, wrap

import farandole as fd
import farandole.torch as hvd

WIDTH, LAYERS = 32, 8
SMALL = {"bucket_bytes": 2 * 4 * WIDTH * WIDTH, "first_bucket_bytes": 0}
ONE_BUCKET = {"bucket_bytes": 1 << 40, "first_bucket_bytes": 1 << 40}  # nothing to plan anew


class Backwards(nn.Module):
    """Runs its layers from the last to the first, so that the first one's gradient comes first:
    the other way round than the layers' order lets expect. `unused` are left out."""

    def __init__(self, unused: tuple[int, ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.unused = unused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in reversed(range(LAYERS)):
            if i not in self.unused:
                x = self.layers[i](x).tanh()
        return x


class Beside(nn.Module):
    """Layers beside each other: backward goes through them as forward did, the other way round."""

    def __init__(self, order: list[int]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = {i: self.layers[i](x).tanh() for i in self.order}
        return torch.stack([parts[i] for i in range(LAYERS)]).sum(0)


def loss(model: nn.Module, step: int = 0) -> torch.Tensor:
    torch.manual_seed(100 * step + hvd.rank())
    return (model(torch.randn(4, WIDTH)) * 1e3).square().sum()


def train(model: nn.Module, optimizer: Any, step: int = 0) -> list[torch.Tensor]:
    """A step; its gradients."""
    optimizer.zero_grad()
    loss(model, step).backward()
    seen = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    optimizer.step()
    return seen


def layers_in_buckets(optimizer: Any) -> list[int]:
    """In the order in which they are launched. Parameter i is layer LAYERS - 1 - i; after them
    comes the flag."""
    buckets = optimizer._exchange.reducer.buckets
    return [LAYERS - 1 - i for _, _, items in buckets for i, _, _ in items if i < LAYERS]


@on_ranks(2, 3)
def the_second_step_launches_in_the_order_of_the_first() -> None:
    model = Backwards()
    optimizer = wrap(model, **SMALL)
    reducer = optimizer._exchange.reducer
    train(model, optimizer)
    assert layers_in_buckets(optimizer) == list(reversed(range(LAYERS)))
    assert "in ready order" in reducer.describe()
    train(model, optimizer)
    assert layers_in_buckets(optimizer) == list(range(LAYERS))
    assert "next step" not in reducer.describe()
    buckets = reducer.buckets
    for _ in range(3):
        train(model, optimizer)
    assert reducer.buckets == buckets


@on_ranks(2, 3)
def ranks_with_different_orders_agree_on_one() -> None:
    mine = list(range(LAYERS))
    half = LAYERS // 2
    if hvd.rank() == 1:  # the first half of the layers comes later than on other ranks
        mine = mine[half:] + mine[:half]
    model = Beside(list(reversed(mine)))
    optimizer = wrap(model, **SMALL)
    for step in range(3):
        train(model, optimizer, step)
    order = torch.tensor(layers_in_buckets(optimizer))
    assert order.tolist() != list(reversed(range(LAYERS)))
    everybody = hvd.allgather(order[None])
    assert (everybody == order).all()


@on_ranks(2, 3)
def bits_do_not_depend_on_the_plan() -> None:
    seen = []
    for options in (SMALL, SMALL | {"overlap": False}, {"bucket_bytes": 0}, ONE_BUCKET):
        model = Backwards()
        optimizer = wrap(model, **options)
        seen.append([g for step in range(4) for g in train(model, optimizer, step)])
        planned = layers_in_buckets(optimizer) != list(reversed(range(LAYERS)))
        assert planned == (options is not ONE_BUCKET)
    for others in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], others, strict=True))


@on_ranks(2)
def parameters_that_a_rank_does_not_use_go_last() -> None:
    model = Backwards(unused=(2,) if hvd.rank() == 0 else ())
    optimizer = wrap(model, **SMALL)
    for step in range(2):
        train(model, optimizer, step)
    assert layers_in_buckets(optimizer) == [0, 1, 3, 4, 5, 6, 7, 2]
    model.unused = ()
    for step in range(2):
        grads = train(model, optimizer, step)
        both = hvd.allgather(torch.stack(grads)[None])
        assert torch.equal(both[0], both[1])


@on_ranks(2)
def gradients_that_were_shown_stay() -> None:
    model = Backwards()
    optimizer = wrap(model, **SMALL)
    loss(model).backward()
    shown = [p.grad for p in model.parameters()]
    copies = [g.clone() for g in shown]
    optimizer.step()
    optimizer.zero_grad()
    loss(model, 1).backward()
    assert layers_in_buckets(optimizer) == list(range(LAYERS))
    assert all(torch.equal(g, c) for g, c in zip(shown, copies, strict=True))
    assert all(p.grad is not g for p, g in zip(model.parameters(), shown, strict=True))


@on_ranks(2)
def gradients_that_stay_are_added_to_across_the_new_plan() -> None:
    def gradients(**options: Any) -> list[torch.Tensor]:
        model = Backwards()
        optimizer = wrap(model, **options)
        loss(model).backward()  # and no zero_grad: the second pass adds to the mean
        loss(model, 1).backward()
        assert layers_in_buckets(optimizer)[0] == (0 if options == SMALL else LAYERS - 1)
        return [p.grad for p in model.parameters()]

    for mine, other in zip(gradients(**SMALL), gradients(**ONE_BUCKET), strict=True):
        assert torch.equal(mine, other)


@on_ranks(2)
def a_sum_is_still_not_summed_twice() -> None:
    model = Backwards()
    optimizer = wrap(model, op=hvd.Sum, **SMALL)
    loss(model).backward()
    with pytest.raises(fd.InvalidArgument, match="already summed"):
        loss(model).backward()
    train(model, optimizer)


@on_ranks(2)
def accumulation_learns_the_order_of_the_pass_that_reduces() -> None:
    def gradients(**options: Any) -> list[torch.Tensor]:
        model = Backwards()
        optimizer = wrap(model, backward_passes_per_step=2, **options)
        seen = []
        for step in range(3):
            optimizer.zero_grad()
            for half in range(2):
                loss(model, 2 * step + half).backward()
            seen += [p.grad.clone() for p in model.parameters()]
            optimizer.step()
        assert layers_in_buckets(optimizer)[0] == (0 if options == SMALL else LAYERS - 1)
        return seen

    for mine, other in zip(gradients(**SMALL), gradients(**ONE_BUCKET), strict=True):
        assert torch.equal(mine, other)


@on_ranks(2)
def compressed_gradients_move_too() -> None:
    model = Backwards()
    optimizer = wrap(
        model,
        compression=hvd.Compression.fp16,
        bucket_bytes=4 * WIDTH * WIDTH,
        first_bucket_bytes=0,
    )
    for step in range(3):
        optimizer.zero_grad()
        (loss(model, step) / 1e6).backward()  # what halves can hold
        both = hvd.allgather(torch.stack([p.grad for p in model.parameters()])[None])
        assert torch.equal(both[0], both[1])
        assert both.abs().max() > 0
        optimizer.step()
    assert layers_in_buckets(optimizer) == list(range(LAYERS))


@on_ranks(2)
def memory_does_not_grow() -> None:
    def arena() -> int:
        return fd.world().counters()["arena_bytes"]

    model = Backwards()
    optimizer = wrap(model, **SMALL)
    before = arena()
    train(model, optimizer)
    for step in range(3):
        train(model, optimizer, step)
    assert layers_in_buckets(optimizer) == list(range(LAYERS))
    page = 4096
    assert arena() <= before + page * LAYERS
    steady = fd.world().counters()["arena_allocations"]
    for step in range(3):
        train(model, optimizer, step)
    assert fd.world().counters()["arena_allocations"] == steady


@on_ranks(2, 3)
def a_first_backward_that_raises_shows_no_order() -> None:
    model = Backwards()
    optimizer = wrap(model, **SMALL)
    x = model.layers[LAYERS - 1](torch.ones(1, WIDTH))
    x = failing(x, hvd.rank() == 0)
    for i in reversed(range(LAYERS - 1)):
        x = model.layers[i](x)
    with pytest.raises(ZeroDivisionError if hvd.rank() == 0 else fd.RemoteError):
        x.sum().backward()
    for step in range(2):
        train(model, optimizer, step)
    assert layers_in_buckets(optimizer) == list(range(LAYERS))


@on_ranks(2)
def every_optimizer_has_an_order_of_its_own() -> None:
    models = [Backwards(), Backwards()]
    optimizers = [wrap(model, **SMALL) for model in models]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (loss(models[0], step) + loss(models[1], step)).backward()
        for mine, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.equal(mine.grad, other.grad)
        for optimizer in optimizers:
            optimizer.step()
    assert [layers_in_buckets(o) for o in optimizers] == [list(range(LAYERS))] * 2


test_on_ranks = make_tests(__name__, "torch")
