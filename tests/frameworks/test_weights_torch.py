"""Ranks that start from different weights, or come to have them: named on every rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from rank_cases import checking_weights, make_tests, on_ranks
from torch import nn
from torch.utils.data import DataLoader

import farandole as fd
import farandole.torch as hvd

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sharded": {"sharded_update": True},
    "adasum": {"op": hvd.Adasum},
    "halves": {"compression": hvd.Compression.fp16},
}


def make(seed: int = 3) -> nn.Sequential:
    """One weight is not contiguous."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(12, 2))
    return model.to(memory_format=torch.channels_last)


def wrap(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3), model.named_parameters(), **options
    )


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.full((1, 2, 3, 3), hvd.rank() + 1.0)).square().sum().backward()
    optimizer.step()


def refused(call: Callable[[], Any]) -> fd.Mismatch:
    with pytest.raises(fd.Mismatch) as caught:
        call()
    texts = hvd.allgather_object(str(caught.value))
    assert len(set(texts)) == 1, texts
    return caught.value


@on_ranks(2, 3)
def a_forgotten_broadcast_is_named_on_every_rank() -> None:
    for kind, options in KINDS.items():
        model = make(seed=hvd.rank())
        before = [p.detach().clone() for p in model.parameters()]
        optimizer = wrap(model, **options)
        error = refused(lambda: step(model, optimizer))  # noqa: B023
        assert error.tensor == "0.weight", kind
        assert error.field == "weights"
        assert sorted(r for ranks in error.values.values() for r in ranks) == [*range(hvd.size())]
        assert "4 of 4 weights differ" in error.verdict
        assert "hvd.broadcast_parameters(model.state_dict(), root_rank=0)" in error.advice
        for p, old in zip(model.parameters(), before, strict=True):
            assert torch.equal(p, old), kind


@on_ranks(2, 3)
def the_line_that_it_advises_is_the_cure() -> None:
    for options in KINDS.values():
        model = make(seed=hvd.rank())
        optimizer = wrap(model, **options)
        refused(lambda: step(model, optimizer))  # noqa: B023
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        for _ in range(3):
            step(model, optimizer)


@on_ranks(2, 3)
def one_bit_on_the_last_rank_is_enough() -> None:
    for options in KINDS.values():
        model = make()
        if hvd.rank() == hvd.size() - 1:
            bits = model[2].bias.data.view(torch.int32)
            bits[1] ^= 1
        error = refused(lambda: step(model, wrap(model, **options)))  # noqa: B023
        assert error.tensor == "2.bias"
        assert "1 of 4 weights differs" in error.verdict
        assert error.rank == (2 if hvd.size() == 3 else None)


@on_ranks(2)
def equal_weights_are_no_error_though_their_strides_differ_and_values_are_no_numbers() -> None:
    model = make()
    with torch.no_grad():
        model[2].weight[0, 0] = torch.nan
    if hvd.rank() == 1:
        model = model.to(memory_format=torch.contiguous_format)
    step(model, wrap(model))


@on_ranks(2)
def what_is_frozen_is_compared_and_statistics_are_not() -> None:
    model = nn.Sequential(make(), nn.BatchNorm1d(2))
    model[0][2].bias.requires_grad_(False)
    model[1].running_mean += hvd.rank()
    model.eval()
    step(model, wrap(model))
    model[0][2].bias += hvd.rank()
    assert refused(lambda: step(model, wrap(model))).tensor == "0.2.bias"


@on_ranks(2)
def nothing_is_compared_where_it_is_off() -> None:
    with checking_weights("off"):
        for options in KINDS.values():
            model = make(seed=hvd.rank())
            optimizer = wrap(model, **options)
            for _ in range(3):
                step(model, optimizer)


@on_ranks(2, 3)
def what_comes_apart_later_is_found_every_k_steps() -> None:
    with checking_weights("3"):
        for kind, options in KINDS.items():
            model = make()
            optimizer = wrap(model, **options)
            for _ in range(6):
                step(model, optimizer)
            if hvd.rank() == 1:
                model[2].bias.data[0] += 1
            error = refused(lambda: step(model, optimizer))  # noqa: B023
            assert error.tensor == "2.bias", kind
            assert "the same before step 4, and differ before step 7" in error.verdict


@on_ranks(2)
def later_steps_are_not_compared_unless_asked_for() -> None:
    model = make()
    optimizer = wrap(model)
    for _ in range(2):
        step(model, optimizer)
    model[2].bias.data[0] += hvd.rank()
    step(model, optimizer)


@on_ranks(2)
def ranks_that_update_apart_are_found_in_the_second_step() -> None:
    for kind, options in KINDS.items():
        model = make()
        optimizer = wrap(model, **options)
        step(model, optimizer)
        model[2].bias.data[0] += hvd.rank()
        error = refused(lambda: step(model, optimizer))  # noqa: B023
        assert "the same before step 1, and differ before step 2" in error.verdict, kind


SETTINGS: dict[str, Callable[[torch.optim.Optimizer], object]] = {
    "lr": lambda o: o.param_groups[0].update(lr=0.1 * (1 + hvd.rank())),
    "lr of a tensor": lambda o: o.param_groups[0].update(lr=torch.tensor(0.1 + hvd.rank())),
    "lr of numpy": lambda o: o.param_groups[0].update(lr=np.float32(0.1 + hvd.rank())),
    "weight_decay": lambda o: o.param_groups[0].update(weight_decay=float(hvd.rank() == 1)),
    "nesterov": lambda o: o.param_groups[0].update(nesterov=hvd.rank() == 0),
}


@on_ranks(2, 3)
def settings_that_come_apart_are_named_before_another_step() -> None:
    for name, change in SETTINGS.items():
        model = make()
        optimizer = wrap(model)
        for _ in range(3):
            step(model, optimizer)
        before = [p.detach().clone() for p in model.parameters()]
        change(optimizer)
        error = refused(lambda: step(model, optimizer))  # noqa: B023
        key = name.split()[0]
        assert re.search(rf"settings, number \d: rank 0: {key} of param group 0: ", str(error)), (
            name
        )
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)  # as it advises
        assert all(map(torch.equal, before, model.parameters()))
        step(model, optimizer)


# Parameters in another order, without names of the program.


def alike() -> nn.Sequential:
    """Three layers of the same shapes, whose biases begin with the same values."""
    torch.manual_seed(3)
    layers = [nn.Linear(3, 3) for _ in range(3)]
    for each in layers:
        nn.init.zeros_(each.bias)
    return nn.Sequential(*layers)


def train_alike(model: nn.Sequential, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for i in range(steps):
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = 0.1 / (i + 1)
        model(torch.full((2, 3), hvd.rank() + 1.0)).square().mean().backward()
        optimizer.step()


@on_ranks(2, 3)
def parameters_in_another_order_are_named_where_they_were_broadcast() -> None:
    for kind, options in KINDS.items():
        for broadcast_before in (True, False):
            for swapped in ("bias", "weight"):  # of equal values, and of others
                model = alike()
                if broadcast_before:
                    hvd.broadcast_parameters(model.state_dict(), 0)
                named = dict(model.named_parameters())
                names = list(named)
                if hvd.rank() == 1:
                    i, j = names.index(f"0.{swapped}"), names.index(f"2.{swapped}")
                    names[i], names[j] = names[j], names[i]
                plain = torch.optim.SGD([named[n] for n in names], lr=0.1)
                optimizer = hvd.DistributedOptimizer(plain, **options)
                if not broadcast_before:
                    hvd.broadcast_parameters(model.state_dict(), 0)
                if (kind, swapped) == ("sharded", "weight"):
                    error = refused(lambda: train_alike(model, optimizer, 1))  # noqa: B023
                    assert "start from different weights" in str(error)
                    continue
                error = refused(lambda: train_alike(model, optimizer, 1))  # noqa: B023
                for rank, name in ((0, f"0.{swapped}"), (1, f"2.{swapped}")):
                    assert f"rank {rank}: '{name}' is group 0, parameter " in str(error), kind
                assert "the order of a set" in str(error)


@on_ranks(2)
def names_that_some_ranks_do_not_know_or_that_are_no_names_are_no_error() -> None:
    for options in KINDS.values():
        for broadcast in (
            lambda model: hvd.broadcast_parameters(model.state_dict(), 0),
            lambda model: hvd.broadcast_parameters(list(model.parameters()), 0),
            lambda model: [hvd.broadcast_parameters([("p", p)], 0) for p in model.parameters()],
        ):
            model = alike()
            broadcast(model)
            hvd.broadcast_parameters(model[2].state_dict(), 0)  # under other names again
            model[1].weight = model[0].weight
            if hvd.rank() == 1:
                model[0].weight.data = model[0].weight.data.clone()
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), **options
            )
            if hvd.rank() == 1 and not options:
                model[2].bias.data = model[2].bias.data.clone()
            train_alike(model, optimizer)


@on_ranks(2)
def settings_that_update_nothing_may_differ() -> None:
    model = make()
    optimizer = wrap(model)
    group = optimizer.param_groups[0]
    for value in (hvd.rank() == 0, None):
        group.update(foreach=value, initial_lr=hvd.rank() + 1.0, mine=hvd.rank(), name="weights")
        step(model, optimizer)


@on_ranks(2)
def settings_of_an_optimizer_without_defaults_are_left_out() -> None:
    """As those around another that never call Optimizer.__init__."""

    class Around(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner, self.state = inner, inner.state
            self.param_groups = inner.param_groups

        def zero_grad(self, set_to_none: bool = True) -> None:
            self.inner.zero_grad(set_to_none)

        def step(self, closure: Any = None) -> Any:
            return self.inner.step(closure)

    model = make()
    optimizer = hvd.DistributedOptimizer(Around(torch.optim.SGD(model.parameters(), lr=0.1)))
    for _ in range(2):
        step(model, optimizer)


@on_ranks(2)
def a_scheduler_that_goes_by_each_ranks_own_loss_is_noticed() -> None:
    model = make()
    optimizer = wrap(model)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)

    def train() -> None:
        for i in range(8):
            step(model, optimizer)
            schedule.step(float(i if hvd.rank() == 0 else -i))

    error = refused(train)
    assert "lr of param group 0: 0.0001; rank 1: lr of param group 0: 0.001\n" in str(error)
    assert "hvd.allreduce" in str(error)


@on_ranks(3)
def settings_of_ranks_that_go_on_are_compared_without_one_that_has_joined() -> None:
    model = make()
    optimizer = wrap(model)
    step(model, optimizer)
    if hvd.rank() < 2:
        optimizer.param_groups[0]["lr"] = 0.5
        step(model, optimizer)
        optimizer.param_groups[0]["lr"] = 0.5 + hvd.rank()
        with pytest.raises(fd.Mismatch, match=r"rank 0: lr of param group 0: 0.5; rank 1: lr"):
            step(model, optimizer)
    hvd.join()


@on_ranks(3)
def a_process_set_is_compared_by_itself() -> None:
    pair = hvd.add_process_set([0, 2])
    model = make(seed=hvd.rank() % 2)  # equal in the set alone
    step(model, wrap(model, process_set=pair))
    model = make(seed=hvd.rank())
    optimizer = wrap(model, process_set=pair)
    if pair.included():
        with pytest.raises(fd.Mismatch) as caught:
            step(model, optimizer)
        assert sorted(caught.value.values.values()) == [[0], [2]]
    else:
        step(model, optimizer)
    hvd.barrier()
    hvd.remove_process_set(pair)


@on_ranks(2)
def two_optimizers_are_compared_each_in_its_first_step() -> None:
    judge, painter = make(), make(seed=hvd.rank())
    judges, painters = wrap(judge), wrap(painter)
    step(judge, judges)
    refused(lambda: step(painter, painters))
    step(judge, judges)


@on_ranks(3)
def a_rank_that_has_joined_before_the_first_step_has_no_part_in_it() -> None:
    with checking_weights("2"):
        model = make(seed=hvd.rank() // 2)  # that of the last rank is another one
        optimizer = wrap(model)
        if hvd.rank() < 2:
            for _ in range(3):
                step(model, optimizer)
        hvd.join()
        step(model, optimizer)
        error = refused(lambda: step(model, optimizer))
        assert error.rank == 2
        assert "differ before step 5" in error.verdict


# A GlobalBatch: everything is equal on its ranks.


def shared(model: nn.Module, samples: int = 4, **options: Any) -> tuple[Any, Any]:
    inputs = torch.linspace(0, 1, 8 * samples).reshape(-1, 2)  # of 4 batches
    optimizer = torch.optim.SGD(model[:2].parameters(), lr=1e-3, momentum=0.5)
    loader = DataLoader(inputs, batch_size=samples)
    return hvd.GlobalBatch(loader, model, optimizer, **options), optimizer


def pass_over(batches: Any, optimizer: Any, model: nn.Module) -> None:
    for x in batches:
        batches.scale_loss(model(x).square().mean()).backward()
        if batches.sync_gradients:
            optimizer.step()
            optimizer.zero_grad()


def three_layers(norm: nn.Module) -> nn.Sequential:
    """The last one is in no optimizer."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(2, 3), norm, nn.Linear(3, 1))


def moved_apart(
    tensor: Callable[[nn.Module, Any], torch.Tensor], norm: nn.Module, **options: Any
) -> str:
    """After steps in which nothing differs; what the verdict names, or nothing."""
    with checking_weights("1"):
        model = three_layers(norm)
        batches, optimizer = shared(model, **options)
        pass_over(batches, optimizer, model)
    tensor(model, optimizer).detach().view(-1)[0] += hvd.rank()
    found = ""
    try:
        pass_over(batches, optimizer, model)
    except fd.Mismatch as error:
        found = f"{error.tensor}: {error.advice}"
    assert len(set(hvd.allgather_object(found))) == 1, found
    assert not found or "broadcast_optimizer_state" in found
    return found.partition(":")[0]


def momentum(model: nn.Module, optimizer: Any) -> torch.Tensor:
    return optimizer.state[model[0].weight]["momentum_buffer"]


def mean(model: nn.Module, _: Any) -> torch.Tensor:
    return model[1].running_mean


@on_ranks(2, 3)
def a_global_batch_compares_other_weights_and_the_state_of_the_optimizer() -> None:
    for options in ({}, {"logical_ranks": 4}):
        apart = partial(moved_apart, norm=nn.Tanh(), **options)
        assert apart(momentum) == "state of 0.weight", options
        assert apart(lambda model, _: model[2].bias) == "2.bias", options


@on_ranks(2)
def an_optimizer_that_it_was_not_given_is_found_in_the_second_step() -> None:
    model = three_layers(nn.Tanh())
    batches, optimizer = shared(model)
    other = torch.optim.SGD(model[2].parameters(), lr=0.1)

    def train() -> None:
        for x in batches:
            optimizer.zero_grad()
            other.zero_grad()
            own = model(x) * (1 + hvd.rank())
            batches.scale_loss(own.square().mean()).backward()
            optimizer.step()
            other.step()

    assert refused(train).tensor == "2.weight"


@on_ranks(2)
def statistics_are_compared_where_they_are_of_all_ranks() -> None:
    norm = hvd.SyncBatchNorm(3)
    assert moved_apart(mean, norm) == "1.running_mean"
    assert moved_apart(mean, nn.BatchNorm1d(3), logical_ranks=2) == "1.running_mean"
    assert moved_apart(mean, nn.BatchNorm1d(3)) == ""


@on_ranks(3)
def ranks_without_samples_have_the_statistics_of_all() -> None:
    with checking_weights("1"):
        model = three_layers(hvd.SyncBatchNorm(3))
        batches, optimizer = shared(model, samples=2)
        for _ in range(2):
            pass_over(batches, optimizer, model)


@on_ranks(2)
def a_sharded_update_has_its_state_on_one_rank() -> None:
    with checking_weights("1"):
        model = three_layers(nn.Tanh())
        batches, optimizer = shared(model, sharded_update=True)
        pass_over(batches, optimizer, model)
        model[2].bias.data[0] += hvd.rank()
        assert refused(lambda: pass_over(batches, optimizer, model)).tensor == "2.bias"


test_on_ranks = make_tests(__name__, "torch")
