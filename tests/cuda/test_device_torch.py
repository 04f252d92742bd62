"""farandole.torch's operations on tensors of devices, by ranks over the fake driver: what comes of
them is what comes of CPU tensors, and lies where the tensor lies."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from fake_device import Rank
from fake_tensors import Tensors, parameters_on

import farandole as fd
import farandole.torch as hvd
from farandole.torch import adasum
from farandole.torch._operations import calls
from harness import World

Start = Callable[..., World]


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.arange(torch.Size(shape).numel(), dtype=torch.float64) % 61
    return (values + 10 * hvd.rank()).to(dtype).view(shape)


def operations(sizes: list[int]) -> None:
    rank = Rank()
    tensors = Tensors(rank)
    p, r = hvd.size(), hvd.rank()

    def same(call: Callable[[Any], Any], *inputs: torch.Tensor) -> None:
        """The call on one tensor or many, out of place, gives the result of the host."""
        there = [tensors.put(x) for x in inputs]
        expected = call(inputs[0] if len(inputs) == 1 else list(inputs))
        results = call(there[0] if len(there) == 1 else there)
        tensors.settle()
        if isinstance(expected, torch.Tensor):
            expected, results = [expected], [results]
        for result, wanted in zip(results, expected, strict=True):
            assert torch.equal(result, wanted)
            assert result.dtype == wanted.dtype
            if wanted.numel() > 0 and wanted.dtype != torch.int32:  # received splits: the host's
                assert tensors.device_of(result) == 0
        for x, before in zip(there, inputs, strict=True):
            assert torch.equal(x, before)

    for n in sizes:
        x = tensor(n, 3)
        same(lambda t: hvd.allreduce(t, name="x"), x)
        same(lambda t: hvd.allreduce(t, op=hvd.Max), tensor(n, dtype=torch.int64))
        same(lambda t: hvd.allreduce(t, compression=hvd.Compression.none), x.to(torch.bfloat16))
        same(lambda t: hvd.grouped_allreduce(t, op=hvd.Sum), x, tensor(7), tensor(n).double())
        same(lambda t: hvd.broadcast(t, p - 1, "b"), x)
        same(lambda t: hvd.allgather(t, "g"), tensor(n + r, 2))
        same(hvd.grouped_allgather, tensor(r, 2), x)
        same(hvd.reducescatter, x)
        same(hvd.grouped_reducescatter, x, tensor(n))
        same(hvd.alltoall, tensor(p * n, 2))
        splits = [n + i for i in range(p)]
        same(partial(hvd.alltoall, splits=splits), tensor(sum(splits)))
        for call in (hvd.allreduce_, lambda t: hvd.broadcast_(t, 0)):
            there = tensors.put(x)
            assert call(there) is there
            tensors.settle()
            assert torch.equal(there, call(x.clone()))
    handles = [hvd.allreduce_async_(tensors.put(tensor(n)), name=f"{n}") for n in sizes]
    for n, handle in zip(sizes, handles, strict=True):
        result = hvd.synchronize(handle)
        tensors.settle()
        assert torch.equal(result, hvd.allreduce(tensor(n)))
    state = {"w": tensors.put(tensor(4, 4)), "b": tensor(3), "none": None}
    hvd.broadcast_parameters(state, root_rank=p - 1)
    tensors.settle()
    assert torch.equal(state["w"] % 61, (tensor(4, 4) - 10 * r + 10 * (p - 1)) % 61)
    del state, handles, handle, result, there
    assert tensors.streams_asked_for > 0
    rank.end()


def test_operations(start: Start) -> None:
    start(3, "torch", FAKE_CUDA_JITTER="3").run(operations, [2, 40_001])


def state_of_an_optimizer() -> None:
    rank = Rank()
    tensors = Tensors(rank)
    layer = torch.nn.Linear(3, 2)
    parameters = list(parameters_on(tensors, layer))
    optimizer = torch.optim.Adam(parameters)
    if hvd.rank() == 0:
        for p in parameters:
            moments = {key: tensors.put(tensor(*p.shape)) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[p] = {"step": torch.tensor(3.0), **moments}
        optimizer.param_groups[0]["lr"] = tensors.put(torch.tensor(0.5))
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    tensors.settle()
    for p in parameters:
        state = optimizer.state[p]
        assert tensors.device_of(state["step"]) is None
        assert torch.equal(state["exp_avg"], tensor(*p.shape) - 10 * hvd.rank())
        assert tensors.device_of(state["exp_avg"]) == tensors.device_of(p) == 0
    assert tensors.device_of(optimizer.param_groups[0]["lr"]) == 0
    rank.end()


def test_state_of_an_optimizer_lies_beside_its_parameters(start: Start) -> None:
    start(2, "torch").run(state_of_an_optimizer)


def gathered_and_then_computed() -> None:
    """Adasum, and sparse tensors."""
    rank = Rank()
    tensors = Tensors(rank)

    def fold_rows(rows: torch.Tensor) -> torch.Tensor:
        tensors.settle()  # PyTorch folds at once here, and not in the stream
        return adasum.fold_rows(rows)

    calls.fold_rows = fold_rows
    x = tensor(700, 3)
    folded = hvd.allreduce(tensors.put(x), op=hvd.Adasum)
    assert torch.equal(folded, hvd.allreduce(x, op=hvd.Adasum))
    there = tensors.put(x)
    assert hvd.allreduce_(there, op=hvd.Adasum) is there
    indices, values = torch.arange(5).view(1, 5) + hvd.rank(), tensor(5, 2)
    on_host = torch.sparse_coo_tensor(indices, values, (9, 2))
    on_device = torch.sparse_coo_tensor(indices, tensors.put(values), (9, 2))
    expected = hvd.sparse_allreduce_async(on_host, "s", op=hvd.Sum)
    result = hvd.sparse_allreduce_async(on_device, "d", op=hvd.Sum)()
    tensors.settle()
    assert torch.equal(result.to_dense(), expected().to_dense())
    assert tensors.device_of(result._values()) == 0
    del there, on_device, result
    rank.end()


def test_adasum_and_sparse_tensors(start: Start) -> None:
    start(2, "torch", FAKE_CUDA_JITTER="8").run(gathered_and_then_computed)


def gradients() -> None:
    """Gradients of operations, through autograd; some ranks' tensors lie on the host."""
    rank = Rank()
    tensors = Tensors(rank)
    for call in (
        lambda t: hvd.allreduce(t, name="a"),
        lambda t: hvd.allgather(t, "g"),
        hvd.reducescatter,
        lambda t: hvd.broadcast(t, 0),
    ):
        x = tensor(6, 2).requires_grad_()
        (call(x) ** 2).sum().backward()
        there = (tensors.put(tensor(6, 2)) if hvd.rank() == 0 else tensor(6, 2)).requires_grad_()
        result = call(there)
        tensors.settle()
        (result**2).sum().backward()
        tensors.settle()
        assert torch.equal(there.grad, x.grad)
    del there, result
    rank.end()


def test_gradients_of_operations(start: Start) -> None:
    start(2, "torch").run(gradients)


def refused() -> None:
    rank = Rank()
    tensors = Tensors(rank)
    x = tensors.put(tensor(4, 4))
    with pytest.raises(fd.InvalidArgument, match="not contiguous"):
        hvd.allreduce_(x.t())
    with pytest.raises(fd.InvalidArgument, match="is on meta; tensors are on the CPU or on a CUDA"):
        hvd.allreduce(torch.empty(3, device="meta"))
    del x
    rank.end()


def captures() -> None:
    """An operation under capture is refused on every rank before anything is sent or put into a
    stream, and works afterwards; so is a wait, and a gradient in a backward."""
    rank = Rank()
    tensors = Tensors(rank)
    x = tensors.put(tensor(40))
    total = hvd.allreduce(x, op=hvd.Sum, name="x")
    later = hvd.allreduce_async(x, op=hvd.Sum, name="y")
    while not hvd.poll(later):
        pass
    model = torch.nn.Linear(4, 1)
    parameters = list(parameters_on(tensors, model))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=1.0), named_parameters=model.named_parameters()
    )
    loss = model(torch.ones(2, 4)).sum()
    rank.machine.control.clear_log()
    tensors.captures = True
    for call in (
        partial(hvd.allreduce_, x),
        partial(hvd.grouped_allreduce, [x, x]),
        partial(hvd.allgather_async, x),
        partial(hvd.broadcast, x, 0),
        partial(hvd.synchronize, later),
        loss.backward,
    ):
        with pytest.raises(fd.InvalidArgument, match="current stream of cuda:0 is being captured"):
            call()
    tensors.captures = False
    in_streams = {"cuEventRecord", "cuStreamWaitEvent", "cuMemcpyAsync", "cuStreamWriteValue32"}
    assert not in_streams & set(rank.machine.log())
    again = hvd.allreduce(x, op=hvd.Sum, name="x")
    tensors.settle()
    assert torch.equal(again, total)
    del x, total, later, model, parameters, optimizer, loss, again, call
    rank.end()


def test_in_a_capture(start: Start) -> None:
    start(2, "torch").run(captures)


def test_refused(start: Start) -> None:
    start(1, "torch").run(refused)
