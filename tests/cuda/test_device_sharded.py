"""Sharded updates and op=Adasum with parameters on devices, by ranks over the fake driver: the
weights are those of the same training on the host, bit by bit."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from device_model import Model, batch, goes_wrong, place, small
from fake_device import Rank
from fake_tensors import Tensors, parameters_on
from fault_work import how_it_went_wrong, is_rank_1s
from test_device_collectives import NEVER_IN_A_STEADY_STEP, calls_of

import farandole as fd
import farandole.torch as hvd
from farandole.torch._training.device_shards import DeviceShards
from harness import World

Start = Callable[..., World]

SHARDED: dict[str, Any] = {
    "sharded_update": True,
    "bucket_bytes": 200_000,
    "first_bucket_bytes": 20_000,
}


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 1e-3)


def momentum(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9, weight_decay=0.01)


def plain(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 1e-2)


RULES = {"adam": adam, "momentum": momentum, "plain": plain}


def train(
    tensors: Tensors | None, where: str, rule: str = "adam", passes: int = 1, **how: Any
) -> list[torch.Tensor]:
    """The weights and, of a sharded update, the state. `where`: see place()."""
    model = Model()
    place(tensors, model, where)
    optimizer: Any = hvd.DistributedOptimizer(
        RULES[rule](model), model.named_parameters(), backward_passes_per_step=passes, **how
    )
    sharded = "sharded_update" in how
    for step in range(3):
        for i in range(passes):
            (model(batch(passes * step + i), (step + hvd.rank()) % 3 > 0) ** 2).mean().backward()
            settle(tensors)
        if sharded:
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        settle(tensors)
        optimizer.zero_grad()
        if step == 1:  # the program's own change of weights, between two steps
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(0.75)
    weights = [p.detach().clone() for p in model.parameters()]
    if where == "all":
        assert tensors is not None
        assert all(tensors.device_of(p) == 0 for p in model.parameters())
    if not sharded:
        return weights
    state = optimizer.state_dict()["state"]
    return weights + [t for i in sorted(state) for t in state[i].values()]


def settle(tensors: Tensors | None) -> None:
    if tensors is not None:
        tensors.settle()


def as_on_the_host(places: list[str], ways: list[dict[str, Any]]) -> int:
    """How many kernels were launched: none by the host."""
    rank = Rank()
    tensors = Tensors(rank)
    for how in ways:
        expected = train(None, "none", **how)
        for where in places:
            for result, wanted in zip(train(tensors, where, **how), expected, strict=True):
                assert torch.equal(result, wanted), (how, where)
    launched = rank.machine.launched()
    gc.collect()
    rank.end()
    return launched


WAYS: list[dict[str, Any]] = [SHARDED, SHARDED | {"rule": "momentum", "passes": 2}]


def test_sharded_weights_are_those_of_the_host(start: Start) -> None:
    assert start(2, "torch", FAKE_CUDA_JITTER="3").run(as_on_the_host, ["all"], WAYS) == [0, 0]


def test_sharded_some_on_the_host_some_on_the_device(start: Start) -> None:
    start(2, "torch", FAKE_CUDA_JITTER="5").run(as_on_the_host, ["one rank", "some"], WAYS[:1])


def test_sharded_several_devices_of_one_rank(start: Start) -> None:
    ranks = start(2, "torch", FAKE_CUDA_DEVICES="2", FAKE_CUDA_JITTER="15")
    adasum = {"op": hvd.Adasum}
    ranks.run(as_on_the_host, ["two devices", "two devices and the host"], [WAYS[1], adasum])


def test_sharded_where_ranks_share_no_memory(start: Start) -> None:
    apart = start(2, "torch", FARANDOLE_SPLIT_HOSTS="1,1", FARANDOLE_INSECURE="1")
    apart.run(as_on_the_host, ["all"], WAYS[:1])


def test_adasum_weights_are_those_of_the_host(start: Start) -> None:
    """With any optimizer, each rank steps by itself, and their moves are folded."""
    ways = [{"op": hvd.Adasum}, {"op": hvd.Adasum, "rule": "momentum", "passes": 2}]
    start(2, "torch", FAKE_CUDA_JITTER="7").run(as_on_the_host, ["all"], ways)


def steady() -> list[str]:
    rank = Rank()
    calls = calls_of_steps(rank, Tensors(rank), 10)
    gc.collect()
    rank.end()
    return [call for call in calls if call in NEVER_IN_A_STEADY_STEP]


def calls_of_steps(rank: Rank, tensors: Tensors, steps: int, *, clip: bool = False) -> list[str]:
    model = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.Linear(50, 1))
    list(parameters_on(tensors, model))
    kept = [tensors.put(torch.zeros_like(p)) for p in model.parameters()]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), sharded_update=True
    )

    def step() -> None:
        for p, home in zip(model.parameters(), kept, strict=True):
            p.grad = home.zero_()  # autograd adds to it: no memory of the device is new
        model(torch.ones(3, 40)).sum().backward()
        if clip:
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        rank.machine.call("cuStreamSynchronize", rank.machine.streams[0])

    for _ in range(3):
        step()
    return calls_of(rank, step, steps)


def test_a_steady_step_neither_allocates_nor_registers(start: Start) -> None:
    for extra in start(2, "torch", FARANDOLE_CHECK_WEIGHTS="off").run(steady):
        assert extra == ["cuStreamSynchronize"] * 10, "the test's own, once a step"


# ---- what goes wrong ----


CALLS = [
    ("cuMemHostRegister", 1),
    ("cuMemHostRegister", 2),  # for the parameters
    ("cuMemcpyAsync", 1),
    ("cuStreamWriteValue32", 1),
    ("cuMemcpyAsync", 5),  # on the way back
]


@pytest.mark.parametrize(("call", "nth"), CALLS)
def test_a_call_of_the_driver_that_fails(start: Start, call: str, nth: int) -> None:
    ranks = start(2, "torch", FARANDOLE_CHECK_WEIGHTS="off")
    is_rank_1s(*how_it_went_wrong(ranks, goes_wrong, call, nth, {"sharded_update": True}))


def is_late() -> tuple[str, str]:
    rank = Rank()
    tensors = Tensors(rank)
    model, optimizer = small(tensors, sharded_update=True)
    model(batch(0)[:, :30]).sum().backward()
    optimizer.step()
    tensors.settle()
    fd.barrier()
    rank.machine.control.hold(fd.rank() == 1)
    model(batch(1)[:, :30]).sum().backward()
    with pytest.raises(fd.Error) as caught:
        optimizer.step()
    rank.machine.control.hold(False)
    with contextlib.suppress(fd.Error):
        fd.shutdown()
    return caught.value.verdict, caught.type.__name__


def test_a_device_that_does_not_come_by(start: Start) -> None:
    one, other = start(2, "torch", FARANDOLE_TIMEOUT="1").run(is_late)
    assert one == other
    said = ("stalled", "in time", "waited", "not complete after")  # by the rank that is first
    assert any(words in one[0].lower() for words in said), one
    assert one[1] == "Stalled"


def goes_while_values_return() -> int:
    """How many weights are 0 where an optimizer goes while its new weights are on their way to the
    device."""
    hvd.init()
    rank = Rank()
    tensors = Tensors(rank)
    model = torch.nn.Linear(300, 400)
    assert list(parameters_on(tensors, model))
    optimizer: Any = hvd.DistributedOptimizer(adam(model), model.named_parameters(), **SHARDED)
    end = DeviceShards.end

    def held(self: DeviceShards) -> None:
        rank.machine.control.hold(True)
        end(self)

    for step in range(2):
        (model(torch.ones(8, 300)) ** 2).mean().backward()
        settle(tensors)
        if step == 1:
            DeviceShards.end = held  # type: ignore[method-assign]
        optimizer.step()
        if step == 0:
            settle(tensors)
            optimizer.zero_grad()
    release = threading.Timer(0.5, rank.machine.control.hold, [False])
    release.start()
    for p in model.parameters():
        p.grad = None
    del optimizer
    gc.collect()
    release.join()
    settle(tensors)
    return int((model.weight == 0).sum())


def test_an_optimizer_may_go_while_its_weights_return(start: Start) -> None:
    assert start(2, "torch").run(goes_while_values_return) == [0, 0]


def refused() -> None:
    rank = Rank()
    tensors = Tensors(rank)
    model, optimizer = small(tensors, sharded_update=True)
    model(batch(0)[:, :30]).sum().backward()
    for p in model.parameters():
        assert p.grad is not None
        p.grad.mul_(2)
    with pytest.raises(fd.InvalidArgument, match=r"(?s)changed after backward.*clip_grad_norm_"):
        optimizer.step()
    optimizer.zero_grad()
    model(batch(1)[:, :30]).sum().backward()
    model.weight.data = torch.zeros(20, 30)
    with pytest.raises(fd.InvalidArgument, match="'weight' was converted, reshaped or moved"):
        optimizer.step()
    del model, optimizer, p
    gc.collect()
    with contextlib.suppress(fd.Error):
        fd.shutdown()


def test_what_is_refused(start: Start) -> None:
    start(2, "torch").run(refused)
