"""Sharded updates where parameters lie, with the state on the device, by ranks over the fake
driver: weights and state are those of the same training on the host, bit by bit."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import test_device_sharded as sharded
import torch
from device_model import Model, batch, goes_wrong
from fake_device import Rank
from fake_tensors import Tensors, here_and_there, parameters_on
from fault_work import how_it_went_wrong, is_rank_1s
from test_device_collectives import NEVER_IN_A_STEADY_STEP

import farandole.torch as hvd
from harness import World

Start = Callable[..., World]

WAYS = [*sharded.WAYS, sharded.SHARDED | {"rule": "plain"}]


# ---- the weights ----


@pytest.mark.parametrize("size", [1, 2, 3])
def test_weights_and_state_are_those_of_the_host(there: Start, size: int) -> None:
    """Some parameters have a gradient on one rank alone."""
    ranks = there(size, FAKE_CUDA_JITTER="3")
    assert min(ranks.run(sharded.as_on_the_host, ["all"], WAYS)) > 0


def test_in_many_pieces(there: Start) -> None:
    small = {"FARANDOLE_DEVICE_BUCKET_BYTES": "4096"}
    there(3, FAKE_CUDA_JITTER="5", **small).run(sharded.as_on_the_host, ["all"], WAYS[:1])


def test_where_parameters_of_ranks_lie_apart(there: Start) -> None:
    places = ["one rank", "some"]
    there(2, FAKE_CUDA_JITTER="7").run(sharded.as_on_the_host, places, WAYS[:2])


def test_several_devices_of_one_rank(there: Start) -> None:
    ranks = there(2, FAKE_CUDA_DEVICES="2", FAKE_CUDA_JITTER="15")
    ranks.run(sharded.as_on_the_host, ["two devices", "two devices and the host"], WAYS[:1])


def adam_of(model: torch.nn.Module, **how: Any) -> Any:
    return hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), 1e-2), model.named_parameters(), **how
    )


def resumes() -> tuple[bool, int]:
    """Half of the steps, then the rest with the state in another optimizer."""
    rank = Rank()
    tensors = Tensors(rank)
    results = []
    for model in here_and_there(Model, tensors, rank.device):
        optimizer = adam_of(model, **sharded.SHARDED)
        for step in range(6):
            if step == 3:
                state = optimizer.state_dict()
                del optimizer
                gc.collect()
                optimizer = adam_of(model, **sharded.SHARDED)
                optimizer.load_state_dict(state)
            optimizer.zero_grad()
            (model(batch(step), step % 2 == 0) ** 2).mean().backward()
            tensors.settle()
            optimizer.step()
            tensors.settle()
        state = optimizer.state_dict()["state"]
        tensors.settle()
        weights = [p.detach().clone() for p in model.parameters()]
        results.append(weights + [t for i in sorted(state) for t in state[i].values()])
        del model, optimizer
    gc.collect()
    launched = rank.machine.launched()
    rank.end()
    same = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    return same, launched


def test_state_that_is_saved_and_loaded(there: Start) -> None:
    for same, launched in there(2, FAKE_CUDA_JITTER="9").run(resumes):
        assert same
        assert launched > 0


def gives_a_step_up() -> bool:
    """A parameter that a rank used before zero_grad(), and only the other one uses afterwards."""
    rank = Rank()
    tensors = Tensors(rank)
    results = []
    for model in here_and_there(Model, tensors, rank.device):
        optimizer = adam_of(model, **sharded.SHARDED)
        for step in range(2):
            for way in (True, hvd.rank() == 0):  # the first of them is given up
                optimizer.zero_grad()
                (model(batch(step), way) ** 2).mean().backward()
                tensors.settle()
            optimizer.step()
            tensors.settle()
        results.append([p.detach().clone() for p in model.parameters()])
        del model, optimizer
    gc.collect()
    rank.end()
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("path", ["step", "staged"])
def test_a_step_that_is_given_up(there: Start, path: str) -> None:
    assert all(there(2, FAKE_CUDA_JITTER="17", FARANDOLE_DEVICE_PATH=path).run(gives_a_step_up))


NORMS = 12  # a square root hides many a difference


def norms(kind: float) -> tuple[list[float], list[float], int]:
    """Norms of the same training on the host and on the device, and the number of launches. Many
    parameters are in one bucket; their gradients in the last step are not finite."""
    rank = Rank()
    tensors = Tensors(rank)
    found: list[list[float]] = []
    for on_device in (False, True):
        torch.manual_seed(5)
        model = torch.nn.Sequential(
            *(torch.nn.Linear(300, 30), *(torch.nn.Linear(30, 30) for _ in range(9)))
        )
        if on_device:
            list(parameters_on(tensors, model, rank.device))
        optimizer = adam_of(model, sharded_update=True)
        found.append([])
        for step in range(NORMS):
            optimizer.zero_grad()
            ((float("inf") if step == NORMS - 1 else 1) * model(batch(step))).sum().backward()
            tensors.settle()
            optimizer.clip_grad_norm_(1.0, kind)
            found[-1].append(optimizer._shards.update.norm)  # what is returned has half of the bits
            optimizer.step()
            tensors.settle()
        del model, optimizer
    gc.collect()
    launched = rank.machine.launched()
    rank.end()
    return found[0], found[1], launched


@pytest.mark.parametrize(("size", "kind"), [(1, math.inf), (3, 2.0)])
def test_norms_are_those_of_the_host(there: Start, size: int, kind: float) -> None:
    ranks = there(size, FAKE_CUDA_JITTER="19").run(norms, kind)
    for on_host, there_, launched in ranks:
        assert on_host[:-1] == there_[:-1]
        assert math.isnan(on_host[-1]) or math.isinf(on_host[-1])
        assert math.isnan(on_host[-1]) == math.isnan(there_[-1])
        assert launched > 0
    assert len({norm for _, there_, _ in ranks for norm in there_[:1]}) == 1


# ---- what it costs ----


def steady(clip: bool) -> tuple[list[str], int]:
    rank = Rank()
    calls = sharded.calls_of_steps(rank, Tensors(rank), 10, clip=clip)
    gc.collect()
    launched = rank.machine.launched()
    rank.end()
    return [call for call in calls if call in NEVER_IN_A_STEADY_STEP], launched


def test_a_steady_step_neither_allocates_nor_waits_for_the_device(there: Start) -> None:
    for extra, launched in there(2).run(steady, False):
        assert extra == ["cuStreamSynchronize"] * 10, "the test's own, once a step"
        assert launched == 10 * 3, "gather, fold and update"


def test_a_norm_waits_once_and_copies_terms_alone(there: Start) -> None:
    for extra, launched in there(2).run(steady, True):
        assert extra == ["cuStreamSynchronize"] * 20, "the test's own, and one for the terms"
        assert launched == 10 * 6, "before the update: gather, fold and norms"


# ---- what goes wrong ----


CALLS = [("cuLaunchKernel", nth) for nth in (3, 4, 5)]  # two have proved links


@pytest.mark.parametrize(("call", "nth"), CALLS)
def test_a_call_of_the_driver_that_fails(there: Start, call: str, nth: int) -> None:
    is_rank_1s(*how_it_went_wrong(there(2), goes_wrong, call, nth, {"sharded_update": True}))
