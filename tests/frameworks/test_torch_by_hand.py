"""Programs that set gradients, or the optimizer's parameters, by themselves: as in one process, or
refused on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from rank_cases import make_tests, on_ranks, raises
from torch import nn

import farandole as fd
import farandole.torch as hvd

EACH = 4  # samples of a rank in a batch
Program = Callable[[nn.Module, Any, slice], None]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.multiplier = nn.Parameter(torch.zeros(1))


def batches(count: int, rows: slice) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for step in range(count):
        dice = torch.Generator().manual_seed(step)
        x = torch.randn(EACH * hvd.size(), 3, generator=dice)
        yield x[rows], torch.randn(EACH * hvd.size(), 1, generator=dice)[rows]


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def compare(program: Program, rate: float = 0.2, **options: Any) -> None:
    """Trains on the ranks, and in each of them alone."""
    alone, mine = Net(), Net()
    program(alone, torch.optim.SGD(alone.parameters(), rate), slice(None))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(mine.parameters(), rate), mine.named_parameters(), **options
    )
    program(mine, optimizer, slice(EACH * hvd.rank(), EACH * (hvd.rank() + 1)))
    every = hvd.allgather(flat(mine)[None])
    assert torch.equal(every, every[:1].expand_as(every)), "ranks have moved apart"
    torch.testing.assert_close(flat(mine), flat(alone), rtol=1e-5, atol=1e-6)


def loss_of(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model.body(x) - y).square().mean()
    return loss


def by_autograd_grad(model: Any, loss: torch.Tensor, *, copied: bool) -> None:
    parameters = list(model.body.parameters())
    for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        if copied and p.grad is not None:
            p.grad.copy_(g)
        else:
            p.grad = g


@on_ranks(2, 3)
def gradients_written_by_hand_are_reduced_before_they_are_clipped() -> None:
    for copied in (False, True):

        def train(model: Any, optimizer: Any, rows: slice, copied: bool = copied) -> None:
            for x, y in batches(4, rows):
                by_autograd_grad(model, loss_of(model, x, y), copied=copied)
                torch.nn.utils.clip_grad_norm_(model.body.parameters(), 0.1)
                optimizer.step()

        compare(train, 1.0)


@on_ranks(2)
def gradients_written_by_hand_after_a_step_that_was_left_out_are_reduced() -> None:
    for copied in (False, True):

        def train(model: Any, optimizer: Any, rows: slice, copied: bool = copied) -> None:
            left_out = 0
            for step, (x, y) in enumerate(batches(8, rows)):
                loss = loss_of(model, x, y + 1000 * (step == 4))
                by_autograd_grad(model, loss, copied=copied)
                if torch.nn.utils.clip_grad_norm_(model.body.parameters(), 1.0) > 100:
                    left_out += 1
                    continue
                optimizer.step()
            assert left_out == 1

        compare(train, 0.1)


@on_ranks(2)
def a_gradient_set_by_hand_beside_those_of_backward_is_clipped_with_them() -> None:
    def train(model: Any, optimizer: Any, rows: slice) -> None:
        for step, (x, y) in enumerate(batches(7, rows)):
            optimizer.zero_grad()
            violation = model.body(x).mean() - 0.1
            (loss_of(model, x, y) + model.multiplier.detach()[0] * violation).backward()
            if step >= 3:  # of gradient ascent
                model.multiplier.grad = -5 * violation.detach().reshape(1)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()

    compare(train)


@on_ranks(2)
def reading_gradients_after_a_step_reduces_nothing() -> None:
    """So rank 0 alone may log their norm."""

    def train(model: Any, optimizer: Any, rows: slice) -> None:
        for x, y in batches(4, rows):
            loss_of(model, x, y).backward()
            optimizer.step()
            if hvd.rank() == 0:
                torch.nn.utils.get_total_norm([p.grad for p in model.body.parameters()])
            optimizer.zero_grad()

    compare(train)


@on_ranks(2)
def sums_that_stand_are_not_summed_again() -> None:
    def twice(model: Any, optimizer: Any, rows: slice) -> None:
        for x, y in batches(3, rows):
            (model.body(x) - y).square().sum().backward()
            optimizer.step()
            optimizer.step()
            model.zero_grad(set_to_none=False)  # zeros may stand

    compare(twice, 0.001, op=hvd.Sum)

    def decayed(model: Any, optimizer: Any, rows: slice) -> None:
        for x, y in batches(3, rows):
            loss_of(model, x, y).backward()
            optimizer.step()
            for p in model.body.parameters():
                p.grad.mul_(0.5)

    compare(decayed, 0.01)  # a mean of what all have alike is the same
    with raises(fd.InvalidArgument, "was already summed over the ranks"):
        compare(decayed, 0.001, op=hvd.Sum)


@on_ranks(2)
def gradients_of_different_steps_are_not_reduced_together() -> None:
    model = Net()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model.named_parameters()
    )
    with raises(fd.Mismatch, "gradients of different steps", "rank 0 after 1, rank 1 after 2"):
        for step, (x, y) in enumerate(batches(4, slice(None))):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            if step == 1 and hvd.rank() == 0:  # its batch has more
                loss_of(model, x, y).backward()
            optimizer.step()


# ---- parameters ----


@on_ranks(2)
def a_parameter_that_was_put_into_a_group_is_refused() -> None:
    for options in ({}, {"sharded_update": True}, {"op": hvd.Adasum}):
        model = Net()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.body.parameters(), 0.1), model.body.named_parameters(), **options
        )
        (x, y), *_ = batches(1, slice(None))
        loss_of(model, x, y).backward()
        optimizer.step()
        grown = nn.Parameter(torch.randn(4, 3))
        model.body[0].weight = optimizer.param_groups[0]["params"][0] = grown
        loss_of(model, x, y).backward()
        with raises(fd.InvalidArgument, "was put into the optimizer's param_groups"):
            optimizer.step()


@on_ranks(2)
def adasum_moves_parameters_that_are_unfrozen() -> None:
    model = Net()
    model.body[0].requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), op=hvd.Adasum
    )
    first = model.body[0].weight.detach().clone()
    for step, (x, y) in enumerate(batches(4, slice(EACH * hvd.rank(), EACH * (hvd.rank() + 1)))):
        if step == 2:
            model.body[0].requires_grad_(True)
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
    every = hvd.allgather(flat(model)[None])
    assert torch.equal(every, every[:1].expand_as(every))
    assert not torch.equal(model.body[0].weight, first)


@on_ranks(2)
def state_of_no_parameter_is_broadcast() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    optimizer.state["k"] = torch.tensor([hvd.rank() + 3])  # as MADGRAD's
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    assert optimizer.state["k"].tolist() == [4]


test_on_ranks = make_tests(__name__, "torch")
