"""farandole.torch.Pipeline: the weights and losses of one process, from stages on several ranks."""

from __future__ import annotations

import copy
import doctest
import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from rank_cases import make_tests, numerics, on_ranks, raises, told
from torch import nn
from torch.nn import functional

import farandole as fd
import farandole.torch as hvd

N, CLOSE = 26, 1e-5
_random = torch.Generator().manual_seed(5)
X, Y = (torch.rand(shape, generator=_random) for shape in ((N, 6), (N, 1)))


def net(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Sequential(nn.Linear(8, 9), nn.ReLU(inplace=True)),
        nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 1),
    )  # fmt: skip


def batches(size: int = 12) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """By default, batches of 12, 12 and 2 samples."""
    return list(zip(X.split(size), Y.split(size), strict=True))


def train(step: Callable[[Any, Any], Any], optimizer: Any, clip: Any = None) -> list[float]:
    losses = []
    for x, y in batches() * 2:
        optimizer.zero_grad()
        losses.append(float(step(x, y)))
        if clip is not None:
            losses.append(float(clip(0.05)))
        optimizer.step()
    return losses


def serial(model: nn.Module, clip: bool = False) -> list[float]:
    def step(x: Any, y: Any) -> Any:
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        return loss.detach()

    clipping = partial(nn.utils.clip_grad_norm_, list(model.parameters())) if clip else None
    return train(step, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), clipping)


def equal(got: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert list(got) == list(right)
    for name, tensor in right.items():
        assert torch.allclose(got[name], tensor, atol=CLOSE, rtol=0), name


def check(clip: bool = False, model: Any = None, **options: Any) -> hvd.Pipeline:
    reference = net()
    pipeline = hvd.Pipeline(
        net(1 + 7 * hvd.rank() * (model is not None)) if model is None else model,
        **({"loss_fn": functional.mse_loss} | options),
    )
    if model is not None:
        pipeline.load_state_dict(reference.state_dict())
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1, momentum=0.9)
    losses = train(pipeline.step, optimizer, pipeline.clip_grad_norm_ if clip else None)
    assert losses == pytest.approx(serial(reference, clip), abs=CLOSE)
    equal(pipeline.state_dict(root_rank=None), dict(reference.state_dict()))
    whole = float(pipeline.evaluate(X, Y))
    with torch.no_grad():
        right = reference(X)
    assert whole == pytest.approx(float(functional.mse_loss(right, Y)), abs=CLOSE)
    assert torch.allclose(pipeline.predict(X), right, atol=CLOSE, rtol=0)
    return pipeline


@on_ranks(1)
def examples_in_docstrings() -> None:
    results = doctest.testmod(importlib.import_module("farandole.torch.pipeline"))
    assert results.failed == 0
    assert results.attempted > 0


@on_ranks(1, 2, 3, 4)
def the_weights_and_losses_of_one_process() -> None:
    for schedule in ("gpipe", "1f1b"):
        pipeline = check(schedule=schedule, micro_batches=5)
    assert pipeline.stages == hvd.size()
    for row in pipeline.report().ranks:
        assert row.in_flight == pipeline.stages - row.stage


@on_ranks(4)
def replicas_share_each_batch() -> None:
    pipeline = check(stages=2, micro_batches=3, clip=True)
    assert (pipeline.replicas, pipeline.replica) == (2, hvd.rank() // 2)


# ---- layers ----


@on_ranks(2, 4)
def a_rank_makes_its_own_layers_alone() -> None:
    """And they begin with the same values, wherever they are."""
    made: list[int] = []

    def linear(number: int, *sizes: int) -> nn.Module:
        layer = nn.Linear(*sizes)
        if not layer.weight.is_meta:
            made.append(number)
        return layer

    def factories() -> list[Any]:
        return [
            partial(linear, 0, 6, 8),
            nn.Tanh,
            partial(linear, 2, 8, 8),
            partial(linear, 3, 8, 1),
        ]

    before = torch.random.get_rng_state()
    pipeline = hvd.Pipeline(factories(), stages=2, loss_fn=functional.mse_loss, split=[2])
    assert torch.equal(torch.random.get_rng_state(), before)
    assert made == ([2, 3] if pipeline.stage else [0])
    whole = pipeline.state_dict(root_rank=None)
    assert list(whole) == [f"{i}.{k}" for i in (0, 2, 3) for k in ("weight", "bias")]
    other = hvd.Pipeline(factories(), stages=1).state_dict(root_rank=None)
    equal(other, whole)
    with torch.device("meta"):
        on_meta = nn.Sequential(*(each() for each in factories()))
    third = hvd.Pipeline(on_meta, stages=2, split=[1]).state_dict(root_rank=None)
    assert all(torch.equal(third[key], whole[key]) for key in whole)
    total = sum(r.parameter_bytes for r in pipeline.report().ranks if r.replica == 0)
    assert total == 4 * sum(each.numel() for each in whole.values())


class Fork(nn.Module):
    """One tensor to several, some of which have no gradient."""

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"x": (x.t().contiguous().t(), x.detach() > 0), "rest": [x * 2, x * 3, None]}


class Join(nn.Module):
    def forward(self, tree: dict[str, Any]) -> torch.Tensor:
        x, positive = tree["x"]
        twice, _, nothing = tree["rest"]
        assert nothing is None
        assert positive.dtype == torch.bool
        return torch.where(positive, x, x * 0.1) + twice


def compare_gradients(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    x: Any,
    y: Any,
    **options: Any,
) -> None:
    """Compares loss and gradients of one step with those of the model in one process."""
    reference = copy.deepcopy(model)
    right = loss_fn(reference(x), y)
    right.backward()
    pipeline = hvd.Pipeline(copy.deepcopy(model), loss_fn=loss_fn, **options)
    assert float(pipeline.step(x, y)) == pytest.approx(float(right.detach()), abs=CLOSE)
    wanted = dict(reference.named_parameters())
    for name, p in pipeline.named_parameters():
        theirs = wanted[name].grad
        if theirs is None:
            assert p.grad is None, name
        else:
            assert p.grad is not None, name
            assert torch.allclose(p.grad, theirs, atol=CLOSE, rtol=0), name


@on_ranks(2, 4)
def several_tensors_between_stages() -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 5), Fork(), Join(), nn.Linear(5, 1))
    points = [2] if hvd.size() == 2 else [1, 2, 3]
    compare_gradients(model, functional.mse_loss, X, Y, micro_batches=4, split=points)


@on_ranks(2)
def stages_without_gradients() -> None:
    """The first is frozen, and sends no gradients on; halves of the mantissa travel, too."""
    model = net()
    for p in model[:3].parameters():
        p.requires_grad_(False)
    compare_gradients(model, functional.mse_loss, X, Y, split=[4])
    for schedule in ("gpipe", "1f1b"):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pipeline = hvd.Pipeline(
                net(), loss_fn=functional.mse_loss, split=[4], schedule=schedule
            )
            right = functional.mse_loss(net()(X), Y).detach()
            assert float(pipeline.step(X, Y)) == pytest.approx(float(right), abs=1e-3)


# ---- losses ----


def padded(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """0/0 where nothing counts."""
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=-1)


@on_ranks(2, 4)
def a_mean_over_what_counts() -> None:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Embedding(5, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 5))
    tokens = torch.randint(5, (7, 3), generator=torch.Generator().manual_seed(2))
    targets = torch.where(torch.arange(21).view(7, 3) % 4 > 1, tokens, -1)
    targets[2] = -1  # of a micro-batch of one sample
    options = {"stages": 2, "micro_batches": 7 // (hvd.size() // 2)}
    compare_gradients(model, padded, tokens, targets, count=lambda y: (y != -1).sum(), **options)
    compare_gradients(model, padded_sum, tokens, targets, reduction="sum", **options)
    with raises(fd.InvalidArgument if hvd.rank() % 2 else fd.RemoteError, "count() is 0"):
        pipeline = hvd.Pipeline(model, loss_fn=padded, count=lambda y: (y != -1).sum(), **options)
        pipeline.step(tokens, torch.full_like(targets, -1))


def padded_sum(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(
        outputs.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum"
    )


@on_ranks(3)
def ranks_need_only_what_they_compute_on() -> None:
    pipeline = hvd.Pipeline(net(), loss_fn=functional.mse_loss, micro_batches=4)
    x = X if pipeline.is_first_stage else None
    y = Y if pipeline.is_last_stage else None
    with torch.no_grad():
        outputs = net()(X)
    right = float(functional.mse_loss(outputs, Y))
    assert float(pipeline.step(x, y)) == pytest.approx(right, abs=CLOSE)
    assert float(pipeline.evaluate(x, y)) == pytest.approx(right, abs=CLOSE)
    assert torch.allclose(pipeline.predict(x), outputs, atol=CLOSE)


# ---- where stages begin, what they take ----


class Slow(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(300):
            x = x * 1.0
        return x


@on_ranks(2)
def stages_are_balanced_by_what_layers_cost() -> None:
    layers = [nn.Linear(6, 600), nn.Linear(600, 6), nn.Linear(6, 6), nn.Tanh(), Slow(), Slow()]
    layers += [nn.Linear(6, 1)]
    for split, first in [("parameters", 1), ("layers", 3), ("time", 5), ([2], 2)]:
        example = X[:2] if hvd.rank() == 0 else None
        pipeline = hvd.Pipeline(layers, split=split, example=example)
        assert pipeline.report().ranks[0].layers == (0, first - 1), split


@on_ranks(4)
def a_report_says_how_long_ranks_were_idle() -> None:
    pipeline = hvd.Pipeline(
        [nn.Linear(6, 6), Slow(), nn.Linear(6, 6), Slow()], loss_fn=functional.mse_loss,
        stages=2, micro_batches=3, split=[2], schedule="gpipe",
    )  # fmt: skip
    assert "not measured yet" in str(pipeline.report())
    for _ in range(4):
        pipeline.step(X, X)
    told = pipeline.report(reset=True)
    assert (told.steps, told.stages, told.replicas, told.micro_batches) == (3, 2, 2, 3)
    assert told.bubble == pytest.approx(1 / 4)
    assert told.seconds > 0
    assert told.idle == pytest.approx(sum(r.idle for r in told.ranks) / 4)
    for row in told.ranks:
        assert row == told.ranks[row.rank]
        assert 0 < row.idle < 1
        assert row.in_flight == 3
        assert row.parameter_bytes == 4 * (6 * 6 + 6)
        # For the 5 samples of a micro-batch: the input, and the outputs of both layers.
        assert row.activation_bytes == 3 * 4 * (3 * 5 * 6)
    assert "bubble 25.0% of a step in theory" in str(told)
    assert hvd.allgather_object(told) == [told] * 4
    assert pipeline.report().steps == 0


# ---- state ----


@on_ranks(2)
def the_state_is_that_of_one_process() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1, dtype=torch.float64))
    right = copy.deepcopy(model.state_dict())
    pipeline = hvd.Pipeline(model, split=[2])
    whole = pipeline.state_dict(root_rank=1)
    assert (whole == {}) == (hvd.rank() == 0)
    if whole:
        equal(whole, right)
    changed = {key: value + 1 for key, value in right.items()}
    assert pipeline.load_state_dict(changed) == ([], [])
    equal(pipeline.state_dict(root_rank=None), changed)
    del changed["2.bias"]
    with raises(fd.InvalidArgument, "missing ['2.bias'], unexpected ['more']"):
        pipeline.load_state_dict(changed | {"more": torch.ones(2)})
    result = pipeline.load_state_dict(changed, strict=False)
    assert result.missing_keys == ["2.bias"]
    if pipeline.stage == 0:
        with raises(fd.InvalidArgument, "size mismatch for 0.weight"):
            pipeline.load_state_dict(right | {"0.weight": torch.ones(2)})
    with raises(fd.InvalidArgument, "root_rank is 2"):
        pipeline.state_dict(root_rank=2)


@on_ranks(2, 3)
def the_optimizers_state_is_that_of_one_process() -> None:
    """Saved on stages, it goes on in one process, and the other way round."""

    def sgd(model: Any) -> torch.optim.Optimizer:
        weights = [p for n, p in model.named_parameters() if n.endswith("weight")]
        others = [p for n, p in model.named_parameters() if n.endswith("bias")]
        return torch.optim.Adam(
            [{"params": weights, "weight_decay": 0.1}, {"params": others}], 0.05
        )

    def step(model: Any) -> Any:
        def stepped(x: Any, y: Any) -> Any:
            loss = functional.mse_loss(model(x), y)
            loss.backward()
            return loss.detach()

        return stepped

    pipeline, alone = hvd.Pipeline(net(), loss_fn=functional.mse_loss), net()
    optimizer, right = sgd(pipeline), sgd(alone)
    for begins_alone in (False, True):
        if begins_alone:
            for group in right.param_groups:
                group["lr"] = 0.01
            train(step(alone), right)
            pipeline.load_state_dict(alone.state_dict())
            pipeline.load_optimizer_state_dict(optimizer, copy.deepcopy(right.state_dict()))
        else:
            train(pipeline.step, optimizer)
            alone.load_state_dict(pipeline.state_dict(root_rank=None))
            right.load_state_dict(pipeline.optimizer_state_dict(optimizer, root_rank=None))
        losses = train(pipeline.step, optimizer)
        assert losses == pytest.approx(train(step(alone), right), abs=CLOSE)
        equal(pipeline.state_dict(root_rank=None), alone.state_dict())
        assert optimizer.param_groups[0]["lr"] == (0.01 if begins_alone else 0.05)
    state = pipeline.optimizer_state_dict(optimizer)
    assert (state == {}) == (hvd.rank() > 0)
    state = right.state_dict()
    for call, *words in [
        (lambda: pipeline.load_optimizer_state_dict(optimizer, {}), "it is an optimizer's state"),
        (
            lambda: pipeline.load_optimizer_state_dict(
                optimizer, torch.optim.SGD(alone.parameters()).state_dict()
            ),
            "is of groups of [8] parameters, and those of all stages are [4, 4]",
        ),
        (lambda: pipeline.optimizer_state_dict(3), "optimizer is 3"),
    ]:
        with raises(fd.InvalidArgument, *words):
            call()
    optimizer.param_groups[1]["lr"] += hvd.rank()
    with raises(fd.InvalidArgument, "optimizers of stages differ in 'lr' of group 1: 0.01 and"):
        pipeline.optimizer_state_dict(optimizer)


@on_ranks(2, 4)
def a_gradient_that_is_not_finite_is_told_on_all_ranks() -> None:
    """One of the last stage's first replica; ranks are 2 stages of 1 or 2 replicas."""

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("nan") if hvd.rank() == 1 and armed else gradient

    for how in "warn", "error":
        armed = False
        with numerics(how):
            pipeline = hvd.Pipeline(
                net(), loss_fn=functional.mse_loss, stages=2, micro_batches=2, split=[3]
            )
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
        last = list(pipeline.parameters())[-1]
        last.register_hook(spoil)

        def step(pipeline: Any = pipeline, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            pipeline.step(X[:12], Y[:12])
            optimizer.step()

        before = fd.nonfinite_steps()
        step()
        assert fd.nonfinite_steps() == before
        armed = True
        if how == "warn":
            with told(int(hvd.rank() in (0, 1))) as texts:
                step()
            assert all("rank 1 has a gradient that is NaN in step 2: '5.bias'" in t for t in texts)
        else:
            with raises(fd.NumericsError, "rank 1 has a gradient that is NaN in step 2: '5.bias'"):
                step()
            armed = False
            step()
            assert all(bool(p.isfinite().all()) for p in pipeline.parameters())
        assert fd.nonfinite_steps() == before + 1


test_on_ranks = make_tests(__name__, "torch")
