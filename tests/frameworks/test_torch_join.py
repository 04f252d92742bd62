"""join(): ranks with fewer batches stand in, with zeros, for their part of the others' steps."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from rank_cases import begin_torch, make_tests, on_ranks
from torch import nn

import farandole as fd
import farandole.torch as hvd
from harness import World, listen, tell

WIDTH, ROWS = 8, 12


class Net(nn.Module):
    """Two dtypes, and a parameter that is used in some steps alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH).double()
        self.seldom = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor, seldom: bool = False) -> torch.Tensor:
        x = self.second(self.first(x).tanh().double()).tanh().float()
        return self.last(self.seldom(x) if seldom else x)


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(97 * step + rank))


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return model(batch(step, rank), seldom=step % 2 == 1).square().mean()


def same_everywhere(model: nn.Module) -> bool:
    return all(
        torch.equal(p, other)
        for p in model.parameters()
        for other in hvd.allgather(p.detach()[None])
    )


def train_and_join(
    batches: list[int],
    *,
    make: Callable[[], nn.Module] = Net,
    loss: Callable[[nn.Module, int, int], torch.Tensor] = loss_of,
    ranks: list[int] | None = None,
    passes: int = 1,
    factor: float | None = None,
    tolerance: float = 1e-5,
    momentum: float = 0.9,
    **options: Any,
) -> Any:
    """Rank r takes batches[r] steps and joins. Its weights are then those of one rank that took as
    many, with zeros for ranks that ended; and those of the last, once they have been broadcast."""
    members = ranks if ranks is not None else list(range(hvd.size()))
    model, whole = make(), make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)
    reference = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=momentum)
    weights = [copy.deepcopy(whole.state_dict())]
    for step in range(max(batches[r] for r in members)):
        reference.zero_grad()
        for r in members:
            if step < batches[r]:
                for k in range(passes):
                    part = loss(whole, step * passes + k, r)
                    (part * (factor if factor is not None else 1 / len(members))).backward()
        reference.step()
        weights.append(copy.deepcopy(whole.state_dict()))
    for step in range(batches[hvd.rank()]):
        optimizer.zero_grad()
        for k in range(passes):
            loss(model, step * passes + k, hvd.rank()).backward()
        optimizer.step()
    last = hvd.join()
    if ranks is None:
        assert batches[last] == max(batches)
    else:  # the last of all may be outside
        last = max(members, key=lambda r: batches[r])
    if hvd.rank() in members:
        for name, value in model.state_dict().items():
            expected = weights[batches[hvd.rank()]][name]
            torch.testing.assert_close(value, expected, rtol=tolerance, atol=tolerance)
    # And then goes on, all together.
    hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    hvd.broadcast_optimizer_state(optimizer, root_rank=last)
    optimizer.zero_grad()
    for k in range(passes):
        loss(model, 50 + k, hvd.rank()).backward()
    optimizer.step()
    if ranks is None:
        assert same_everywhere(model)
    return optimizer


@on_ranks(1)
def one_rank_joins_itself() -> None:
    train_and_join([2])


@on_ranks(2, 3, 4)
def ranks_train_on_while_others_have_joined() -> None:
    size = hvd.size()
    train_and_join([3 + 2 * r for r in range(size)])
    train_and_join([3 + 2 * (size - 1 - r) for r in range(size)])  # rank 0 comes last
    train_and_join([4] * size)  # nobody has to stand in


@on_ranks(2, 3)
def a_rank_joins_before_its_first_step() -> None:
    for present in range(hvd.size()):  # one rank trains, the others have nothing at all
        optimizer = train_and_join([5 if r == present else 0 for r in range(hvd.size())])
    assert "average byte launched" in optimizer._exchange.reducer.describe()  # the order is agreed


@on_ranks(2)
def joined_ranks_take_up_the_better_plan() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

        def forward(self, x: torch.Tensor, seldom: bool = False) -> torch.Tensor:  # noqa: ARG002
            for layer in reversed(self.layers):
                x = layer(x).tanh()
            return x

    for batches in ([0, 4], [4, 0]):
        optimizer = train_and_join(
            batches, make=Backwards, bucket_bytes=4 * WIDTH * WIDTH, first_bucket_bytes=0
        )
        reducer = optimizer._exchange.reducer
        first = reducer.buckets[0][2][0][0]
        assert optimizer._exchange.names[first].startswith("layers.0")
        assert len(set(hvd.allgather_object(reducer.describe()))) == 1


@on_ranks(2, 3)
def joining_goes_with_every_option() -> None:
    uneven = [2, 5, 3][: hvd.size()]
    train_and_join(uneven, op=hvd.Sum, factor=1.0)
    train_and_join(uneven, passes=2, backward_passes_per_step=2)
    train_and_join(uneven, gradient_predivide_factor=4.0)
    train_and_join(uneven, bucket_bytes=0, overlap=False)
    train_and_join(uneven, in_place_bytes=32)
    train_and_join(uneven, groups=2)
    train_and_join(uneven, compression=hvd.Compression.fp16, tolerance=1e-2)


@on_ranks(3)
def ranks_of_a_process_set_join() -> None:
    pair = hvd.add_process_set([0, 2])
    train_and_join([2, 9, 4], ranks=[0, 2], process_set=pair)
    train_and_join([5, 0, 0], ranks=[0, 2], process_set=pair)
    hvd.remove_process_set(pair)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.table = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(words).tanh())


def loss_of_words(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return model(torch.randint(0, ROWS, (5,), generator=generator)).square().mean()


@on_ranks(2, 3)
def joined_ranks_have_no_entries_of_sparse_gradients() -> None:
    for batches in ([0, 4, 2], [3, 1, 4]):
        train_and_join(batches[: hvd.size()], make=Words, loss=loss_of_words, momentum=0)


@on_ranks(2)
def two_optimizers_step_while_a_rank_has_joined() -> None:
    def train(batches: list[int], together: bool) -> None:
        models = [Net(), Net()]
        optimizers = [
            hvd.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=0.1), m.named_parameters())
            for m in models
        ]
        for step in range(batches[hvd.rank()]):
            for optimizer in optimizers:
                optimizer.zero_grad()
            losses = [loss_of(m, step, hvd.rank()) for m in models]
            if together:
                (losses[0] + losses[1]).backward()
            else:
                losses[step % 2].backward()  # the other one steps without a gradient
            for optimizer in optimizers:
                optimizer.step()
        last = hvd.join()
        for model in models:
            hvd.broadcast_parameters(model.state_dict(), root_rank=last)
            assert same_everywhere(model)

    train([1, 6], together=True)
    train([6, 1], together=False)


@on_ranks(2, 3)
def every_epoch_ends_with_a_join() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    for epoch in range(4):
        for step in range(1 + (hvd.rank() + epoch) % hvd.size()):
            optimizer.zero_grad()
            loss_of(model, step, hvd.rank()).backward()
            optimizer.step()
            hvd.allreduce(torch.ones(3), name="loss")  # by name, between the steps
        last = hvd.join()
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    assert same_everywhere(model)


@on_ranks(2)
def what_a_joined_rank_had_accumulated_is_dropped_by_a_step_of_others() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(
        optimizer, model.named_parameters(), backward_passes_per_step=2
    )
    for steps in (1, 0):
        optimizer.zero_grad()
        if hvd.rank() == 0:
            loss_of(model, 0, 0).backward()
        else:
            for _ in range(steps):
                loss_of(model, 0, 1).backward()
                loss_of(model, 1, 1).backward()
                optimizer.step()
        hvd.join()
        if hvd.rank() == 0:
            assert (model.first.weight.grad is None) == (steps > 0)


@on_ranks(3)
def an_abandoned_backward_concerns_those_who_train() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    if hvd.rank() != 0:
        for step in range(4):
            optimizer.zero_grad()
            broken = step in (0, 2) and hvd.rank() == 1
            x = batch(step, hvd.rank())
            if broken:
                x.requires_grad_()
                x.register_hook(lambda _: 1 / 0)
            expected = ZeroDivisionError if broken else fd.RemoteError
            loss = model(x).square().mean()
            if step in (0, 2):
                with pytest.raises(expected):
                    loss.backward()
            else:
                loss.backward()
                optimizer.step()
    assert hvd.join() > 0


@on_ranks(2)
def layouts_that_differ_are_refused_while_a_rank_has_joined() -> None:
    table = nn.Embedding(ROWS, WIDTH, sparse=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.1))
    if hvd.rank() == 1:
        table(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        table.sparse = False
        with pytest.raises(fd.InvalidArgument, match="was sparse in earlier steps"):
            table(torch.tensor([1, 2])).sum().backward()
        table.sparse = True
        table(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
    assert hvd.join() == 1


@on_ranks(2)
def an_optimizer_that_one_rank_has_dropped_does_not_hold_up_a_join() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    loss_of(model, 0, hvd.rank()).backward()
    optimizer.step()
    if hvd.rank() == 1:
        del optimizer
    hvd.join()


@on_ranks(3)
def objects_and_parameters_of_those_who_have_not_joined() -> None:
    for joined in range(3):
        me = hvd.rank()
        if me != joined:
            others = [r for r in range(3) if r != joined]
            assert hvd.allgather_object({"rank": me}) == [{"rank": r} for r in others]
            x = torch.full((2,), float(me))
            hvd.broadcast_parameters([x], root_rank=others[1])
            assert x.tolist() == [others[1]] * 2
            with pytest.raises(fd.Mismatch, match=f"rank {others[0]}: .*; rank {others[1]}: "):
                hvd.broadcast_parameters([torch.ones(2 + me)], root_rank=others[0])
        hvd.join()


@on_ranks(3)
def operations_have_gradients_while_a_rank_has_joined() -> None:
    for joined in range(3):
        me = hvd.rank()
        if me != joined:
            check_gradients(me, joined)
        hvd.join()


def check_gradients(me: int, joined: int) -> None:
    others = [r for r in range(3) if r != joined]

    def leaf(rows: int) -> torch.Tensor:
        return torch.ones(rows, 2, requires_grad=True)

    x = leaf(me + 1)
    factors = torch.arange(float(sum(r + 1 for r in others)))[:, None]
    (hvd.allgather(x, name="x") * factors).sum().backward()
    before = sum(r + 1 for r in others if r < me)
    expected = factors[before : before + me + 1] * 2 / 3  # the mean of two gradients and no third
    torch.testing.assert_close(x.grad, expected.expand(-1, 2))
    for op in (hvd.Sum, hvd.Average):
        x, y = leaf(5), leaf(2)
        a, b = hvd.grouped_reducescatter([x, y], "g", op=op)
        (a.sum() * (me + 1) + b.sum()).backward()
        factor = 3.0 if op == hvd.Sum else 1.0
        rows = [(r + 1) * factor if r != joined else 0.0 for r in (0, 0, 1, 1, 2)]
        torch.testing.assert_close(x.grad, torch.tensor(rows)[:, None].expand(-1, 2))
        z = leaf(5)
        (hvd.reducescatter(z, "z", op=op).sum() * (me + 1)).backward()
        assert torch.equal(z.grad, x.grad)
    x = leaf(6)
    rows, received = hvd.alltoall(x, [2, 2, 2], "t")
    assert received.tolist() == [0 if r == joined else 2 for r in range(3)]
    (rows.sum() * (me + 1)).backward()
    back = [0.0 if r == joined else r + 1.0 for r in (0, 0, 1, 1, 2, 2)]
    assert torch.equal(x.grad, torch.tensor(back)[:, None].expand(-1, 2))


test_on_ranks = make_tests(__name__, "torch")


# -- what ends badly --------------------------------------------------------------------------


def make_adasum(model: nn.Module) -> Any:
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Adasum)


def make_sharded(model: nn.Module) -> Any:
    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), sharded_update=True
    )


def make_late(model: nn.Module) -> Any:
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))


def normalize(_: nn.Module) -> Any:
    hvd.SyncBatchNorm(2)(torch.randn(4, 2))


def step_with_what_cannot_be_stood_in_for() -> list[str]:
    """A world for each, since it fails."""
    said = []
    for make in (make_adasum, make_sharded, make_late, normalize):
        hvd.init()
        model = Net()
        optimizer = make(model) if make in (make_adasum, make_sharded) else None
        try:
            if hvd.rank() != 1:
                optimizer = optimizer or make(model)
                loss_of(model, 0, hvd.rank()).backward()
                optimizer.step()
            hvd.join()
        except fd.Deadlock as error:
            said.append(f"{error.rank}: {error.verdict}")
        hvd.shutdown()
    return said


@pytest.mark.timeout(120)
def test_what_needs_more_than_zeros_is_refused_on_every_rank(spawn: Callable[..., World]) -> None:
    world = spawn(3, "torch", env={"FARANDOLE_WARN_AFTER": "0.5"})
    every = world.run(step_with_what_cannot_be_stood_in_for)
    assert every[0] == every[1] == every[2]
    assert len(every[0]) == 4
    assert all(text.startswith("1: rank 1 has joined and cannot take part") for text in every[0])


def train_until_killed(ends: str) -> None:
    begin_torch()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    tell("ready")
    listen()
    if hvd.rank() > 0:
        loss_of(model, 0, hvd.rank()).backward()
        optimizer.step()
        if hvd.rank() == 1:
            if ends == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            hvd.shutdown()
            return
        if ends == "killed":
            loss_of(model, 1, hvd.rank()).backward()
    hvd.join()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("ends", "error"), [("killed", "PeerLost"), ("left", "EarlyExit")])
def test_the_end_of_a_rank_that_trains_ends_the_join_of_others(
    spawn: Callable[..., World], ends: str, error: str
) -> None:
    world = spawn(3, "torch")
    world.start(train_until_killed, ends)
    world.hear_all()
    for rank in range(3):
        world.say(rank, "go")
    for outcome in world.outcomes([0, 2]):
        assert outcome.error == error, outcome.trace
        assert outcome.rank == 1
