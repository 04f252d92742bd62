"""farandole.torch.GlobalBatch(logical_ranks=G): what is refused, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from rank_cases import begin_torch, make_tests, on_ranks, raises
from test_torch_logical_ranks import PARTS, N, Spawn, X, Y, digest, loader, mlp, plain
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import farandole as fd
import farandole.torch as hvd


def made(**options: Any) -> tuple[nn.Module, Any, hvd.GlobalBatch]:
    torch.manual_seed(1)
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"logical_ranks": PARTS} | options
    return model, optimizer, hvd.GlobalBatch(loader(X, Y), model, optimizer, **options)


def goes_on(model: nn.Module, optimizer: Any, batches: hvd.GlobalBatch) -> None:
    for x, y in batches:
        batches.scale_loss(functional.mse_loss(model(x), y)).backward()
        if batches.sync_gradients:
            optimizer.step()
            optimizer.zero_grad()
    assert len(set(hvd.allgather_object(digest(model.state_dict())))) == 1


@on_ranks(3)
def what_would_make_bits_depend_on_ranks_is_refused() -> None:
    synchronized = hvd.convert_sync_batchnorm(mlp())
    for options, words in [
        ({"logical_ranks": 0}, "logical_ranks is 0; it is a whole number"),
        ({"logical_ranks": True}, "logical_ranks is True"),
        ({"logical_ranks": 2}, "logical_ranks=2 do not go on 3 ranks, but on 1, 2\n"),
        ({"compression": hvd.Compression.fp16}, "compression changes what each rank sends"),
        ({"gradient_predivide_factor": 2.0}, "gradient_predivide_factor changes"),
        ({"sharded_update": True}, "sharded_update=True"),
        ({"sparse_as_dense": True}, "sparse_as_dense=True"),
        ({"backward_passes_per_step": 2}, "takes no backward_passes_per_step"),
    ]:
        with raises(fd.InvalidArgument, words):
            made(**options)
    with raises(fd.InvalidArgument, "layer '1' normalizes over the samples of all ranks"):
        hvd.GlobalBatch(loader(X, Y), synchronized, logical_ranks=PARTS)
    model, optimizer, batches = made()
    with raises(fd.InvalidArgument, "no_sync() with logical_ranks"):
        optimizer.no_sync()
    with raises(fd.InvalidArgument, "logical_ranks=None, and the optimizer", "logical_ranks=4"):
        hvd.GlobalBatch(loader(X, Y), model, optimizer)
    state = batches.state_dict()
    with raises(fd.InvalidArgument, "logical_ranks was 8 and is 4 here"):
        batches.load_state_dict(state | {"logical_ranks": 8})
    del state["logical_ranks"]
    with raises(fd.InvalidArgument, "logical_ranks was None and is 4 here"):
        batches.load_state_dict(state)
    with raises(fd.Mismatch, "rank 0: logical_ranks=4; rank 1: logical_ranks=8"):
        hvd.GlobalBatch(loader(X, Y), logical_ranks=PARTS + 4 * (hvd.rank() == 1))
    goes_on(model, optimizer, batches)
    goes_on(model, optimizer, hvd.GlobalBatch(loader(X, Y), model, optimizer, logical_ranks=PARTS))


@on_ranks(1, 3)
def loops_that_are_wrong_are_refused_on_every_rank() -> None:
    """A rank with one part hears of it from the one that has several."""
    alone = hvd.size() == 1
    several = alone or hvd.rank() == 2

    def wrong(words: str, step: Callable[[Any, Any, Any, Any], None]) -> None:
        model, optimizer, batches = made()
        error = fd.InvalidArgument if several else fd.RemoteError
        with raises(error, words if several else "rank 2"):
            for x, y in batches:
                loss = functional.mse_loss(model(x), y)
                step(loss, model, optimizer, batches)
        optimizer.zero_grad()
        goes_on(model, optimizer, batches)

    def zeros(loss: Any, _: Any, optimizer: Any, batches: Any) -> None:
        optimizer.zero_grad()
        batches.scale_loss(loss).backward()

    def steps(loss: Any, _: Any, optimizer: Any, batches: Any) -> None:
        batches.scale_loss(loss).backward()
        optimizer.step()

    def sets(loss: Any, model: Any, _: Any, batches: Any) -> None:
        batches.scale_loss(loss).backward()
        if not batches.sync_gradients:
            for p in model.parameters():
                p.grad = torch.ones_like(p)

    def fails(loss: Any, model: Any, _: Any, batches: Any) -> None:
        if not batches.sync_gradients:
            loss = model[2](Fails.apply(model[1](model[0](X)))).mean()
        batches.scale_loss(loss).backward()

    stepped = []

    def fails_late(loss: Any, model: Any, optimizer: Any, batches: Any) -> None:
        """Some of its gradients have been sent."""
        if stepped and batches.sync_gradients and several:
            loss = model[2](Fails.apply(model[1](model[0](X)))).mean()
        ends_batch(loss, optimizer, batches)

    def comes_twice(loss: Any, model: Any, optimizer: Any, batches: Any) -> None:
        """As no backward before: what is sent already changes."""
        if stepped and batches.sync_gradients and several and not alone:
            x = X.clone().requires_grad_()
            both = [checkpoint(model[0], x, use_reentrant=True) for _ in range(2)]
            loss = model[2](both[0] + both[1]).mean()
        ends_batch(loss, optimizer, batches)

    def ends_batch(loss: Any, optimizer: Any, batches: Any) -> None:
        batches.scale_loss(loss).backward()
        if batches.sync_gradients:
            optimizer.zero_grad()
            stepped.append(True)

    wrong("zero_grad() in the middle of a global batch", zeros)
    wrong("step() in the middle of a global batch", steps)
    wrong("was set between two parts of a batch", sets)
    wrong("the backward of this part", fails)
    wrong("the backward of this part", fails_late)
    if not alone:
        stepped.clear()
        wrong("became ready twice in one step", comes_twice)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        del context
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        del context, gradient
        raise fd.InvalidArgument("the backward of this part")


@on_ranks(1, 2)
def a_backward_that_is_wrong_is_refused() -> None:
    model, optimizer, batches = made()

    def wrong(words: str, step: Callable[[Any], None]) -> None:
        with raises(fd.InvalidArgument, words):
            for x, y in batches:
                step(functional.mse_loss(model(x), y))
        optimizer.zero_grad()
        goes_on(model, optimizer, batches)

    def twice(loss: Any) -> None:
        batches.scale_loss(loss).backward(retain_graph=True)
        batches.scale_loss(loss).backward()

    wrong("a second backward() of one part", twice)
    wrong("batches.scale_loss(loss).backward()", lambda loss: loss.backward())
    with raises(fd.InvalidArgument, "outside of the loop"):
        model(X).sum().backward()
    optimizer.zero_grad()
    goes_on(model, optimizer, batches)

    table = nn.Embedding(5, 1, sparse=True)
    tables = torch.optim.SGD(table.parameters(), lr=0.1)
    rows = hvd.GlobalBatch(loader(torch.arange(N) % 5), table, tables, logical_ranks=2)
    with raises(fd.InvalidArgument, "the gradient of 'weight' is sparse"):
        for (numbers,) in rows:
            rows.scale_loss(table(numbers).mean()).backward()

    grows = Grows()
    with raises(fd.InvalidArgument, "buffer 'cache'", "while rank 0"):
        for x, _ in hvd.GlobalBatch(loader(X, Y), grows, logical_ranks=2):
            grows(x)


class Grows(nn.Module):
    cache: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache = torch.cat([self.cache, x[0, :1]])
        return x


def refused_as_fast() -> None:
    begin_torch()
    with raises(fd.InvalidArgument, "logical_ranks=4 with FARANDOLE_LEVEL=fast"):
        made()


def test_the_level_fast_is_refused(spawn: Spawn) -> None:
    spawn(1, "torch", env={"FARANDOLE_LEVEL": "fast"}).run(refused_as_fast)


test_on_ranks = make_tests(__name__, "torch")
