"""Sparse gradients: what DistributedOptimizer makes of them equals training on one rank."""

from __future__ import annotations

import functools
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch_work
from rank_cases import make_tests, on_ranks
from torch import nn

import farandole as fd
import farandole.torch as hvd

ROWS, WIDTH = 12, 4


class Words(nn.Module):
    """Two tables and a dense layer; `second` is looked up when `both`."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.table = nn.Embedding(ROWS, WIDTH, sparse=True, dtype=dtype)
        self.second = nn.Embedding(ROWS, WIDTH, sparse=True, dtype=dtype)
        self.head = nn.Linear(WIDTH, 3, dtype=dtype)

    def forward(self, words: torch.Tensor, both: bool = True) -> torch.Tensor:
        x = self.table(words)
        if both:
            x = x + self.second(words + 1)
        return self.head(x.tanh())


def words_of(step: int, rank: int) -> torch.Tensor:
    """Ranks share some rows and not others, and look some up twice."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, ROWS - 1, (5,), generator=generator)


wrap = functools.partial(torch_work.wrap, lr=0.5, momentum=0.0)


def loss_of(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
    return model(words).square().mean()


def against_serial(passes: int = 1, tolerance: float = 1e-5, **options: Any) -> Any:
    """Five steps of gradients and weights equal those of one rank on all words."""
    model, whole = Words(), Words()
    optimizer = wrap(model, **options)
    reference = torch.optim.SGD(whole.parameters(), lr=0.5)
    factor = hvd.size() if options.get("op") == hvd.Sum else 1
    for step in range(5):
        optimizer.zero_grad()
        reference.zero_grad()
        if tolerance > 1e-5:
            whole.load_state_dict(model.state_dict())
        for k in range(passes):
            loss_of(model, words_of(10 * step + k, hvd.rank())).backward()
            every = torch.cat([words_of(10 * step + k, r) for r in range(hvd.size())])
            (loss_of(whole, every) * factor).backward()
        for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            assert p.grad.is_sparse == (name.startswith(("table", "second"))), name
            torch.testing.assert_close(
                p.grad.to_dense(), q.grad.to_dense(), rtol=tolerance, atol=tolerance
            )
        optimizer.step()
        reference.step()
    for p in model.parameters():
        everyones = hvd.allgather(p.detach()[None])
        assert all(torch.equal(p, other) for other in everyones), "the same bits"
    return optimizer


@on_ranks(2, 3, 4)
def sparse_gradients_are_averaged_with_dense_ones() -> None:
    optimizer = against_serial()
    reducer = optimizer._exchange.reducer
    names = optimizer._exchange.names
    assert {names[i] for i in reducer.left_out} == {"table.weight", "second.weight"}
    assert sum(n for _, _, items in reducer.buckets for _, _, n in items) == WIDTH * 3 + 4
    assert "2 sparse ones apart" in reducer.describe()


@on_ranks(2, 3)
def sparse_gradients_are_summed() -> None:
    against_serial(op=hvd.Sum)


@on_ranks(2)
def sparse_gradients_go_with_every_option() -> None:
    against_serial(passes=2, backward_passes_per_step=2)
    against_serial(gradient_predivide_factor=4.0)
    against_serial(in_place_bytes=32)
    against_serial(bucket_bytes=0, overlap=False)
    against_serial(groups=2, passes=2, backward_passes_per_step=2, gradient_predivide_factor=2.0)
    against_serial(compression=hvd.Compression.fp16, tolerance=1e-2)
    against_serial(passes=2)  # two means of two passes


@on_ranks(3)
def sparse_gradients_stay_in_their_process_set() -> None:
    pair = hvd.add_process_set([0, 2])
    model = Words()
    optimizer = wrap(model, process_set=pair)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, words_of(step, hvd.rank())).backward()
        if hvd.rank() != 1:
            assert model.table.weight.grad is not None
            rows = set(model.table.weight.grad.coalesce().indices()[0].tolist())
            assert rows == {*words_of(step, 0).tolist(), *words_of(step, 2).tolist()}
        optimizer.step()
    everyones = hvd.allgather(model.table.weight.detach()[None])
    assert torch.equal(everyones[0], everyones[2])
    assert not torch.equal(everyones[0], everyones[1])
    hvd.remove_process_set(pair)


@on_ranks(2, 3)
def sparse_gradients_reduced_as_dense_ones_come_back_sparse() -> None:
    optimizer = against_serial(sparse_as_dense=True)
    assert optimizer._exchange.reducer.left_out == {}
    against_serial(sparse_as_dense=True, in_place_bytes=32, op=hvd.Sum)
    against_serial(sparse_as_dense=True, passes=2, backward_passes_per_step=2)
    against_serial(sparse_as_dense=True, compression=hvd.Compression.fp16, tolerance=1e-2)


@on_ranks(2)
def a_table_of_one_rank_reduced_as_a_dense_one_is_sparse_on_all() -> None:
    model = Words()
    optimizer = wrap(model, sparse_as_dense=True)
    for users in ([0], [], [0, 1], [1]):
        optimizer.zero_grad()
        model.second.sparse = hvd.rank() == 0 or users == [1]  # dense ones are taken, too
        model(words_of(1, hvd.rank()), both=hvd.rank() in users).sum().backward()
        grad = model.second.weight.grad
        assert (grad is None) == (not users), users
        assert grad is None or grad.is_sparse
        optimizer.step()


@on_ranks(2, 3)
def sparse_optimizers_step_alike() -> None:
    for options in {}, {"sparse_as_dense": True}:
        check_sparse_adam(options)


def check_sparse_adam(options: dict[str, bool]) -> None:
    model, whole = nn.Embedding(ROWS, WIDTH, sparse=True), nn.Embedding(ROWS, WIDTH, sparse=True)
    hvd.broadcast_parameters(model.state_dict(), 0)
    whole.load_state_dict(model.state_dict())
    plain = torch.optim.SparseAdam(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(plain, **options)  # type: ignore[arg-type]
    reference = torch.optim.SparseAdam(whole.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        reference.zero_grad()
        model(words_of(step, hvd.rank())).square().mean().backward()
        every = torch.cat([words_of(step, r) for r in range(hvd.size())])
        whole(every).square().mean().backward()
        optimizer.step()
        reference.step()
    torch.testing.assert_close(model.weight, whole.weight)


@on_ranks(2)
def a_table_that_some_ranks_do_not_use_is_reduced_on_all() -> None:
    """Also where it is first used later than others, and where no rank uses it."""
    model = Words()
    optimizer = wrap(model)
    for users in ([], [0], [1], [], [0, 1], [0]):
        optimizer.zero_grad()
        model(words_of(1, hvd.rank()), both=hvd.rank() in users).sum().backward()
        grad = model.second.weight.grad
        assert (grad is None) == (not users), users
        if grad is not None:
            rows = {int(w) + 1 for r in users for w in words_of(1, r)}
            assert set(grad.coalesce().indices()[0].tolist()) == rows
        optimizer.step()


@on_ranks(2)
def no_sync_accumulates_and_zeroed_gradients_stay() -> None:
    model = nn.Embedding(ROWS, 1, sparse=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        with optimizer.no_sync():
            model(torch.tensor([hvd.rank()])).sum().backward()
        model(torch.tensor([2])).sum().backward()
        assert model.weight.grad is not None
        assert model.weight.grad.to_dense()[:3].flatten().tolist() == [0.5, 0.5, 1.0]
        optimizer.step()


@on_ranks(2)
def sums_of_sparse_gradients_are_not_summed_again() -> None:
    model = nn.Embedding(ROWS, 1, sparse=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Sum)
    for _ in range(3):
        model(torch.tensor([1])).sum().backward()
        with pytest.raises(fd.InvalidArgument, match="summed again"):
            model(torch.tensor([1])).sum().backward()
        optimizer.zero_grad()


def check_layout_error(model: nn.Module, optimizer: Any, sparse: bool) -> None:
    optimizer.zero_grad()
    model.sparse = sparse  # type: ignore[assignment]
    with pytest.raises(fd.Mismatch) as caught:
        model(torch.tensor([hvd.rank()])).sum().backward()
    text = str(caught.value)
    assert "different layouts of 'weight'" in text
    assert "dense on rank 0" in text
    assert "sparse in 1 dimensions on ranks 1-2" in text
    assert model.weight.grad is None


@on_ranks(3)
def a_gradient_sparse_here_and_dense_there_is_an_error_on_every_rank() -> None:
    model = nn.Embedding(ROWS, WIDTH, sparse=True)
    optimizer = wrap(model)
    for _ in range(2):  # the first step, and one in which sparse ones are known to be so
        check_layout_error(model, optimizer, sparse=hvd.rank() > 0)
        model.sparse = True
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.tensor([hvd.rank()])).sum().backward()
            assert model.weight.grad is not None
            torch.testing.assert_close(
                model.weight.grad.to_dense()[: hvd.size()],
                torch.full((hvd.size(), WIDTH), 1 / hvd.size()),
            )
    model.sparse = False
    optimizer.zero_grad()
    with pytest.raises(fd.InvalidArgument, match="was sparse in earlier steps and is dense now"):
        model(torch.tensor([1])).sum().backward()


@on_ranks(2, 3)
def a_backward_that_raises_never_poisons_the_next() -> None:
    model = Words()
    optimizer = wrap(model)
    for step in range(6):
        optimizer.zero_grad()
        mine = step % 2 == 1 and hvd.rank() == 0
        words = words_of(step, hvd.rank())
        # The dense layer's and the second table's gradients come before the failure.
        x = torch_work.failing(model.table(words), mine) + model.second(words)
        loss = model.head(x).square().mean()
        if step % 2 == 0:
            loss.backward()
            everyones = hvd.allgather(model.table.weight.grad.to_dense()[None])  # type: ignore[union-attr]
            assert torch.equal(everyones[0], everyones[-1])
            assert everyones[0].abs().sum() > 0
            optimizer.step()
        else:
            expected = ZeroDivisionError if mine else fd.RemoteError
            with pytest.raises(expected):
                loss.backward()


@on_ranks(2)
def two_optimizers_with_tables_share_a_backward() -> None:
    tables = [nn.Embedding(ROWS, WIDTH, sparse=True) for _ in range(2)]
    optimizers = [wrap(table) for table in tables]
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        words = words_of(step, hvd.rank())
        order = tables if hvd.rank() == 0 else tables[::-1]
        x = torch.zeros(())
        for k, table in enumerate(order):
            x = (x + table(words)).tanh() * (k + 1)
        x.sum().backward()
        for table in tables:
            assert table.weight.grad is not None
            both = hvd.allgather(table.weight.grad.to_dense()[None])
            assert torch.equal(both[0], both[1])


@on_ranks(2)
def a_scaler_skips_on_all_ranks() -> None:
    model = nn.Embedding(ROWS, WIDTH, sparse=True)
    optimizer = wrap(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(4):
        optimizer.zero_grad()
        before = model.weight.detach().clone()
        bad = step == 2 and hvd.rank() == 1
        loss = model(words_of(step, hvd.rank())).sum() * (float("inf") if bad else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, model.weight) == (step == 2)


@on_ranks(2, 3)
def a_rank_that_has_joined_has_no_entries() -> None:
    """Rank 0 has more batches than the others."""
    x = torch.sparse_coo_tensor([[1, 2]], [3.0, 6.0], (4,), check_invariants=True)
    hvd.sparse_allreduce_async(x, "together", op=hvd.Sum)()
    if hvd.rank() == 0:
        total = hvd.sparse_allreduce_async(x, "late", op=hvd.Sum)().to_dense()
        assert total.tolist() == [0.0, 3.0, 6.0, 0.0]
        mean = hvd.sparse_allreduce_async(x, "late mean")().to_dense()
        torch.testing.assert_close(mean, x.to_dense() / hvd.size())
    assert 0 <= hvd.join() < hvd.size()


@on_ranks(3)
def sparse_tensors_are_reduced_in_a_process_set() -> None:
    pair = hvd.add_process_set([0, 2])
    if hvd.rank() != 1:
        x = torch.sparse_coo_tensor([[hvd.rank()]], [4.0], (3,), check_invariants=True)
        mean = hvd.sparse_allreduce_async(x, "x", process_set=pair)().to_dense()
        assert mean.tolist() == [2.0, 0.0, 2.0]
    hvd.remove_process_set(pair)


test_on_ranks = make_tests(__name__, "torch")
