"""Clipping and loss scaling of gradients that backward has not reduced: as in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from rank_cases import make_tests, on_ranks
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import farandole.torch as hvd

STEPS = 4
OVERFLOWS = 2  # in this step


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def batch(step: int) -> torch.Tensor:
    return 3 * torch.randn(hvd.size(), 2, 3, generator=torch.Generator().manual_seed(step))


class Training:
    """Trains one model on `part` of each batch. The last rank's part of a batch may overflow."""

    def __init__(self, part: Any, overflows: bool, **options: Any) -> None:
        self.model, self.part, self.overflows = net(), part, overflows
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, fused=options.pop("fused", 0))
        whole = isinstance(part, slice)
        self.optimizer: Any = optimizer if whole else hvd.DistributedOptimizer(optimizer, **options)
        self.norms: list[torch.Tensor] = []

    def loss(self, step: int, i: int = 0) -> torch.Tensor:
        factor = torch.ones(hvd.size(), 1, 1)
        if self.overflows and step == OVERFLOWS:
            factor[-1] = torch.inf
        output = self.model(batch(2 * step + i)[self.part])
        return self.scaler.scale((output.square() * factor[self.part]).mean())

    def no_sync(self) -> Any:
        none = contextlib.nullcontext()
        return none if isinstance(self.part, slice) else self.optimizer.no_sync()


# Programs that leave gradients that no backward has reduced.


def window_ends_early(training: Training, step: int) -> None:
    training.loss(step).backward()


def last_pass_is_held(training: Training, step: int) -> None:
    for i in range(2):
        with training.no_sync():
            training.loss(step, i).backward()


def set_by_hand(training: Training, step: int) -> None:
    parameters = list(training.model.parameters())
    gradients = torch.autograd.grad(training.loss(step), parameters)
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient


def complete(training: Training, step: int) -> None:
    training.loss(step).backward()


UNREDUCED: dict[Callable[[Training, int], None], dict[str, Any]] = {
    window_ends_early: {"backward_passes_per_step": 3},
    last_pass_is_held: {},
    set_by_hand: {},
    complete: {},
}

# Functions that read them.


def scaler_steps(training: Training) -> None:
    training.scaler.step(training.optimizer)


def scaler_unscales(training: Training) -> None:
    training.scaler.unscale_(training.optimizer)
    training.scaler.step(training.optimizer)


def norm_is_clipped(training: Training) -> None:
    training.scaler.unscale_(training.optimizer)
    training.norms.append(clip_grad_norm_(training.model.parameters(), 0.1))
    training.scaler.step(training.optimizer)


def scaled_norm_is_clipped(training: Training) -> None:
    training.norms.append(clip_grad_norm_(list(training.model.parameters()), 0.1))
    training.scaler.step(training.optimizer)


def values_are_clipped(training: Training) -> None:
    clip_grad_value_(training.model.parameters(), 0.05)
    training.scaler.step(training.optimizer)


def norm_is_taken(training: Training) -> None:
    parameters = list(training.model.parameters())
    if not hasattr(torch.nn.utils, "get_total_norm"):  # before PyTorch 2.6
        values_are_clipped(training)
        return
    gradients = [p.grad for p in parameters if p.grad is not None]
    training.norms.append(torch.nn.utils.get_total_norm(gradients))
    torch.nn.utils.clip_grads_with_norm_(parameters, 0.1, training.norms[-1])
    training.scaler.step(training.optimizer)


READERS = [
    scaler_steps, scaler_unscales, norm_is_clipped, scaled_norm_is_clipped, values_are_clipped,
    norm_is_taken,
]  # fmt: skip


def check(
    leave: Callable[[Training, int], None], read: Callable[[Training], None], **options: Any
) -> None:
    overflows = options.pop("overflows")
    mine = Training(hvd.rank(), overflows, **options)
    whole = Training(slice(None), overflows, fused=options.get("fused", 0))
    for training in (mine, whole):
        for step in range(STEPS):
            leave(training, step)
            read(training)
            training.scaler.update()
            training.optimizer.zero_grad()
    assert mine.scaler.get_scale() == whole.scaler.get_scale()
    for norm, expected in zip(mine.norms, whole.norms, strict=True):
        torch.testing.assert_close(norm, expected, equal_nan=True)
    for p, q in zip(mine.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-5, equal_nan=True)


@on_ranks(2, 3)
def unreduced_gradients_are_reduced_before_they_are_read() -> None:
    for leave, options in UNREDUCED.items():
        for read in READERS:
            unscaled_last = read in (scaled_norm_is_clipped, values_are_clipped, norm_is_taken)
            for overflows in (False, True):
                if overflows and unscaled_last:  # clipping makes finite numbers of some
                    continue
                try:
                    check(leave, read, overflows=overflows, **options)
                except AssertionError as error:
                    what = f"{leave.__name__}, {read.__name__}, overflows={overflows}"
                    raise AssertionError(what) from error


@on_ranks(2)
def a_fused_optimizer_skips_on_every_rank() -> None:
    for leave, options in UNREDUCED.items():
        check(leave, scaler_steps, overflows=True, fused=True, **options)


@on_ranks(2)
def a_rank_without_a_gradient_clips_as_the_others() -> None:
    model, whole = net(), net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    reference = torch.optim.SGD(whole.parameters(), lr=0.1)
    for step in range(3):
        if hvd.rank() == 0:
            model(batch(step)[0]).square().mean().backward()
        whole(batch(step)[0]).square().mean().div(2).backward()
        for net_, o in ((model, optimizer), (whole, reference)):
            clip_grad_norm_(net_.parameters(), 0.01)
            o.step()
            o.zero_grad()
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6)


@on_ranks(2)
def a_norm_after_the_step_exchanges_nothing() -> None:
    model = net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(2):
        optimizer.zero_grad()
        model(batch(step)[hvd.rank()]).square().mean().backward()
        before = clip_grad_norm_(model.parameters(), torch.inf)
        optimizer.step()
        if hvd.rank() == 0:  # a log
            torch.testing.assert_close(clip_grad_norm_(model.parameters(), torch.inf), before)


@on_ranks(2)
def adasum_skips_on_every_rank_when_one_overflows() -> None:
    for fused in (False, True):
        training = Training(hvd.rank(), overflows=True, op=hvd.Adasum, fused=fused)
        for step in range(STEPS):
            before = [p.detach().clone() for p in training.model.parameters()]
            training.loss(step).backward()
            scaler_steps(training)
            training.scaler.update()
            training.optimizer.zero_grad()
            same = all(map(torch.equal, before, training.model.parameters()))
            assert same == (step == OVERFLOWS)
        assert training.scaler.get_scale() == 2.0


@on_ranks(2)
def clipping_can_be_compiled() -> None:
    model, whole = net(), net()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), backward_passes_per_step=3
    )
    reference = torch.optim.SGD(whole.parameters(), lr=0.1)
    clip = torch.compile(lambda ps: clip_grad_norm_(ps, 0.01), backend="eager")
    for step in range(3):
        model(batch(step)[hvd.rank()]).square().mean().backward()
        whole(batch(step)).square().mean().backward()
        for net_, o, by in ((model, optimizer, clip), (whole, reference, None)):
            parameters = list(net_.parameters())
            by(parameters) if by else clip_grad_norm_(parameters, 0.01)
            o.step()
            o.zero_grad()
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6)


test_on_ranks = make_tests(__name__, "torch")
