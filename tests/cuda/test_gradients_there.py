"""DistributedOptimizer with gradients that are reduced where they lie, by ranks over the fake
driver: the weights are those of the same training on the host, bit by bit."""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import test_device_training as training
import torch
from device_model import Model, batch, goes_wrong, small
from fake_device import Rank
from fake_nccl import NcclRank
from fake_tensors import Tensors, here_and_there, parameters_on
from fault_work import barriers, how_it_went_wrong, is_rank_1s
from test_device_collectives import NEVER_IN_A_STEADY_STEP

import farandole as fd
import farandole.torch as hvd
import harness
from farandole import _core
from harness import World

Start = Callable[..., World]

WAYS = list(training.WAYS)
KERNEL = "cuLaunchKernel"  # what goes by the host launches none


# ---- the weights ----


def test_weights_are_those_of_the_host(by_steps: Start) -> None:
    """Some buckets lack a gradient on one of the ranks. Weights are compared, too."""
    ranks = by_steps(2, framework="torch", FAKE_CUDA_JITTER="3")
    assert min(ranks.run(training.as_on_the_host, ["all"], WAYS)) > 0


@pytest.mark.parametrize("path", ["auto", "lanes"])
def test_the_way_that_is_chosen(there: Start, path: str) -> None:
    ranks = there(2, FARANDOLE_DEVICE_PATH=path, FAKE_CUDA_JITTER="11")
    assert min(ranks.run(training.as_on_the_host, ["all"], ["plain"])) > 0


def test_where_gradients_of_ranks_lie_apart(there: Start) -> None:
    """A bucket of which some is on the host on one rank is on the host on all of them."""
    places = ["one rank", "some"]
    there(3, FAKE_CUDA_JITTER="5").run(training.as_on_the_host, places, ["plain", "prescaled"])


def test_several_devices_of_one_rank(there: Start) -> None:
    ranks = there(2, FAKE_CUDA_DEVICES="2", FAKE_CUDA_JITTER="15")
    places = ["two devices", "two devices and the host"]
    ranks.run(training.as_on_the_host, places, ["plain", "accumulated"])


def in_a_set() -> tuple[bool, int]:
    """Training in a set of ranks 0 and 2, and an operation by name in that set."""
    rank = Rank()
    tensors = Tensors(rank)
    ends = hvd.add_process_set([0, 2])
    expected = training.train(None, "none", 3, process_set=ends)
    result = training.train(tensors, "all", 3, process_set=ends)
    same = all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))
    launched = rank.machine.launched()
    if hvd.rank() != 1:
        x = tensors.put(torch.full((64 << 10,), hvd.rank() + 1.0))
        total = hvd.allreduce(x, op=hvd.Sum, name="large", process_set=ends)
        tensors.settle()
        same = same and bool((total == 4).all())
        del x, total
    del ends
    gc.collect()
    rank.end()
    return same, launched


def test_a_process_set(there: Start) -> None:
    """Its gradients stay on the device; operations by name go by the host."""
    first, middle, last = there(3, FAKE_CUDA_JITTER="21").run(in_a_set)
    assert [same for same, _ in (first, middle, last)] == [True] * 3
    assert first[1] > 0
    assert last[1] > 0
    assert middle[1] == 0


@pytest.mark.parametrize("predivide", [1.0, 3.0])
def test_compressed(there: Start, predivide: float) -> None:
    there(2, FAKE_CUDA_JITTER="9").run(training.compressed, predivide)


def test_a_rank_that_joins(there: Start) -> None:
    there(2, FAKE_CUDA_JITTER="4").run(training.joins)


def test_a_backward_that_raises(there: Start) -> None:
    there(2, FAKE_CUDA_JITTER="6").run(training.backward_raises)


def raises_in_the_middle() -> int:
    """When a part of the buckets is on its way on all ranks: the next step works."""
    rank = Rank()
    tensors = Tensors(rank)
    torch.manual_seed(2)
    layers = [torch.nn.Linear(30, 200), torch.nn.Linear(200, 100), torch.nn.Linear(100, 1)]
    model = torch.nn.Sequential(*layers)
    list(parameters_on(tensors, model))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), bucket_bytes=1000, first_bucket_bytes=100
    )

    def fails(_: torch.Tensor) -> None:
        raise ZeroDivisionError

    for step in range(5):
        optimizer.zero_grad()
        hidden = layers[0](batch(step)[:, :30])
        if step == 3 and fd.rank() == 1:
            hidden.register_hook(fails)
        expected: Any = contextlib.nullcontext()
        if step == 3:
            expected = pytest.raises(ZeroDivisionError if fd.rank() == 1 else fd.RemoteError)
        with expected:
            layers[2](layers[1](hidden)).sum().backward()
            tensors.settle()
            optimizer.step()
        del hidden, expected
    for p, everywhere in zip(model.parameters(), training.same_everywhere(model), strict=True):
        assert torch.equal(p, everywhere)
    launched = rank.machine.launched()
    del model, layers, optimizer, p
    gc.collect()
    rank.end()
    return launched


def test_a_backward_that_raises_in_the_middle(there: Start) -> None:
    assert min(there(2, FAKE_CUDA_JITTER="7").run(raises_in_the_middle)) > 0


def trains_as_on_the_host(rank: Rank, predivide: float = 1.0) -> None:
    """In another order of folds."""
    tensors = Tensors(rank)
    results = []
    for model in here_and_there(Model, tensors, rank.device):
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1), gradient_predivide_factor=predivide
        )
        for step in range(4):
            optimizer.zero_grad()
            (model(batch(step), step % 2 == 0) ** 2).mean().backward()
            tensors.settle()
            optimizer.step()
        results.append([p.detach().clone() for p in model.parameters()])
    for on_host, there in zip(*results, strict=True):
        torch.testing.assert_close(on_host, there)


def by_nccl_alone(predivide: float) -> tuple[int, int, int]:
    rank = NcclRank()
    trains_as_on_the_host(rank, predivide)
    gc.collect()
    asked = rank.nccl.calls("ncclAllReduce"), rank.nccl.calls("ncclRedOpCreatePreMulSum")
    launched = rank.machine.launched()
    rank.end()
    return *asked, launched


@pytest.mark.parametrize("predivide", [1.0, 2.0])
@pytest.mark.parametrize("hosts", ["", "1,1"])
def test_by_nccl(by_nccl: Start, hosts: str, predivide: float) -> None:
    """Kernels scale results, and NCCL scales inputs."""
    ranks = by_nccl(2, hosts, framework="torch").run(by_nccl_alone, predivide)
    for reduced, scaled, launched in ranks:
        assert reduced > 0
        assert (scaled > 0) == (predivide == 2)
        assert (launched > 0) == (predivide == 1)


def test_several_hosts_at_level_canonical(by_nccl: Start) -> None:
    """By way of the host, with its bits."""
    env = {"FARANDOLE_LEVEL": "canonical", "FARANDOLE_DEVICE_PATH": "auto"}
    ranks = by_nccl(2, "1,1", framework="torch", **env)
    assert ranks.run(training.as_on_the_host, ["all"], ["plain"]) == [0, 0]
    assert ranks.output(0).count("FARANDOLE_LEVEL=fast") == 1, "a warning of what the level costs"


# ---- which steps go by the devices ----


class Halves(torch.nn.Module):
    """A model of one bucket; a step need not use the second half."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((300,), 0.5))
        self.sometimes = torch.nn.Parameter(torch.full((200,), 0.25))

    def forward(self, x: torch.Tensor, whole: bool) -> torch.Tensor:
        y = (x[:, :300] * self.weight).sum()
        return y + (x[:, :200] * self.sometimes).sum() if whole else y


def launched_in_steps(lacking: list[int], steps: int) -> list[bool]:
    """Whether the bucket of each was reduced where it lies. Rank 1 lacks a gradient in some."""
    rank = Rank()
    tensors = Tensors(rank)
    model, on_host = Halves(), Halves()
    list(parameters_on(tensors, model))
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.SGD(m.parameters(), 0.1)) for m in (model, on_host)
    ]
    launched = []
    for step in range(steps):
        before = rank.machine.launched()
        whole = fd.rank() == 0 or step not in lacking
        for m, optimizer in zip((model, on_host), optimizers, strict=True):
            optimizer.zero_grad()
            m(batch(step), whole).backward()
            tensors.settle()
            optimizer.step()
        launched.append(rank.machine.launched() > before)
    for p, expected in zip(model.parameters(), on_host.parameters(), strict=True):
        assert torch.equal(p, expected)
    del model, optimizers, optimizer, m, p
    gc.collect()
    rank.end()
    return launched


def test_ranks_try_again_together(there: Start) -> None:
    """After a step in which one of them lacked a gradient: in the sixteenth."""
    expected = [True] * 2 + [False] * 14 + [True] * 16 + [False] * 16 + [True]
    assert there(2).run(launched_in_steps, [2, 5, 32], 49) == [expected] * 2


def test_where_the_host_is_faster(there: Start) -> None:
    """For two kilobytes, as predicted."""
    ranks = there(2, FARANDOLE_DEVICE_PATH="auto")
    assert ranks.run(launched_in_steps, [], 3) == [[False] * 3] * 2


@pytest.mark.parametrize(
    "setting", [{"FARANDOLE_DEVICE_PATH": "staged"}, {"FARANDOLE_ALGORITHM": "ring"}]
)
def test_a_setting_that_wants_the_host(there: Start, setting: dict[str, str]) -> None:
    assert there(2, **setting).run(launched_in_steps, [], 2) == [[False] * 2] * 2


def nccl_at_level_canonical() -> str:
    rank = NcclRank()
    tensors = Tensors(rank)
    with pytest.raises(fd.InvalidArgument) as caught:
        small(tensors)
    said = str(caught.value)
    del caught
    gc.collect()
    rank.end()
    return said


def test_nccl_has_no_canonical_order(by_nccl: Start) -> None:
    ranks = by_nccl(2, framework="torch", FARANDOLE_LEVEL="canonical")
    for said in ranks.run(nccl_at_level_canonical):
        assert "all_reduce cannot go by 'nccl'" in said


def steady() -> tuple[list[str], bool]:
    rank = Rank()
    calls = training.calls_of_steps(rank, Tensors(rank), 20, 20)
    gc.collect()
    rank.end()
    return [call for call in calls if call in NEVER_IN_A_STEADY_STEP], KERNEL in calls


def test_a_steady_step_neither_allocates_nor_waits_for_the_device(there: Start) -> None:
    for extra, launches in there(2).run(steady):
        assert extra == ["cuStreamSynchronize"] * 20, "the test's own, once a step"
        assert launches


def lets_go() -> None:
    """While the device has all of the step before it."""
    rank = Rank()
    tensors = Tensors(rank)
    model, optimizer = small(tensors)
    for step in range(3):
        optimizer.zero_grad()
        rank.machine.control.hold(step == 2)
        model(batch(step)[:, :30]).sum().backward()
        if step < 2:
            tensors.settle()
            optimizer.step()
    gradients = [weakref.ref(p.grad) for p in model.parameters()]
    optimizer.zero_grad(set_to_none=True)
    assert [gradient() for gradient in gradients] == [None, None]
    rank.machine.control.hold(False)
    tensors.settle()
    del model, optimizer
    gc.collect()
    rank.end()


def test_a_step_lets_go_of_its_gradients(there: Start) -> None:
    there(2).run(lets_go)


def with_none(steps: int, lacking: int) -> int:
    """As where a sparse one has no room in the buckets any more: the other one has all of it."""
    rank = Rank()
    kinds = [("none", 0, "float32", -1), ("all", 64, "float32", -1)]
    reducer = _core.Reducer(fd.world(), kinds, "sum", 1.0, 1.0, 1 << 20, 1 << 20, 1 << 30, True)
    carrier = _core.DeviceGradients(reducer, 0, [True, True])
    stream = rank.machine.streams[0].value or 0
    for step in range(steps):
        x, on_host = rank.pair(64, "float32")
        there = fd.rank() == 0 or step != lacking
        expected = fd.all_reduce(on_host.memory.view(np.float32) if there else np.zeros(64, "f"))
        carrier.bring(0, 0, stream, None)
        if there:
            carrier.bring(1, x.address, stream, x)
        reducer.launch_rest()
        reducer.wait()
        carrier.take_back([0, 1] if there else [0], stream)
        assert not there or x.get() == expected.tobytes(), step
    launched = rank.machine.launched()
    del reducer, carrier, x
    gc.collect()
    rank.end()
    return launched


def test_a_gradient_of_no_elements(there: Start) -> None:
    assert min(there(2).run(with_none, 4, 2)) > 0


# ---- what goes wrong ----

# Links are proved by two kernels and a batch, after a first one.
CALLS = [(KERNEL, 3), ("cuStreamBatchMemOp", 3), ("cuStreamWriteValue32", 1)]


@pytest.mark.parametrize(("call", "nth"), CALLS)
def test_a_call_of_the_driver_that_fails(there: Start, call: str, nth: int) -> None:
    is_rank_1s(*how_it_went_wrong(there(2), goes_wrong, call, nth, {}))


def waits_for_one() -> tuple[str, list[str]]:
    """Rank 1's device does not come by: the others' backward ends, and what their programs wait for
    does so, too."""
    rank = Rank()
    tensors = Tensors(rank)
    model, optimizer = small(tensors)
    for step in range(3):
        if step == 2:
            fd.barrier()
            rank.machine.control.hold(fd.rank() == 1)
        optimizer.zero_grad()
        model(batch(step)[:, :30]).sum().backward()
        if step < 2:
            tensors.settle()
            optimizer.step()
    harness.tell("launched")
    if fd.rank() == 1:
        harness.listen()
    tensors.settle()
    with pytest.raises(fd.Error) as caught:
        barriers()
    with contextlib.suppress(fd.Error):
        fd.shutdown()
    del model, optimizer
    gc.collect()
    return caught.value.verdict, list(rank.machine.leave())


def test_a_rank_that_is_killed(there: Start) -> None:
    world = there(3)
    world.start(waits_for_one)
    world.hear_all()
    world.signal(1, signal.SIGKILL)
    one, other = (o.value for o in world.outcomes([0, 2]))
    assert one == other
    assert "was killed by SIGKILL during all_reduce" in one[0]
    assert one[1] == ["", ""]


def leaves_an_optimizer() -> bool:
    """While the devices are late, which go on meanwhile. Whether shutdown() waited for them."""
    rank = Rank()
    tensors = Tensors(rank)
    model, optimizer = small(tensors)
    goes_on = threading.Event()

    def go_on() -> None:
        goes_on.set()
        rank.machine.control.hold(False)

    for step in range(2):
        rank.machine.control.hold(step == 1)
        optimizer.zero_grad()
        model(batch(step)[:, :30]).sum().backward()
        if step == 0:
            tensors.settle()
            optimizer.step()
    fd.barrier()
    threading.Timer(0.2, go_on).start()
    fd.shutdown()
    waited = goes_on.is_set()
    go_on()
    assert optimizer.param_groups
    return waited


def test_a_rank_that_ends_with_an_optimizer(there: Start) -> None:
    """As programs do: their model and optimizer end with the process."""
    assert there(2).run(leaves_an_optimizer) == [True, True]


def fuses() -> int:
    """A better plan moves the buckets, and a gradient with no elements is in one."""
    rank = Rank()
    tensors = Tensors(rank)
    results = []
    for on_device in (False, True):
        torch.manual_seed(1)
        layers = [torch.nn.Linear(30, 30) for _ in range(6)]
        empty = torch.nn.Parameter(torch.zeros(0))
        model = torch.nn.ModuleList([*layers, torch.nn.ParameterList([empty])])
        if on_device:
            list(parameters_on(tensors, model))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1), bucket_bytes=8000, first_bucket_bytes=1000
        )
        for step in range(4):
            optimizer.zero_grad()
            x = batch(step)[:, :30]
            for layer in [*layers[3:], *layers[:3]]:  # not the order of the parameters
                x = torch.tanh(layer(x))
            (x.sum() + empty.sum()).backward()
            tensors.settle()
            optimizer.step()
        results.append([p.detach().clone() for p in model.parameters()])
    for on_host, there in zip(*results, strict=True):
        assert torch.equal(on_host, there)
    launched = rank.machine.launched()
    del optimizer, model, layers
    gc.collect()
    rank.end()
    return launched


def test_buckets_that_move(there: Start) -> None:
    assert min(there(2).run(fuses)) > 0
