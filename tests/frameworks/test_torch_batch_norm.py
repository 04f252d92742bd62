"""SyncBatchNorm on some ranks against BatchNorm over the joined batch."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from rank_cases import make_tests, on_ranks, raises, refused
from torch import nn

import farandole as fd
import farandole.torch as hvd

CHANNELS = 3
# Rows of each rank: equal, uneven, one rank without any.
ROWS = [[4, 4, 4, 4], [5, 1, 3, 2], [0, 4, 2, 3]]
SHAPES: list[tuple[int, ...]] = [(), (7,), (4, 5), (2, 3, 2)]


def plain(rest: tuple[int, ...]) -> type[nn.Module]:
    return [nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d][len(rest)]


def parts(rows: list[int], rest: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """Every rank's batch; far from zero, where a naive variance goes wrong."""
    generator = torch.Generator().manual_seed(11)
    return [
        (torch.randn(n, CHANNELS, *rest, generator=generator, dtype=torch.float64) * 2 + 50).to(
            dtype
        )
        for n in rows[: hvd.size()]
    ]


def randomize(layer: Any) -> None:
    generator = torch.Generator().manual_seed(5)
    if layer.affine:
        with torch.no_grad():
            for p in (layer.weight, layer.bias):
                p.copy_(torch.rand(CHANNELS, generator=generator) + 0.5)


def close(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> None:
    rtol, atol = (1e-9, 1e-9) if dtype == torch.float64 else (2e-4, 2e-4)
    torch.testing.assert_close(a, b.to(a.dtype), rtol=rtol, atol=atol)


def check(rows: list[int], rest: tuple[int, ...], dtype: torch.dtype, **options: Any) -> None:
    """Two steps of both layers: outputs, gradients, running statistics."""
    mine = hvd.SyncBatchNorm(CHANNELS, **options).to(dtype)
    whole = plain(rest)(CHANNELS, **options).to(torch.float64)
    randomize(mine)
    randomize(whole)
    begin = sum(rows[: hvd.rank()])
    for step in range(2):
        batches = [batch + step for batch in parts(rows, rest, dtype)]
        x = batches[hvd.rank()].clone().requires_grad_()
        joined = torch.cat(batches).double().requires_grad_()
        weights = torch.randn(joined.shape, generator=torch.Generator().manual_seed(step))
        mine.zero_grad()
        whole.zero_grad()
        out, expected = mine(x), whole(joined)
        here = slice(begin, begin + len(x))
        assert out.dtype == dtype
        close(out, expected[here], dtype)
        (out * weights[here].to(dtype)).sum().backward()
        (expected * weights.double()).sum().backward()
        close(x.grad, joined.grad[here], dtype)
        if options.get("affine", True):
            # Each rank has its part of the parameters' gradients.
            for p, q in ((mine.weight, whole.weight), (mine.bias, whole.bias)):
                close(hvd.allreduce(p.grad, op=hvd.Sum), q.grad, dtype)
    if options.get("track_running_stats", True):
        close(mine.running_mean, whole.running_mean, dtype)
        close(mine.running_var, whole.running_var, dtype)
        assert int(mine.num_batches_tracked) == 2


@on_ranks(1, 2, 3, 4)
def it_equals_batch_norm_over_the_joined_batch() -> None:
    for rows in ROWS if hvd.size() > 1 else ROWS[:2]:
        for rest in SHAPES:
            check(rows, rest, torch.float64)
    check(ROWS[1], (4, 5), torch.float32)


@on_ranks(2)
def its_options_mean_what_they_mean_in_torch() -> None:
    for options in (
        {"affine": False},
        {"track_running_stats": False},
        {"momentum": None},
        {"momentum": 0.7, "eps": 0.1},
    ):
        check(ROWS[1], (4, 5), torch.float64, **options)


@on_ranks(2)
def halves_are_computed_in_float32() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        batches = [batch - 50 for batch in parts(ROWS[1], (4, 5), torch.float64)]
        layer = hvd.SyncBatchNorm(CHANNELS)  # parameters in float32, as under autocast
        x = batches[hvd.rank()].to(dtype).requires_grad_()
        out = layer(x)
        assert out.dtype == dtype
        expected = nn.BatchNorm2d(CHANNELS)(torch.cat([b.to(dtype).float() for b in batches]))
        begin = sum(ROWS[1][: hvd.rank()])
        torch.testing.assert_close(
            out.float(), expected[begin : begin + len(x)], rtol=0.02, atol=0.02
        )
        out.float().square().sum().backward()
        assert x.grad is not None
        assert x.grad.dtype == dtype


@on_ranks(2, 3)
def all_ranks_have_the_same_statistics_to_the_bit() -> None:
    layer = hvd.SyncBatchNorm(CHANNELS)
    layer(parts(ROWS[1], (4, 5), torch.float32)[hvd.rank()])
    for statistic in (layer.running_mean, layer.running_var):
        everyones = hvd.allgather(statistic.unsqueeze(0))
        assert all(torch.equal(row, statistic) for row in everyones)


@on_ranks(2)
def eval_mode_exchanges_nothing() -> None:
    layer, whole = hvd.SyncBatchNorm(CHANNELS), nn.BatchNorm2d(CHANNELS)
    layer.eval()
    whole.eval()
    if hvd.rank() == 0:  # one rank alone
        x = parts(ROWS[0], (4, 5), torch.float32)[0]
        assert torch.equal(layer(x), whole(x))
    hvd.barrier()


@on_ranks(2)
def the_first_layer_needs_no_gradient_of_its_input() -> None:
    layer = hvd.SyncBatchNorm(CHANNELS)
    layer(parts(ROWS[0], (), torch.float32)[hvd.rank()]).square().sum().backward()
    assert layer.weight.grad is not None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.norm = nn.BatchNorm2d(CHANNELS, eps=0.01, momentum=0.3)
        self.inner = nn.Sequential(nn.BatchNorm2d(CHANNELS, affine=False), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(self.norm(self.conv(x)))
        return result


@on_ranks(1, 2)
def a_converted_model_keeps_its_parameters_and_trains_as_the_whole() -> None:
    torch.manual_seed(2)
    model, whole = Block(), Block()
    whole.load_state_dict(model.state_dict())
    before = dict(model.named_parameters())
    converted = hvd.convert_sync_batchnorm(model)
    assert converted is model
    assert {n: id(p) for n, p in model.named_parameters()} == {n: id(p) for n, p in before.items()}
    assert model.state_dict().keys() == whole.state_dict().keys()
    assert [type(m) for m in (model.norm, model.inner[0])] == [hvd.SyncBatchNorm] * 2
    assert (model.norm.eps, model.norm.momentum, model.inner[0].affine) == (0.01, 0.3, False)
    assert hvd.convert_sync_batchnorm(model).norm is model.norm
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    plain_optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    for _ in range(3):
        batches = parts(ROWS[0], (4, 5), torch.float32)
        optimizer.zero_grad()
        model(batches[hvd.rank()] - 50).square().mean().backward()
        optimizer.step()
        plain_optimizer.zero_grad()
        whole(torch.cat(batches) - 50).square().mean().backward()
        plain_optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, whole.state_dict()[name], rtol=2e-3, atol=2e-4)


class Activated(nn.BatchNorm2d):
    """A layer of a program's own."""

    def __init__(self, slope: float) -> None:
        super().__init__(CHANNELS)
        self.slope = slope

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.leaky_relu(super().forward(input), self.slope)


class ByItself(nn.BatchNorm2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, self.training
        )


@on_ranks(2, 3)
def a_converted_layer_keeps_what_its_class_adds_hooks_and_attributes() -> None:
    batches = [batch - 50 for batch in parts(ROWS[1], (4, 5), torch.float64)]
    begin = sum(ROWS[1][: hvd.rank()])
    whole = Activated(0.25).double()
    layer = copy.deepcopy(whole)
    seen: list[str] = []
    layer.register_forward_hook(lambda *_: seen.append("after"))
    layer.register_forward_pre_hook(lambda *_: seen.append("before"))
    # The same layer twice, under two names of one module.
    model = hvd.convert_sync_batchnorm(nn.ModuleDict({"one": layer, "other": layer}))
    assert model["one"] is model["other"] is layer
    assert isinstance(layer, hvd.SyncBatchNorm)
    assert isinstance(layer, Activated)
    out, expected = layer(batches[hvd.rank()]), whole(torch.cat(batches))
    assert seen == ["before", "after"]
    close(out, expected[begin : begin + len(out)], torch.float64)
    close(layer.running_var, whole.running_var, torch.float64)
    del layer._forward_hooks, layer._forward_pre_hooks  # of lambdas, which nothing pickles
    layer._forward_hooks, layer._forward_pre_hooks = OrderedDict(), OrderedDict()
    for each in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(each) is type(layer)
        assert each.slope == 0.25
        close(each(batches[hvd.rank()]), out, torch.float64)
    layer.eval()
    whole.eval()
    close(layer(batches[0]), whole(batches[0]), torch.float64)


@on_ranks(2)
def a_layer_that_normalizes_by_itself_is_refused() -> None:
    layer = hvd.convert_sync_batchnorm(ByItself(CHANNELS))
    x = parts(ROWS[0], (4, 5), torch.float32)[0]
    refused(lambda: layer(x), "ByItself normalizes by itself")
    layer.eval()
    layer(x)

    class Derived(nn.SyncBatchNorm):
        pass

    model = nn.Sequential(nn.BatchNorm1d(3), Derived(3))
    refused(lambda: hvd.convert_sync_batchnorm(model), "Derived is derived from torch.nn.Sync")
    assert type(model[0]) is nn.BatchNorm1d


@on_ranks(2)
def torchs_own_synchronized_layer_is_converted_too() -> None:
    layer = nn.SyncBatchNorm(CHANNELS).eval()
    converted = hvd.convert_sync_batchnorm(layer)
    assert type(converted) is hvd.SyncBatchNorm
    assert not converted.training


@on_ranks(2)
def bad_input_is_refused_and_the_next_call_works() -> None:
    layer = hvd.SyncBatchNorm(CHANNELS)
    refused(lambda: layer(torch.ones(CHANNELS)), "shape [3] is not")
    refused(lambda: layer(torch.ones(2, 4, 5)), "is not (N, 3, …)")
    one = torch.ones(1 if hvd.rank() == 0 else 0, CHANNELS)
    with raises(ValueError, "all ranks together have 1 values per channel"):
        layer(one)
    refused(
        lambda: hvd.convert_sync_batchnorm(nn.LazyBatchNorm1d()),
        "run the model once",
    )
    other = hvd.SyncBatchNorm(CHANNELS + hvd.rank())
    with raises(fd.Mismatch, "statistics"):
        other(torch.randn(4, CHANNELS + hvd.rank()))
    check(ROWS[1], (), torch.float64)


test_on_ranks = make_tests(__name__, "torch")
