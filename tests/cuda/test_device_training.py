"""DistributedOptimizer with parameters on devices, by ranks over the fake driver: the weights are
those of the same training on the host, bit by bit. By way of the host's memory; where they lie:
test_gradients_there.py."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import time
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
from farandole.torch import _devices
from farandole.torch._training import hooked as hooks
from farandole.torch._training.hooked import hearing
from farandole.torch._training.passes import Pass
from farandole.torch.compression import Compressor
from harness import World

Start = Callable[..., World]


class OnDeviceFp16(Compressor):
    """fp16 where the tensor lies: what PyTorch's own conversion does on a device."""

    tensors: Tensors

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        wire = tensor.half()
        return wire if cls.tensors.device_of(tensor) is None else cls.tensors.put(wire), None

    @classmethod
    def decompress(cls, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:  # noqa: ARG003
        cls.tensors.settle()  # PyTorch converts at once here, and not in the stream
        whole = tensor.float()
        return whole if cls.tensors.device_of(tensor) is None else cls.tensors.put(whole)


Train = dict[str, Any]
OPTIONS: Train = {"bucket_bytes": 200_000, "first_bucket_bytes": 20_000, "in_place_bytes": 900_000}


def train(
    tensors: Tensors | None,
    where: str,
    steps: int,
    passes: int = 1,
    scaler: bool = False,
    **how: Any,
) -> list[torch.Tensor]:
    """`where`: see place()."""
    model = Model()
    place(tensors, model, where)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), 1e-3),
        model.named_parameters(),
        backward_passes_per_step=passes,
        **OPTIONS | how,
    )
    scale = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) if scaler else None
    for step in range(steps):
        for i in range(passes):
            loss = (model(batch(passes * step + i), (step + hvd.rank()) % 3 > 0) ** 2).mean()
            if scale is not None and step == 2 and hvd.rank() == 1:
                loss = loss * float("inf")
            (loss if scale is None else scale.scale(loss)).backward()
            if tensors is not None:
                tensors.settle()
        if scale is None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        else:
            scale.unscale_(optimizer)
            scale.step(optimizer)
            scale.update()
        optimizer.zero_grad()
    for p in model.parameters():
        if tensors is not None and where == "all":
            assert tensors.device_of(p) == 0
    return [p.detach().clone() for p in model.parameters()]


WAYS: dict[str, Train] = {
    "plain": {},
    "prescaled": {"gradient_predivide_factor": 3.0},
    "accumulated": {"passes": 3, "steps": 3},
    "scaled": {"scaler": True},
    "all at the end": {"overlap": False},
    "each by itself": {"bucket_bytes": 0},
    "grouped": {"groups": 3},
}


def as_on_the_host(places: list[str], ways: list[str]) -> int:
    """How many kernels were launched."""
    rank = Rank()
    tensors = Tensors(rank)
    for way in ways:
        how = {"steps": 4} | WAYS[way]
        expected = train(None, "none", **how)
        for where in places:
            for result, wanted in zip(train(tensors, where, **how), expected, strict=True):
                assert torch.equal(result, wanted), (way, where)
    launched = rank.machine.launched()
    gc.collect()
    rank.end()
    return launched


def test_weights_are_those_of_the_host(start: Start) -> None:
    ranks = start(2, "torch", FAKE_CUDA_JITTER="3")
    assert ranks.run(as_on_the_host, ["all"], list(WAYS)) == [0, 0]


def test_some_on_the_host_some_on_the_device(start: Start) -> None:
    ways = ["plain", "prescaled"]
    start(3, "torch", FAKE_CUDA_JITTER="5").run(as_on_the_host, ["one rank", "some"], ways)


def test_several_devices_of_one_rank(start: Start) -> None:
    """In the same buckets."""
    ranks = start(2, "torch", FAKE_CUDA_DEVICES="2", FAKE_CUDA_JITTER="15")
    places = ["two devices", "two devices and the host"]
    ranks.run(as_on_the_host, places, ["plain", "accumulated"])


def two_threads(sharded: bool) -> None:
    """Autograd has a thread for each device, which calls the hooks of its gradients."""
    hvd.init()
    model = torch.nn.Linear(30, 20)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), sharded_update=sharded
    )
    (hooked,) = hearing
    entered: list[Pass] = []  # which keeps them, as autograd does

    def begun(of_whom: Any) -> Pass:
        time.sleep(0.2)  # in which the other thread comes by
        return Pass(of_whom)

    of: Any = hooks
    of.graph_task, of.Pass = (lambda: 7), begun
    Pass.enter = lambda present, _: entered.append(present)  # type: ignore[method-assign]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    comes = functools.partial(hooked.on_gradient, final=True)
    threads = [threading.Thread(target=comes, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(entered) == 2
    assert entered[0] is entered[1]
    entered[0]()
    optimizer.step()
    fd.shutdown()


@pytest.mark.parametrize("sharded", [False, True])
def test_a_backward_of_two_threads(start: Start, sharded: bool) -> None:
    start(2, "torch").run(two_threads, sharded)


def compressed(predivide: float = 1.0) -> None:
    rank = Rank()
    OnDeviceFp16.tensors = tensors = Tensors(rank)
    how = {"gradient_predivide_factor": predivide}
    expected = train(None, "none", 4, compression=hvd.Compression.fp16, **how)
    results = train(tensors, "all", 4, compression=OnDeviceFp16, **how)
    for result, wanted in zip(results, expected, strict=True):
        assert torch.equal(result, wanted)
    gc.collect()
    rank.end()


def test_compressed(start: Start) -> None:
    start(2, "torch", FAKE_CUDA_JITTER="9").run(compressed)


def steady() -> list[str]:
    rank = Rank()
    calls = calls_of_steps(rank, Tensors(rank), 20)
    gc.collect()
    rank.end()
    return [call for call in calls if call in NEVER_IN_A_STEADY_STEP]


def calls_of_steps(rank: Rank, tensors: Tensors, steps: int, ahead: int = 0) -> list[str]:
    """`ahead`: of the device, at first, so many steps: as never afterwards."""
    model = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.Linear(50, 1))
    list(parameters_on(tensors, model))
    kept = [tensors.put(torch.zeros_like(p)) for p in model.parameters()]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))

    def step() -> None:
        backward()
        rank.machine.call("cuStreamSynchronize", rank.machine.streams[0])
        optimizer.step()

    def backward() -> None:
        for p, home in zip(model.parameters(), kept, strict=True):
            p.grad = home.zero_()  # autograd adds to it: no memory of the device is new
        model(torch.ones(3, 40)).sum().backward()

    for _ in range(3):
        step()
    rank.machine.control.hold(ahead > 0)
    for _ in range(ahead):
        backward()
        optimizer.zero_grad()
    rank.machine.control.hold(False)
    step()
    return calls_of(rank, step, steps)


def test_a_steady_step_neither_allocates_nor_waits_for_the_device(start: Start) -> None:
    for extra in start(2, "torch", FARANDOLE_CHECK_WEIGHTS="off").run(steady):
        assert extra == ["cuStreamSynchronize"] * 20, "the test's own, once a step"


def joins() -> None:
    """A rank without further batches stands in with zeros, on its device as on the host."""
    rank = Rank()
    tensors = Tensors(rank)
    results = []
    for there in (False, True):
        model = torch.nn.Linear(30, 20)
        torch.nn.init.constant_(model.weight, 0.5)
        torch.nn.init.constant_(model.bias, 0.5)
        if there:
            list(parameters_on(tensors, model))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
        for step in range(2 + 3 * hvd.rank()):
            optimizer.zero_grad()
            (model(batch(step)[:, :30]) ** 2).mean().backward()
            tensors.settle()
            optimizer.step()
        assert hvd.join() == 1
        tensors.settle()
        results.append([p.detach().clone() for p in model.parameters()])
    for on_host, on_device in zip(*results, strict=True):
        assert torch.equal(on_host, on_device)
    del optimizer, model
    gc.collect()
    rank.end()


def test_a_rank_that_joins(start: Start) -> None:
    start(2, "torch", FAKE_CUDA_JITTER="4").run(joins)


# ---- what goes wrong ----


CALLS = [
    ("cuMemHostRegister", 1),
    ("cuStreamWriteValue32", 1),
    ("cuMemcpyAsync", 3),  # on the way back
]


@pytest.mark.parametrize(("call", "nth"), CALLS)
def test_a_call_of_the_driver_that_fails(start: Start, call: str, nth: int) -> None:
    ranks = start(2, "torch", FARANDOLE_CHECK_WEIGHTS="off")
    is_rank_1s(*how_it_went_wrong(ranks, goes_wrong, call, nth, {}))


def backward_raises() -> None:
    """On one rank: the others are told, nothing was changed, and the next step works."""
    rank = Rank()
    tensors = Tensors(rank)
    model, optimizer = small(tensors)

    def fails(_: torch.Tensor) -> None:
        raise ZeroDivisionError

    for step in range(4):
        optimizer.zero_grad()
        x = batch(step)[:, :30].requires_grad_()
        if step == 1 and fd.rank() == 1:
            x.register_hook(fails)
        expected: Any = contextlib.nullcontext()
        if step == 1:
            expected = pytest.raises(ZeroDivisionError if fd.rank() == 1 else fd.RemoteError)
        with expected:
            model(x).sum().backward()
            tensors.settle()
            optimizer.step()
    for p, everywhere in zip(model.parameters(), same_everywhere(model), strict=True):
        assert torch.equal(p, everywhere)
    del model, optimizer, x, expected, p
    gc.collect()
    rank.end()


def same_everywhere(model: torch.nn.Module) -> list[torch.Tensor]:
    return [hvd.broadcast(p.detach().clone(), 0) for p in model.parameters()]


def test_a_backward_that_raises(start: Start) -> None:
    start(2, "torch", FAKE_CUDA_JITTER="6").run(backward_raises)


def misplaced() -> None:
    rank = Rank()
    tensors = Tensors(rank)
    model, optimizer = small(tensors)
    for p in model.parameters():
        p.grad = None
    found = tensors.device_of
    _devices.device_of = lambda _: None  # its gradient is on the host again
    with pytest.raises(fd.InvalidArgument, match="is on cpu, and the parameter was on cuda:0"):
        model(batch(0)[:, :30]).sum().backward()
    _devices.device_of = found
    del model, optimizer, p
    gc.collect()
    with contextlib.suppress(fd.Error):
        fd.shutdown()


def test_a_gradient_that_lies_elsewhere(start: Start) -> None:
    start(2, "torch").run(misplaced)
