"""Training and torch.distributed over several hosts give what they give on one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from c10d_work import prepare
from rank_cases import begin_torch
from test_torch_tcp import train
from torch import nn

import farandole as fd
import farandole.torch as hvd
from harness import World, split

Spawn = Callable[..., World]


@pytest.mark.parametrize("parts", ["1,1", "2,1", "0:1:0"])
def test_steps_are_equal_bit_for_bit(spawn: Spawn, parts: str) -> None:
    size = 2 if parts == "1,1" else 3
    environments: list[dict[str, Any]] = [{}, split(parts)]
    weights = {bits for env in environments for bits in spawn(size, "torch", env=env).run(train, 3)}
    assert len(weights) == 1


def shards() -> None:
    begin_torch()
    model = nn.Linear(3, 2)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    with pytest.raises(fd.InvalidArgument, match="on one host; these are on 2"):
        hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            named_parameters=model.named_parameters(),
            sharded_update=True,
        )


def test_a_sharded_update_is_refused(spawn: Spawn) -> None:
    spawn(2, "torch", env=split("1,1")).run(shards)


def ddp(steps: int) -> bytes:
    prepare()
    torch.manual_seed(3)
    model = nn.parallel.DistributedDataParallel(nn.Linear(257, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(10 + dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 257)).square().mean().backward()
        optimizer.step()
    weights = bytes(torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().tobytes())
    dist.destroy_process_group()
    return weights


def test_ddp_meets_in_the_store_that_it_has(spawn: Spawn) -> None:
    environments: list[dict[str, Any]] = [{}, split("1,2")]
    weights = {bits for env in environments for bits in spawn(3, "torch", env=env).run(ddp, 3)}
    assert len(weights) == 1


def hears_whoever_sends(times: int) -> list[int]:
    prepare()
    rank, size = dist.get_rank(), dist.get_world_size()
    sources = []
    if rank == 0:
        got = torch.empty(1)
        for _ in range(times * (size - 1)):
            sources.append(dist.recv(got))
            assert got.item() == sources[-1]
    else:
        for _ in range(times):
            dist.send(torch.tensor([float(rank)]), 0)
    dist.barrier()
    dist.destroy_process_group()
    return sources


@pytest.mark.parametrize("parts", ["1,2", "2,1"])
def test_whoever_sends_is_heard(spawn: Spawn, parts: str) -> None:
    sources = spawn(3, "torch", env=split(parts)).run(hears_whoever_sends, 5)[0]
    assert sorted(sources) == [1] * 5 + [2] * 5


def pipeline() -> list[bytes]:
    """Two stages, each of two replicas, of which one has a stage on either host."""
    begin_torch()
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1))
    loss_fn = nn.functional.mse_loss
    model = hvd.Pipeline(layers, loss_fn=loss_fn, stages=2, micro_batches=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model.step(torch.randn(13, 5), torch.randn(13, 1))
        optimizer.step()
    state = model.state_dict(root_rank=None)
    return [bytes(each.numpy().tobytes()) for each in state.values()]


def test_a_pipeline_goes_over_hosts(spawn: Spawn) -> None:
    right = spawn(4, "torch").run(pipeline)
    assert spawn(4, "torch", env=split("1,3")).run(pipeline) == right == [right[0]] * 4
