"""Adasum against its formula in numpy, and the optimizer that moves by it."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import numpy as np
import torch
from adasum_reference import numpys_adasum
from rank_cases import make_tests, on_ranks
from torch import nn

import farandole as fd
import farandole.torch as hvd
from farandole.torch.adasum import adasum, adasum_together, fold_rows


def leaf(shape: tuple[int, ...], rank: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(31 * rank + 1)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def expected(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    leaves = [leaf(shape, r, dtype).double().numpy() for r in range(hvd.size())]
    return torch.from_numpy(np.asarray(numpys_adasum(leaves)))


@on_ranks(1, 2, 3, 4, 5, 8)
def it_is_the_formula_along_the_canonical_tree() -> None:
    for shape in [(), (0,), (1,), (7,), (3, 5), (2, 0, 3), (1000,)]:
        x = leaf(shape, hvd.rank())
        kept = x.clone()
        torch.testing.assert_close(adasum(x, "x"), expected(shape), rtol=1e-12, atol=1e-12)
        assert torch.equal(x, kept)


@on_ranks(2, 3)
def every_floating_dtype_is_rounded_once() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        got = adasum(leaf((101,), hvd.rank(), dtype))
        assert got.dtype == dtype
        torch.testing.assert_close(got, expected((101,), dtype).to(dtype), rtol=1e-6, atol=1e-7)


@on_ranks(4)
def equal_tensors_give_themselves_and_orthogonal_ones_their_sum() -> None:
    ones = torch.ones(10, dtype=torch.float64)
    torch.testing.assert_close(adasum(ones), ones)
    axis = torch.zeros(4, dtype=torch.float64)
    axis[hvd.rank()] = 1
    torch.testing.assert_close(adasum(axis), torch.ones(4, dtype=torch.float64))


@on_ranks(3)
def a_zero_tensor_changes_nothing() -> None:
    x = torch.full((5,), 3.0) if hvd.rank() == 1 else torch.zeros(5)
    assert torch.equal(adasum(x), torch.full((5,), 3.0))
    assert torch.equal(adasum(torch.zeros(5)), torch.zeros(5))


@on_ranks(3, 4)
def tensors_together_are_folded_each_by_itself() -> None:
    shapes: list[tuple[int, ...]] = [(3,), (50, 2), (), (0,), (129,)]
    dtypes = [torch.float64, torch.float32, torch.float64, torch.float32, torch.float64]
    pairs = list(zip(shapes, dtypes, strict=True))
    got = adasum_together([leaf(shape, hvd.rank(), dtype) for shape, dtype in pairs])
    for result, (shape, dtype) in zip(got, pairs, strict=True):
        assert (result.shape, result.dtype) == (shape, dtype)
        torch.testing.assert_close(result.double(), expected(shape, dtype), rtol=1e-6, atol=1e-6)


@on_ranks(3)
def all_ranks_get_the_same_bits() -> None:
    result = adasum(leaf((333,), hvd.rank(), torch.float32))
    assert all(torch.equal(row, result) for row in hvd.allgather(result.unsqueeze(0)))


@on_ranks(2)
def what_cannot_be_folded_is_refused_and_the_next_call_works() -> None:
    with pytest.raises(fd.InvalidArgument, match=r"is of torch\.int64; Adasum takes floating"):
        adasum(torch.ones(3, dtype=torch.int64))
    with pytest.raises(fd.InvalidArgument, match="is sparse"):
        adasum(torch.ones(3, 3).to_sparse())
    with pytest.raises(fd.Mismatch, match=r"\[3\].*\[4\]"):
        adasum(torch.ones(3 + hvd.rank()), "x")
    assert torch.equal(adasum(torch.ones(3)), torch.ones(3))


def make() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def local_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


@on_ranks(1)
def rows_that_are_here_are_folded_alike() -> None:
    for count in range(1, 10):
        for shape in [(), (0,), (5,), (3, 4)]:
            rows = torch.stack([leaf(shape, r) for r in range(count)])
            kept = rows.clone()
            right = numpys_adasum([leaf(shape, r).numpy() for r in range(count)])
            got = fold_rows(rows)
            torch.testing.assert_close(got, torch.from_numpy(np.asarray(right)))
            assert torch.equal(rows, kept)
            half = fold_rows(rows.to(torch.bfloat16))
            assert (half.dtype, half.shape) == (torch.bfloat16, shape)


@on_ranks(1, 2, 3)
def the_optimizer_moves_by_the_adasum_of_all_moves() -> None:
    model = make()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        model.named_parameters(),
        op=hvd.Adasum,
    )
    assert isinstance(optimizer, torch.optim.SGD)
    assert type(optimizer).__name__ == "SGD"
    # The same, with every rank played here.
    plays = [make() for _ in range(hvd.size())]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in plays]
    for step in range(3):
        local_step(model, optimizer, batch(step, hvd.rank()))
        start = [p.detach().clone() for p in plays[0].parameters()]
        for rank, (play, theirs) in enumerate(zip(plays, optimizers, strict=True)):
            local_step(play, theirs, batch(step, rank))
        for i, old in enumerate(start):
            moves = [(list(m.parameters())[i].detach() - old).double().numpy() for m in plays]
            new = old + torch.from_numpy(np.asarray(numpys_adasum(moves))).float()
            with torch.no_grad():
                for play in plays:
                    list(play.parameters())[i].copy_(new)
    for p, q in zip(model.parameters(), plays[0].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def a_scheduler_that_was_made_before_does_not_keep_the_local_step() -> None:
    for before in (True, False):
        model = make()
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(plain, 0.9) if before else None
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), op=hvd.Adasum)
        scheduler = scheduler or torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for step in range(2):
            local_step(model, optimizer, batch(step, hvd.rank()))
            scheduler.step()
        weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        theirs = hvd.allgather(weights[None])
        assert torch.equal(theirs[0], theirs[1])


@on_ranks(2)
def moves_may_be_compressed_and_closures_work() -> None:
    model = make()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        compression=hvd.Compression.bf16,
        op=hvd.Adasum,
    )
    x = batch(0, hvd.rank())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        return loss

    first, second = optimizer.step(closure), optimizer.step(closure)
    assert float(second) < float(first)
    for p in model.parameters():
        rows = hvd.allgather(p.detach().unsqueeze(0))
        assert torch.equal(rows[0], rows[1])


@on_ranks(2)
def the_optimizer_refuses_what_it_cannot_do() -> None:
    model = make()

    def wrap(**options: Any) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return hvd.DistributedOptimizer(optimizer, op=hvd.Adasum, **options)

    with pytest.raises(fd.InvalidArgument, match="sharded_update"):
        wrap(sharded_update=True)
    with pytest.raises(fd.InvalidArgument, match="op=Average only"):
        wrap(gradient_predivide_factor=2.0)
    optimizer = wrap()
    optimizer.synchronize()
    with pytest.raises(fd.InvalidArgument, match="skip_synchronize"):
        optimizer.skip_synchronize()
    optimizer.set_backward_passes_per_step(2)
    with pytest.raises(fd.InvalidArgument, match="at least 1"):
        optimizer.set_backward_passes_per_step(0)
    with pytest.raises(fd.InvalidArgument, match="is a DistributedOptimizer already"):
        hvd.DistributedOptimizer(optimizer)


test_on_ranks = make_tests(__name__, "torch")
