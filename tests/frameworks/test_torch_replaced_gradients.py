"""Programs that replace what p.grad refers to train as they do in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from rank_cases import make_tests, on_ranks, refused
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import farandole.torch as hvd

STEPS = 4
Change = Callable[[nn.Module], object]


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def assign_data(model: nn.Module) -> None:
    for g in gradients(model):
        g.data = g.data * 0.5


def assign_gradients(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = None if p.grad is None else p.grad * 0.5


def set_storage(model: nn.Module) -> None:
    for g in gradients(model):
        g.set_(g * 0.5)


def transpose_twice(model: nn.Module) -> None:
    """The tensor keeps its address; only its strides change."""
    for g in gradients(model):
        g.t_()
        g.data = g.t().contiguous()


def share_gradients(model: nn.Module) -> None:
    for g in gradients(model):
        g.share_memory_()


# Linear, so that they do to each rank's own gradient what they do to the mean; not in place.
LOCAL: dict[str, Change] = {
    "p.grad.data = ...": assign_data,
    "p.grad = ...": assign_gradients,
    "p.grad.share_memory_()": share_gradients,
}


def clamp_data(model: nn.Module) -> None:
    for g in gradients(model):
        g.data = g.data.clamp(-0.01, 0.01)


CHANGES: dict[str, Change] = LOCAL | {
    "p.grad.set_()": set_storage,
    "p.grad.t_()": transpose_twice,
    "clamp": clamp_data,
    "half and back": lambda model: model.half().float(),
    "double and back": lambda model: model.double().float(),
    "share_memory": lambda model: model.share_memory(),
}


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def batch(step: int) -> torch.Tensor:
    return torch.randn(hvd.size(), 2, 3, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, optimizer: Any, change: Change, when: range, part: Any) -> None:
    """Two passes a step, so that gradients also stand before a backward."""
    for step in range(STEPS):
        optimizer.zero_grad()
        for i in range(2):
            model(batch(2 * step + i)[part]).square().mean().backward()
            if i == 0 and step in when:
                with torch.no_grad():
                    assign_data(model)  # before they are reduced; linear
        if step in when:
            change(model)
        optimizer.step()


def check(change: Change, when: range, **options: Any) -> None:
    model, whole = net(), net()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        backward_passes_per_step=2,
        **options,
    )
    train(model, optimizer, change, when, hvd.rank())
    train(whole, torch.optim.SGD(whole.parameters(), lr=0.1), change, when, slice(None))
    tolerance = 1e-2 if "compression" in options else 1e-6
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=tolerance)


OPTIONS: list[dict[str, Any]] = [
    {}, {"groups": 1}, {"in_place_bytes": 0}, {"compression": hvd.Compression.fp16},
]  # fmt: skip


@on_ranks(2, 3)
def replaced_gradients_train_as_in_one_process() -> None:
    for name, change in CHANGES.items():
        for options in OPTIONS:
            when = range(1, 2) if options else range(STEPS)
            try:
                check(change, when, **options)
            except AssertionError as error:
                raise AssertionError(f"{name} in steps {when} with {options}") from error


@on_ranks(2, 3)
def gradients_of_a_sharded_update_that_only_move_train_as_in_one_process() -> None:
    for when in (range(STEPS), range(1, 2)):
        check(share_gradients, when, sharded_update=True)


def flatten(model: nn.Module) -> None:
    """The program's own buffer holds all parameters from now on."""
    model.flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    begin = 0
    for p in model.parameters():
        p.data = model.flat[begin : begin + p.numel()].view(p.shape)
        begin += p.numel()


BETWEEN: dict[str, Change] = CHANGES | {
    "p.data = ...": flatten,
    "zeros": lambda model: [g.zero_() for g in gradients(model)],
}


def train_changing_between(
    model: nn.Module, optimizer: Any, change: Change, part: Any, clears: bool
) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    for step in range(STEPS):
        change(model)
        if step:
            optimizer.zero_grad(set_to_none=clears)
        model(batch(step)[part]).square().mean().backward()
        optimizer.step()


@on_ranks(2, 3)
def gradients_and_parameters_replaced_between_sharded_steps_train_as_in_one_process() -> None:
    for name, change in BETWEEN.items():
        for clears in (True, False):
            model, whole = net(), net()
            reference = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
            sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            optimizer = hvd.DistributedOptimizer(sgd, sharded_update=True)
            train_changing_between(model, optimizer, change, hvd.rank(), clears)
            train_changing_between(whole, reference, change, slice(None), clears)
            # A weight that differs by its last bit may become another number of 16 bits.
            tolerance = 1e-3 if name == "half and back" else 1e-6
            for p, q in zip(model.parameters(), whole.parameters(), strict=True):
                torch.testing.assert_close(p, q, rtol=0, atol=tolerance, msg=name)
            if change is flatten:
                held = torch.cat([p.detach().flatten() for p in model.parameters()])
                assert torch.equal(model.flat, held)


@on_ranks(2)
def a_parameter_that_was_moved_in_a_sharded_step_is_updated_where_it_lies() -> None:
    """After backward, and while another process may look at it."""
    model, whole = net(), net()
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), sharded_update=True
    )
    reference = torch.optim.SGD(whole.parameters(), lr=0.1)
    for step in range(3):
        for each, by, part in ((model, optimizer, hvd.rank()), (whole, reference, slice(None))):
            by.zero_grad()
            each(batch(step)[part]).square().mean().backward()
            if step == 1:
                each.share_memory()
            by.step()
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        assert p.is_shared()
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6)


@on_ranks(2)
def gradients_of_another_shape_are_refused_by_a_sharded_update() -> None:
    model = net()
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), sharded_update=True
    )
    bias = dict(model.named_parameters())["2.bias"]
    bias.grad = torch.ones(1)
    bias.grad.set_()
    refused(model(batch(0)[0]).sum().backward, "has shape (0,), and its parameter has (1,)")
    optimizer.zero_grad()


@on_ranks(2)
def a_lazily_negated_gradient_is_stepped_with_by_its_sign() -> None:
    for sharded in (False, True):
        p = nn.Parameter(torch.ones(2))
        optimizer: Any = hvd.DistributedOptimizer(
            torch.optim.SGD([p], lr=1.0), sharded_update=sharded
        )
        p.grad = torch.tensor([1 + 2j, 3 + 4j]).conj().imag
        optimizer.step()
        assert p.tolist() == [3.0, 5.0]


# Ways to write into a gradient that PyTorch does not count as changes of the tensor.
UNCOUNTED: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "p.grad.data": lambda grad, g: grad.data.copy_(g),
    "p.grad.view(-1).data": lambda grad, g: grad.view(-1).data.copy_(g.view(-1)),
    "p.grad.numpy()": lambda grad, g: np.copyto(grad.numpy(), g.numpy()),
    "p.grad.detach()": lambda grad, g: np.copyto(grad.detach().numpy(), g.numpy()),
}


def train_by_hand(
    model: nn.Module, optimizer: Any, way: Any, part: Any, clips: float, backwards: int
) -> None:
    """The first `backwards` steps are ordinary ones. With clipping, one of them is left out."""
    parameters = list(model.parameters())
    for step in range(STEPS + 2):
        factor = 1000 if clips and step == STEPS else 1
        loss = model(factor * batch(step)[part]).square().mean()
        if step < backwards:
            optimizer.zero_grad()
            loss.backward()
        else:
            for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                way(p.grad, g)
        if clips and nn.utils.clip_grad_norm_(parameters, clips) > 20:
            assert step == STEPS
            continue
        optimizer.step()


@on_ranks(2, 3)
def gradients_written_uncounted_are_reduced_before_they_are_read() -> None:
    for name, way in UNCOUNTED.items():
        for clips, backwards in ((0.0, 0), (0.1, 0), (0.1, 2)):
            for options in ({}, {"in_place_bytes": 0}, {"op": hvd.Sum}):
                if clips and "op" in options:
                    continue  # ranks clip a sum otherwise than a mean
                model, whole = net(), net()
                rate = 0.05 / hvd.size() if "op" in options else 0.05
                sgd = torch.optim.SGD(model.parameters(), lr=rate)
                optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), **options)
                train_by_hand(model, optimizer, way, hvd.rank(), clips, backwards)
                reference = torch.optim.SGD(whole.parameters(), lr=0.05)
                train_by_hand(whole, reference, way, slice(None), clips, backwards)
                for p, q in zip(model.parameters(), whole.parameters(), strict=True):
                    message = f"{name}, clips={clips}, backwards={backwards}, {options}"
                    torch.testing.assert_close(p, q, rtol=0, atol=1e-6, msg=message)


def fit(model: nn.Module, change: Change, **options: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    whole = torch.cat([batch(step).flatten(0, 1) for step in range(STEPS)])
    loader = DataLoader(TensorDataset(whole), batch_size=len(whole) // STEPS)
    batches: Any = hvd.GlobalBatch(loader, model, optimizer, **options) if options else loader
    for (x,) in batches:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        (batches.scale_loss(loss) if options else loss).backward()
        change(model)
        optimizer.step()


@on_ranks(2)
def replaced_gradients_of_a_global_batch_train_as_in_one_process() -> None:
    for change in CHANGES.values():
        model, whole = net(), net()
        fit(whole, change)
        fit(model, change, micro_batch_size=2)
        for p, q in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=1e-6)


def clamp_in_place(p: torch.Tensor) -> None:
    assert p.grad is not None
    p.grad.clamp_(-0.01, 0.02)


@on_ranks(2)
def hooks_registered_after_wrapping_change_gradients_before_they_are_reduced() -> None:
    for options in ({}, {"in_place_bytes": 0}, {"sharded_update": True}, {"bucket_bytes": 0}):
        model, whole = net(), net()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **options
        )
        reference = torch.optim.SGD(whole.parameters(), lr=0.1)
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(clamp_in_place)
        for step in range(3):
            model(batch(step)[hvd.rank()]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            means = [torch.zeros_like(p) for p in whole.parameters()]
            for part in batch(step):
                whole.zero_grad()
                whole(part).square().mean().backward()
                for mean, g in zip(means, gradients(whole), strict=True):
                    mean += g.clamp(-0.01, 0.02) / hvd.size()
            for p, mean in zip(whole.parameters(), means, strict=True):
                p.grad = mean
            reference.step()
        for p, q in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=1e-6)


@on_ranks(2)
def a_hook_may_clear_a_gradient() -> None:
    """The hook is on one parameter, or on all parameters."""
    for cleared in (["0.weight"], ["0.weight", "0.bias", "2.weight", "2.bias"]):
        for sharded in (False, True):
            model, whole = net(), net()
            for each in (model, whole):
                for name, p in each.named_parameters():
                    if name in cleared:
                        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), sharded_update=sharded
            )
            reference = torch.optim.SGD(whole.parameters(), lr=0.1)
            for step in range(3):
                model(batch(step)[hvd.rank()]).square().mean().backward()
                whole(batch(step)).square().mean().backward()
                for each in (optimizer, reference):
                    each.step()
                    each.zero_grad()
            for p, q in zip(model.parameters(), whole.parameters(), strict=True):
                torch.testing.assert_close(p, q, rtol=0, atol=1e-6)


test_on_ranks = make_tests(__name__, "torch")
