"""DistributedOptimizer on groups of parameters, and on some of the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from rank_cases import make_tests, on_ranks
from torch import nn

import farandole as fd
import farandole.torch as hvd

WIDTH = 8


class Mixed(nn.Module):
    """Two dtypes, so that a group has buckets of both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH).double()
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(x).tanh().double()).tanh().float())


def buckets_of(optimizer: Any) -> list[list[str]]:
    exchange = optimizer._exchange
    names = dict(enumerate(exchange.names))  # but the flag's, which is the last
    return [
        [names[i] for i, _, _ in items if i in names] for _, _, items in exchange.reducer.buckets
    ]


def batch(step: int, ranks: int) -> torch.Tensor:
    return torch.randn(2 * ranks, WIDTH, generator=torch.Generator().manual_seed(step))


def train_against_serial(
    wrap: Callable[[Any, Any], Any], passes: int = 1, ranks: list[int] | None = None, **sgd: Any
) -> Any:
    """Four steps of these ranks equal those of one rank on their joined batches."""
    members = list(range(hvd.size())) if ranks is None else ranks
    model, whole = Mixed(), Mixed()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1, **sgd), model)
    reference = torch.optim.SGD(whole.parameters(), lr=0.1, **sgd)
    place = members.index(hvd.rank())
    for step in range(4):
        optimizer.zero_grad()
        reference.zero_grad()
        for k in range(passes):
            x = batch(step * passes + k, len(members))
            model(x[2 * place : 2 * place + 2]).square().mean().backward()
            whole(x).square().mean().backward()
        optimizer.step()
        reference.step()
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    return optimizer


# -- groups -----------------------------------------------------------------------------------


@on_ranks(2, 3)
def listed_groups_train_as_one_rank_does() -> None:
    def wrap(optimizer: Any, model: Any) -> Any:
        groups = [[model.first.weight, model.second.weight, model.last.bias], [model.first.bias]]
        return hvd.DistributedOptimizer(optimizer, model.named_parameters(), groups=groups)

    optimizer = train_against_serial(wrap)
    buckets = [set(names) for names in buckets_of(optimizer)]
    assert {"second.weight"} in buckets, "its dtype is another"
    assert {"first.weight", "last.bias"} in buckets
    assert {"first.bias"} in buckets
    assert {"last.weight"} in buckets, "in no group"


@on_ranks(2)
def numbers_of_groups_split_the_parameters_evenly() -> None:
    for groups, expected in (
        (1, 2),  # both dtypes of all
        (2, 4),  # first.* with second.weight; second.bias with last.*
        (4, 4),  # each layer's, and the last one's singly
        (100, 6),
        (0, 2),
    ):

        def wrap(optimizer: Any, model: Any, groups: int = groups) -> Any:
            return hvd.DistributedOptimizer(
                optimizer,
                model.named_parameters(),
                groups=groups,
                bucket_bytes=1 << 30,
                first_bucket_bytes=1 << 30,
            )

        found = buckets_of(train_against_serial(wrap))
        assert sorted(n for names in found for n in names) == sorted(
            dict(Mixed().named_parameters())
        )
        assert len(found) == expected, (groups, found)
    with pytest.deprecated_call():
        train_against_serial(lambda optimizer, _: hvd.DistributedOptimizer(optimizer, num_groups=2))


@on_ranks(2)
def groups_work_with_everything_else() -> None:
    for options in (
        {"backward_passes_per_step": 2, "gradient_predivide_factor": 4.0},
        {"backward_passes_per_step": 2, "in_place_bytes": 64},
        {"backward_passes_per_step": 2, "overlap": False},
    ):
        train_against_serial(
            lambda o, m, options=options: hvd.DistributedOptimizer(  # type: ignore[misc]
                o, m.named_parameters(), groups=[list(m.parameters())[::2]], **options
            ),
            passes=2,
            momentum=0.9,
        )


@on_ranks(2)
def frozen_parameters_leave_their_group() -> None:
    model = Mixed()
    model.first.weight.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), groups=[list(model.first.parameters())]
    )
    model(batch(0, 1)).sum().backward()
    optimizer.step()


@on_ranks(2)
def different_groups_are_named() -> None:
    model = Mixed()
    parameters = list(model.parameters())
    with pytest.raises(fd.Mismatch, match=r"'last.bias' .*group 0.* on rank 0; 'last.bias' \(4 x"):
        hvd.DistributedOptimizer(
            torch.optim.SGD(parameters, lr=0.1),
            model.named_parameters(),
            groups=[parameters[-1:]] if hvd.rank() == 0 else [],
        )


@on_ranks(1, 2)
def adasum_and_sharded_updates_reduce_everything_together_anyway() -> None:
    model = Mixed()
    for options in ({"op": hvd.Adasum}, {"sharded_update": True}):
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), groups=2, **options
        )
        model(batch(0, 1)).sum().backward()
        optimizer.step()


# -- some of the ranks -------------------------------------------------------------------------


@on_ranks(3)
def members_of_a_process_set_reduce_among_themselves() -> None:
    ends = hvd.add_process_set([0, 2])
    alone = hvd.rank() == 1
    for options in (
        {},
        {"gradient_predivide_factor": 2.0},
        {"groups": 2},
        {"bucket_bytes": 0},
    ):
        train_against_serial(
            lambda o, m, options=options: hvd.DistributedOptimizer(  # type: ignore[misc]
                o, m.named_parameters(), process_set=ends, **options
            ),
            ranks=[1] if alone else [0, 2],
        )
    assert hvd.remove_process_set(ends)


@on_ranks(4)
def disjoint_sets_train_side_by_side() -> None:
    sets = [hvd.add_process_set([0, 1]), hvd.add_process_set([2, 3])]
    mine = sets[hvd.rank() // 2]
    train_against_serial(
        lambda o, m: hvd.DistributedOptimizer(o, m.named_parameters(), process_set=mine),
        ranks=mine.ranks,
    )
    for each in sets:
        hvd.remove_process_set(each)


@on_ranks(3)
def one_model_may_belong_to_all_and_another_to_some() -> None:
    """As where layers are shared by some ranks: two optimizers in one backward."""
    pair = hvd.add_process_set([1, 2])
    torch.manual_seed(0)
    body, head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.SGD(body.parameters(), lr=0.1)),
        hvd.DistributedOptimizer(torch.optim.SGD(head.parameters(), lr=0.1), process_set=pair),
    ]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        head(body(batch(step, 3)[hvd.rank() :: 3])).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    bodies = hvd.allgather(body.weight.detach()[None])
    heads = hvd.allgather(head.weight.detach()[None])
    assert torch.equal(bodies[0], bodies[1])
    assert torch.equal(bodies[0], bodies[2])
    assert torch.equal(heads[1], heads[2])
    assert not torch.equal(heads[0], heads[1])
    hvd.remove_process_set(pair)


@on_ranks(3)
def a_disagreement_in_a_set_concerns_its_members_alone() -> None:
    pair = hvd.add_process_set([0, 2])
    model = nn.Linear(WIDTH, 4 + hvd.rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if hvd.rank() == 1:
        hvd.DistributedOptimizer(optimizer, process_set=pair)
    else:
        with pytest.raises(fd.Mismatch, match=r"on rank 0; .* on rank 2"):
            hvd.DistributedOptimizer(optimizer, process_set=pair)
    hvd.barrier()
    hvd.remove_process_set(pair)


@on_ranks(2)
def what_needs_all_ranks_refuses_a_set() -> None:
    alone = hvd.add_process_set([0])
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    for options in ({"op": hvd.Adasum}, {"sharded_update": True}):
        with pytest.raises(fd.InvalidArgument, match=r"process_set=.*not supported here"):
            hvd.DistributedOptimizer(optimizer, process_set=alone, **options)
    hvd.remove_process_set(alone)


@on_ranks(3)
def objects_travel_within_a_set() -> None:
    pair = hvd.add_process_set([0, 2])
    if hvd.rank() != 1:
        got = hvd.broadcast_object({"from": hvd.rank()}, root_rank=2, process_set=pair)
        assert got == {"from": 2}
    hvd.remove_process_set(pair)


test_on_ranks = make_tests(__name__, "torch")
