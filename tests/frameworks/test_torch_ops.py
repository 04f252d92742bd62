"""The collectives on tensors against torch and numpy, and the broadcasts of state."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from rank_cases import make_tests, on_ranks, refused
from torch_work import numbers, same

import farandole as fd
import farandole.torch as hvd

DTYPES = [
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8,
    torch.int8, torch.int16, torch.int32, torch.int64,
]  # fmt: skip
SHAPES = [(), (0,), (1,), (7,), (3, 5), (2, 0, 3), (4, 3, 2), (1000,)]


def of_all(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.stack([numbers(shape, dtype, r) for r in range(hvd.size())])


@on_ranks(1, 2, 3, 4)
def allreduce_is_right_for_every_dtype_and_op() -> None:
    for dtype in DTYPES:
        for shape in SHAPES:
            whole, x = of_all(shape, dtype), numbers(shape, dtype, hvd.rank())
            wide = whole.to(torch.float64)
            expected = {
                hvd.Sum: wide.sum(0),
                hvd.Average: wide.sum(0) / hvd.size(),
                hvd.Min: wide.amin(0),
                hvd.Max: wide.amax(0),
                hvd.Product: wide.prod(0),
            }
            for op, right in expected.items():
                result = hvd.allreduce(x, op=op)
                if op == hvd.Average and dtype.is_floating_point:
                    torch.testing.assert_close(result, right.to(dtype))
                else:
                    same(result, right.to(dtype))
                same(x, numbers(shape, dtype, hvd.rank()))
            y = x.clone()
            assert hvd.allreduce_(y, op=hvd.Sum) is y
            same(y, expected[hvd.Sum].to(dtype))


@on_ranks(2)
def complex_numbers_are_summed_and_broadcast() -> None:
    for dtype, shape in ((torch.complex64, (3, 2)), (torch.complex128, ())):
        x = torch.full(shape, complex(hvd.rank() + 1, -hvd.rank()), dtype=dtype)
        assert torch.equal(hvd.allreduce(x, op=hvd.Sum), torch.full_like(x, 3 - 1j))
        assert torch.equal(hvd.broadcast(x, 1), torch.full_like(x, 2 - 1j))
        assert hvd.allreduce_(x, op=hvd.Average) is x
        assert torch.equal(x, torch.full_like(x, 1.5 - 0.5j))
        refused(lambda x=x: hvd.allreduce(x, op=hvd.Max), "complex")
        refused(lambda x=x: hvd.allreduce(x.conj()), "resolve_conj")
        refused(lambda x=x: hvd.allgather(x), "complex")
        refused(lambda x=x: hvd.reducescatter(x), "complex")


@on_ranks(2, 3)
def gather_broadcast_and_reducescatter_are_right_for_every_dtype() -> None:
    for dtype in [*DTYPES, torch.bool]:
        for shape in SHAPES:
            x, rank, last = numbers(shape, dtype, hvd.rank()), hvd.rank(), hvd.size() - 1
            same(hvd.broadcast(x, last), numbers(shape, dtype, last))
            y = x.clone()
            assert hvd.broadcast_(y, 0) is y
            same(y, numbers(shape, dtype, 0))
            if not shape:
                continue
            whole = of_all(shape, dtype)
            same(hvd.allgather(x), whole.flatten(0, 1))
            if dtype != torch.bool:
                rows = whole.to(torch.float64).sum(0).to(dtype).tensor_split(hvd.size())
                same(hvd.reducescatter(x, op=hvd.Sum), rows[rank])


@on_ranks(2, 3)
def gathered_tensors_may_differ_in_their_first_dimension() -> None:
    for rows in ([3, 1, 2], [0, 2, 1], [0, 0, 0]):
        parts = [torch.full((n, 2), float(r)) for r, n in enumerate(rows[: hvd.size()])]
        same(hvd.allgather(parts[hvd.rank()]), torch.cat(parts))
        handle = hvd.allgather_async(parts[hvd.rank()])
        same(hvd.synchronize(handle), torch.cat(parts))
    refused(lambda: hvd.allgather(torch.tensor(1.0)), "0 dimensions")


@on_ranks(2)
def handles_complete_in_any_order() -> None:
    xs = [torch.full((100 * (i + 1),), float(i + hvd.rank())) for i in range(8)]
    handles = [hvd.allreduce_async(x, op=hvd.Sum, name=f"x{i}") for i, x in enumerate(xs)]
    inside = hvd.allreduce_async_(xs[0], op=hvd.Sum)
    for i in reversed(range(8)):
        same(hvd.synchronize(handles[i]), torch.full((100 * (i + 1),), 2.0 * i + 1))
    assert hvd.synchronize(inside) is xs[0]
    handle = hvd.broadcast_async_(xs[1], 1)
    assert hvd.synchronize(handle) is xs[1]
    refused(lambda: hvd.synchronize(handle), "synchronized already")
    refused(lambda: hvd.poll(handle), "synchronized already")
    handle = hvd.reducescatter_async(torch.ones(3), op=hvd.Sum)
    same(hvd.synchronize(handle), torch.full((2 - hvd.rank(),), 2.0))
    handle = hvd.broadcast_async(xs[2], 0)
    while not hvd.poll(handle):
        pass
    same(hvd.synchronize(handle), torch.full((300,), 2.0))
    hvd.barrier()


@on_ranks(2, 3)
def factors_and_compression() -> None:
    x = torch.full((5,), 1.0 + hvd.rank())
    total = sum(range(1, hvd.size() + 1))
    same(
        hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.25),
        torch.full((5,), total / 2),
    )
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        same(hvd.allreduce(x, op=hvd.Sum, compression=compression), torch.full((5,), float(total)))
        integers = torch.tensor([100_000])
        same(hvd.allreduce(integers, op=hvd.Sum, compression=compression), integers * hvd.size())
    with pytest.warns(DeprecationWarning, match="op="):
        same(hvd.allreduce(x, average=False), torch.full((5,), float(total)))
    refused(lambda: hvd.allreduce(x, average=True, op=hvd.Sum), "both given")


@on_ranks(2, 3)
def gradients_of_collectives() -> None:
    rank, size = hvd.rank(), hvd.size()
    weight = torch.arange(6.0).view(3, 2) + rank
    mean = torch.arange(6.0).view(3, 2) + (size - 1) / 2

    def gradient(result: torch.Tensor, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        (result * factor).sum().backward()
        assert x.grad is not None
        return x.grad

    def leaf(rows: int = 3) -> torch.Tensor:
        return torch.ones(rows, 2, requires_grad=True)

    x = leaf()
    torch.testing.assert_close(gradient(hvd.allreduce(x), x, weight), mean)
    x = leaf()
    torch.testing.assert_close(gradient(hvd.allreduce(x, op=hvd.Sum), x, weight), mean * size)
    x = leaf()
    result = gradient(hvd.broadcast(x, 1), x, weight)
    torch.testing.assert_close(result, mean if rank == 1 else torch.zeros(3, 2))
    x = leaf(rank + 1)
    gathered = hvd.allgather(x)
    factor = torch.arange(float(gathered.numel())).view(gathered.shape)
    begin = rank * (rank + 1) // 2
    torch.testing.assert_close(gradient(gathered, x, factor), factor[begin : begin + rank + 1])
    x = leaf()
    scattered = hvd.reducescatter(x, op=hvd.Sum)
    own = torch.full(scattered.shape, float(rank))
    rows = [torch.full_like(part, float(r)) for r, part in enumerate(x.tensor_split(size))]
    torch.testing.assert_close(gradient(scattered, x, own), torch.cat(rows) * size)
    x = leaf()
    refused(hvd.allreduce(x, op=hvd.Max).sum().backward, "op=Max has no gradient")


@on_ranks(2)
def bad_input_is_refused_before_anything_is_sent() -> None:
    good = torch.ones(3)
    bad = {
        "not contiguous": torch.ones(4, 4).t()[1:],
        "sparse": torch.ones(3, 3).to_sparse(),
        "meta": torch.ones(3, device="meta"),
        "list": [1.0],
    }
    for pattern, x in bad.items():
        for call in (hvd.allreduce, hvd.allreduce_async_, hvd.allgather, hvd.reducescatter):
            refused(lambda c=call, x=x: c(x), pattern)
        refused(lambda x=x: hvd.broadcast(x, 0), pattern)
    refused(lambda: hvd.broadcast(good, 2), "root 2")
    refused(lambda: hvd.allreduce(good, op=17), "unknown")
    refused(lambda: hvd.reducescatter(good, op=hvd.Min), "Average or Sum")
    refused(lambda: hvd.reducescatter(torch.tensor(1.0)), "no dimension")
    refused(lambda: hvd.allreduce(good, process_set=[0]), "is no ProcessSet")
    refused(lambda: hvd.allreduce(good, process_set=hvd.ProcessSet([0])), "not registered")
    refused(lambda: hvd.ProcessSet([0, 0]), "different ranks")
    refused(lambda: hvd.add_process_set([0, 1]), "a process set of all ranks exists")
    refused(lambda: hvd.add_process_set([5]), "does not exist")
    for grouped in (
        hvd.grouped_allreduce, hvd.grouped_allreduce_async, hvd.grouped_allreduce_,
        hvd.grouped_reducescatter, hvd.grouped_allgather, hvd.grouped_allgather_async,
    ):  # fmt: skip
        refused(lambda call=grouped: call([]), "empty")
    refused(lambda: hvd.alltoall(good), "3 rows, which 2 ranks do not divide")
    refused(lambda: hvd.alltoall(good, splits=[1, 1]), "sum to 2")
    refused(lambda: hvd.alltoall(good, splits=[1.5, 1.5]), "not a list of numbers")
    refused(lambda: hvd.alltoall(good, splits=torch.ones(2)), "integers")
    refused(lambda: hvd.synchronize("x"), "not a handle")
    negated = torch._neg_view(torch.ones(3))
    refused(lambda: hvd.allreduce_async_(negated, name="negated", op=hvd.Sum), "a lazy view")
    refused(lambda: fd.all_reduce(negated), "input is a negated view")
    refused(lambda: fd.all_reduce(good, out=negated), "output is a negated view")
    refused(lambda: fd.scatter(torch.ones(2, dtype=torch.bfloat16)), "scatter")
    refused(lambda: fd.scatter(torch.ones(2, requires_grad=True)), "scatter")
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    refused(lambda: hvd.allreduce_async_(freed, name="freed", op=hvd.Sum), "has no memory")
    refused(lambda: fd.all_reduce(freed), "input has no memory")
    refused(lambda: fd.all_reduce(good, out=freed), "output has no memory")
    leaf = torch.ones(3, requires_grad=True)
    for call in (hvd.allreduce_, hvd.allreduce_async_):
        refused(lambda c=call: c(leaf), "in place on a tensor that requires grad")
    refused(lambda: hvd.broadcast_(leaf, 0), "in place on a tensor that requires grad")
    with torch.no_grad():
        hvd.broadcast_(leaf, 0)
    same(hvd.allreduce(good, op=hvd.Sum), good * 2)


@on_ranks(2)
def in_place_results_are_seen_by_autograd() -> None:
    x = torch.ones(3)
    w = torch.ones(3, requires_grad=True)
    loss = (w * x).sum()
    hvd.allreduce_(x, op=hvd.Sum)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@on_ranks(2, 3)
def disagreement_is_named_and_the_next_call_works() -> None:
    rank = hvd.rank()
    calls: list[Callable[[], Any]] = [
        lambda: hvd.allreduce(torch.ones(2, 3) if rank else torch.ones(3, 2)),
        lambda: hvd.allreduce(torch.ones(4, dtype=torch.float64 if rank else torch.float32)),
        lambda: hvd.allreduce(torch.ones(4), op=hvd.Sum if rank else hvd.Max),
        lambda: hvd.grouped_allreduce([torch.ones(4)] * (1 + rank)),
        lambda: hvd.reducescatter(torch.ones(4, 2 + rank)),
        lambda: hvd.alltoall(torch.ones(2 * hvd.size(), 2 + rank)),
        lambda: hvd.allreduce(torch.ones(4), prescale_factor=1.0 + rank),
        lambda: hvd.broadcast(torch.ones(4), rank),
        lambda: hvd.allgather(torch.ones(2, 3 + rank)),
        lambda: hvd.broadcast_parameters({f"weight {rank}": torch.ones(2)}, 0),
    ]
    for call in calls:
        with pytest.raises(fd.Mismatch, match="ranks disagree"):
            call()
        same(hvd.allreduce(torch.ones(2), op=hvd.Sum), torch.full((2,), float(hvd.size())))


@on_ranks(1, 2, 3)
def objects_travel() -> None:
    obj = {"rank": hvd.rank(), "text": "x" * 1000 * hvd.rank()}
    root = hvd.size() - 1
    got = hvd.broadcast_object(obj if hvd.rank() == root else None, root, name="settings")
    assert got == {"rank": root, "text": "x" * 1000 * root}
    assert [o["rank"] for o in hvd.allgather_object(obj)] == list(range(hvd.size()))


@on_ranks(2)
def parameters_are_broadcast() -> None:
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3))
    if hvd.rank() == 1:
        model = model.to(memory_format=torch.channels_last)
    for params in (model.state_dict(), model.named_parameters(), list(model.parameters())):
        hvd.broadcast_parameters(params, root_rank=0)
        for value in model.state_dict().values():
            both = hvd.allgather(value.contiguous()[None])
            assert torch.equal(both[0], both[1])
        with torch.no_grad():
            model[0].weight.add_(hvd.rank())
    refused(lambda: hvd.broadcast_parameters(3, 0), "is an int")
    refused(lambda: hvd.broadcast_parameters(torch.ones(2), 0), "is a Tensor")


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
    "adam": lambda p, lr: torch.optim.Adam(p, lr=lr, amsgrad=True),
    "adamw": lambda p, lr: torch.optim.AdamW(p, lr=lr, fused=True),
    "tensor lr": lambda p, lr: torch.optim.Adam(p, lr=torch.tensor(lr)),
}


@on_ranks(2)
def optimizer_state_is_broadcast_to_fresh_optimizers() -> None:
    for name, make in OPTIMIZERS.items():
        for wrapped in (False, True):
            torch.manual_seed(1)
            model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.Conv2d(3, 1, 1))
            model = model.to(memory_format=torch.channels_last)
            optimizer = make(model.parameters(), 0.5 if hvd.rank() else 0.25)
            x = torch.randn(2, 2, 4, 4)
            if hvd.rank() == 0:  # has a history; the other has none
                for _ in range(2):
                    model(x).square().mean().backward()
                    optimizer.step()
                optimizer.param_groups[0]["lr"] *= 0.5
            before = [p.detach().clone() for p in model.parameters()]
            if wrapped:
                optimizer = hvd.DistributedOptimizer(optimizer)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            for p, q in zip(model.parameters(), before, strict=True):
                assert torch.equal(p, q), "a step was taken"
            states = hvd.allgather_object(optimizer.state_dict())
            assert states[0]["param_groups"] == states[1]["param_groups"]
            assert float(states[1]["param_groups"][0]["lr"]) == 0.125, name
            assert states[0]["state"].keys() == states[1]["state"].keys()
            assert len(states[1]["state"]) == 4
            for i, values in states[0]["state"].items():
                for key, value in values.items():
                    other = states[1]["state"][i][key]
                    if isinstance(value, torch.Tensor):
                        same(value, other)
                        assert value.stride() == other.stride()
                    else:
                        assert value == other
            optimizer.zero_grad()
            hvd.broadcast_parameters(model.state_dict(), 0)
            model(x).square().mean().backward()
            optimizer.step()
            weights = hvd.allgather_object([p.detach() for p in model.parameters()])
            for a, b in zip(*weights, strict=True):
                assert torch.equal(a, b), "they go on alike"


@on_ranks(2)
def different_optimizers_are_named() -> None:
    model = torch.nn.Linear(2, 2)
    kind = torch.optim.SGD if hvd.rank() else torch.optim.Adam
    with pytest.raises(fd.Mismatch, match="rank 0: Adam; rank 1: SGD"):
        hvd.broadcast_optimizer_state(kind(model.parameters(), lr=0.1), 0)
    refused(
        lambda: hvd.broadcast_optimizer_state(torch.optim.LBFGS(model.parameters()), 0), "LBFGS"
    )


@on_ranks(1, 2, 3)
def groups_gather_scatter_and_exchange() -> None:
    rank, size = hvd.rank(), hvd.size()
    xs = [torch.full((3,), rank + 1.0), torch.full((2, 2), rank + 1), torch.zeros(0)]
    total = size * (size + 1) // 2
    for result, x in zip(hvd.grouped_allreduce(xs, op=hvd.Sum), xs, strict=True):
        same(result, torch.full_like(x, total))
    handle = hvd.grouped_allreduce_async_(xs, op=hvd.Sum, name="group")
    results = hvd.synchronize(handle)
    assert all(a is b for a, b in zip(results, xs, strict=True))
    same(xs[1], torch.full((2, 2), total))
    gathered = hvd.grouped_allgather([torch.full((rank, 2), rank), torch.ones(1)])
    same(gathered[0], torch.cat([torch.full((r, 2), r) for r in range(size)]))
    same(gathered[1], torch.ones(size))
    parts = hvd.grouped_reducescatter([torch.ones(size + 1), torch.ones(size, 2)], op=hvd.Sum)
    same(parts[0], torch.full((2 if rank == 0 else 1,), float(size)))
    same(parts[1], torch.full((1, 2), float(size)))
    for dtype in [*DTYPES, torch.bool]:
        splits = [(rank + r) % 3 for r in range(size)]
        rows = torch.full((sum(splits), 2), rank % 2).to(dtype)
        result, received = hvd.alltoall(rows, splits=torch.tensor(splits))
        assert received.tolist() == splits
        same(
            result,
            torch.tensor([r % 2 for r in range(size)])
            .to(dtype)
            .repeat_interleave(received.long())[:, None]
            .repeat(1, 2),
        )
    same(hvd.alltoall(torch.arange(size)), torch.full((size,), rank))
    assert hvd.join() in range(size)


@on_ranks(2, 3)
def gradients_of_groups_and_exchanges() -> None:
    rank, size = hvd.rank(), hvd.size()
    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    a, b = hvd.grouped_allreduce([x, y], op=hvd.Sum)
    (a * (rank + 1) + b * 2 * (rank + 1)).sum().backward()
    total = size * (size + 1) / 2
    torch.testing.assert_close(x.grad, torch.full((2,), total))
    torch.testing.assert_close(y.grad, torch.full((2,), 2 * total))
    x = torch.ones(size, requires_grad=True)
    result, _ = hvd.alltoall(x, splits=[1] * size)
    (result * rank).sum().backward()
    torch.testing.assert_close(x.grad, torch.arange(float(size)))
    x = torch.ones(rank + 1, 2, requires_grad=True)
    (hvd.grouped_allgather([x])[0] * 3).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((rank + 1, 2), 3.0))
    x = torch.ones(size, requires_grad=True)
    hvd.grouped_reducescatter([x], op=hvd.Sum)[0].sum().backward()
    torch.testing.assert_close(x.grad, torch.full((size,), float(size)))


@on_ranks(2, 3)
def names_meet_in_any_order() -> None:
    rank, size = hvd.rank(), hvd.size()
    total = size * (size + 1) // 2
    xs = [torch.full((10 * i + 1,), rank + 1.0) for i in range(20)]
    order = list(range(20)) if rank % 2 else list(reversed(range(20)))
    for step in range(3):
        for x in xs:
            x.fill_(rank + 1)
        handles = {i: hvd.allreduce_async_(xs[i], name=f"x{i}", op=hvd.Sum) for i in order}
        gathered = hvd.allgather_async(torch.full((rank,), step), name="x0")  # of another kind
        refused(lambda: hvd.allreduce_async_(xs[1], name="x1"), "'x1' is in flight already")
        for i in range(20):
            assert hvd.synchronize(handles[i]) is xs[i]
            same(xs[i], torch.full((10 * i + 1,), float(total)))
        assert hvd.synchronize(gathered).numel() == size * (size - 1) // 2


@on_ranks(3)
def process_sets_have_operations_of_their_own() -> None:
    rank = hvd.rank()
    low = hvd.add_process_set([1, 0])
    high = hvd.ProcessSet([1, 2])
    assert (high.process_set_id, high.size(), high.rank()) == (None, None, None)
    assert hvd.add_process_set(high) is high
    assert (low.ranks, low.process_set_id, low.size()) == ([0, 1], 1, 2)
    refused(lambda: hvd.add_process_set([2, 1]), "the same ranks exists")
    assert hvd.global_process_set.included()
    for ps in (low, high) if rank == 0 else (high, low):
        assert ps.included() == (rank in ps.ranks)
        if not ps.included():
            refused(lambda ps=ps: hvd.allreduce(torch.ones(1), process_set=ps), "is not in process")
            refused(ps.rank, "is not in")
            continue
        assert ps.rank() == ps.ranks.index(rank)
        x = torch.full((3, 2), float(rank), requires_grad=True)
        result = hvd.allreduce(x, name="x", process_set=ps)
        same(result.detach(), torch.full((3, 2), sum(ps.ranks) / 2))
        result.sum().backward()
        torch.testing.assert_close(x.grad, torch.ones(3, 2))
        same(hvd.allgather(torch.tensor([rank]), process_set=ps), torch.tensor(ps.ranks))
        same(
            hvd.broadcast(torch.tensor(rank), ps.ranks[1], process_set=ps),
            torch.tensor(ps.ranks[1]),
        )
        rows = hvd.reducescatter(torch.ones(3), op=hvd.Sum, process_set=ps)
        same(rows, torch.full((2 - ps.rank(),), 2.0))
        refused(
            lambda ps=ps: hvd.broadcast(torch.ones(1), 2 - ps.ranks[0] * 2, process_set=ps),
            "not a rank of its process set",
        )
        hvd.barrier(process_set=ps)
    assert hvd.remove_process_set(low)
    assert not hvd.remove_process_set(low)
    assert not hvd.remove_process_set(hvd.global_process_set)
    refused(lambda: hvd.allreduce(torch.ones(1), process_set=low), "not registered")
    if rank > 0:
        same(hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=high), torch.full((1,), 2.0))
    hvd.barrier()


@on_ranks(1, 2)
def init_and_shutdown_can_be_repeated() -> None:
    size = hvd.size()
    hvd.shutdown()
    assert not hvd.is_initialized()
    with pytest.raises(ValueError, match="init"):
        hvd.allreduce(torch.ones(1))
    hvd.init()
    assert hvd.size() == size == hvd.local_size()
    assert hvd.rank() == hvd.local_rank()
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    same(hvd.allreduce(torch.ones(1), op=hvd.Sum), torch.full((1,), float(size)))


test_on_ranks = make_tests(__name__, "torch")


def test_importing_farandole_does_not_import_torch() -> None:
    code = "import sys, farandole; farandole.init(); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
