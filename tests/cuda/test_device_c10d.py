"""torch.distributed over farandole with tensors of devices, by ranks over the fake driver."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_device import Rank
from fake_tensors import Tensors

import farandole as fd
from farandole.torch._c10d import tensors as of_callers
from farandole.torch.distributed import fallbacks
from harness import World

Start = Callable[..., World]
Put = Callable[[torch.Tensor], torch.Tensor]


def tensor(*shape: int) -> torch.Tensor:
    values = torch.arange(torch.Size(shape).numel(), dtype=torch.float32) % 61
    return (values + 10 * dist.get_rank()).view(shape)


def every_collective(put: Put, n: int) -> list[torch.Tensor]:
    """The tensors of every collective, inputs and outputs, on the device where `put` puts them."""
    p, r = dist.get_world_size(), dist.get_rank()
    found = []

    def room(*shape: int) -> torch.Tensor:
        found.append(put(torch.zeros(shape)))
        return found[-1]

    def given(*shape: int) -> torch.Tensor:
        found.append(put(tensor(*shape)))
        return found[-1]

    dist.all_reduce(given(n, 3), dist.ReduceOp.AVG)
    dist.broadcast(given(n), p - 1)
    dist.reduce(given(n), 0)
    parts = [room(n) for _ in range(p)]
    dist.all_gather(parts, given(n))
    dist.all_gather_into_tensor(room(p * n), given(n))
    dist.reduce_scatter_tensor(room(n), given(p * n))
    dist.all_to_all_single(room(p * n), given(p * n))
    dist.gather(given(n), [room(n) for _ in range(p)] if r == 0 else None, dst=0)
    dist.scatter(room(n), [given(n) for _ in range(p)] if r == 0 else None, src=0)
    work: Any = dist.isend(given(n), (r + 1) % p)
    dist.recv(room(n), (r - 1) % p)
    work.wait()
    early: Any = dist.irecv(room(n), tag=4)  # from any rank, before one has sent
    dist.barrier()
    dist.send(given(n), (r + 1) % p, tag=4)
    early.wait()
    assert early.source_rank() == (r - 1) % p
    work = dist.isend(given(4, 5), (r + 1) % p, tag=5)
    assert dist.recv(room(5, 4).t(), tag=5) == (r - 1) % p
    work.wait()
    dist.all_reduce(given(5, 4).t())
    with dist._coalescing_manager(async_ops=True) as block:
        for k in range(3):
            dist.all_reduce(given(n + k))
    block.wait()
    works: Any = [dist.all_reduce(given(n), async_op=True) for _ in range(3)]
    assert works[1].get_future().wait() is not None
    for each in works:
        each.wait()
        each.wait()  # for another stream
    return found


def in_a_graph() -> None:
    """Collectives of torch.distributed become part of it, also those that are waited for, and whose
    futures are."""
    rank = Rank()
    tensors = Tensors(rank)
    dist.init_process_group("farandole", timeout=timedelta(seconds=200))
    p, n = dist.get_world_size(), 1000
    x, y = tensors.put(tensor(n)), tensors.put(tensor(n))
    whole, z = tensors.put(torch.zeros(p * n)), tensors.put(tensor(2, n))
    tensors.captures = True
    with rank.machine.captured() as graph:
        dist.all_reduce(x)
        work: Any = dist.all_gather_into_tensor(whole, x, async_op=True)
        work.wait()
        work = dist.all_reduce(y, dist.ReduceOp.MAX, async_op=True)
        assert work.get_future().wait() is not None
        with dist._coalescing_manager():
            dist.all_reduce(z[0])
            dist.all_reduce(z[1])
        with pytest.raises(fd.InvalidArgument, match="send cannot become part of one"):
            dist.send(y, (dist.get_rank() + 1) % p)
    tensors.captures = False
    for factor in (1.0, 2.0):
        x.copy_(factor * tensor(n))
        y.copy_(factor * tensor(n))
        z.copy_(factor * tensor(2, n))
        rank.machine.launch(graph)
        tensors.settle()
        expected = sum(factor * ((torch.arange(n) % 61).float() + 10 * r) for r in range(p))
        assert torch.equal(x, expected)
        assert torch.equal(whole, expected.repeat(p))
        assert torch.equal(z[0], expected)
        assert torch.equal(y, factor * ((torch.arange(n) % 61).float() + 10 * (p - 1)))
    dist.destroy_process_group()
    rank.machine.destroy(graph)
    del x, y, z, whole, work
    rank.end()


def test_collectives_become_part_of_a_graph(by_steps: Start) -> None:
    by_steps(2).run(in_a_graph)


def as_on_the_host(sizes: list[int]) -> None:
    rank = Rank()
    tensors = Tensors(rank)
    copy_home = of_callers._copy

    def copied(home: torch.Tensor, landed: torch.Tensor) -> None:
        tensors.settle()  # PyTorch copies at once here, and not in the stream
        copy_home(home, landed)

    of_callers._copy = copied
    dist.init_process_group("farandole", timeout=timedelta(seconds=200))
    for n in sizes:
        expected = every_collective(lambda t: t, n)
        found = every_collective(tensors.put, n)
        tensors.settle()
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)
    assert tensors.streams_asked_for > 0
    assert fallbacks() == {}
    with pytest.raises(fd.InvalidArgument, match="a tensor is on meta"):
        dist.all_reduce(torch.empty(3, device="meta"))
    del found, one
    dist.destroy_process_group()
    rank.end()


def test_what_comes_of_collectives(start: Start) -> None:
    start(2, "torch", FAKE_CUDA_JITTER="5").run(as_on_the_host, [3, 40_001])


@pytest.mark.parametrize("path", ["step", "lanes"])
def test_what_comes_of_collectives_there(by_steps: Start, path: str) -> None:
    """Also of those that are one call."""
    ranks = by_steps(2, framework="torch", FARANDOLE_DEVICE_PATH=path, FAKE_CUDA_JITTER="5")
    ranks.run(as_on_the_host, [3, 40_001])
