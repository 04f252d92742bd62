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
from test_torch_sharded import batch, check_same_everywhere, loss_of, make, sharded
from test_torch_sharded import train as train_shards
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


def train_sharded(kind: str) -> bytes:
    """The weights, and all ranks' state."""
    begin_torch()
    model = make()
    optimizer = sharded(model, kind)
    train_shards(model, optimizer, range(4), torch.float32)
    state = optimizer.state_dict()["state"]
    tensors = [t for each in state.values() for t in each.values() if isinstance(t, torch.Tensor)]
    assert tensors
    everything = [t.detach().contiguous() for t in (*model.parameters(), *tensors)]
    return b"".join(t.numpy().tobytes() for t in everything)


@pytest.mark.parametrize("parts", ["1,1", "0:1:0"])
@pytest.mark.parametrize("kind", ["momentum", "adamw"])
def test_sharded_updates_are_equal_bit_for_bit(spawn: Spawn, parts: str, kind: str) -> None:
    size = 2 if parts == "1,1" else 3
    environments: list[dict[str, Any]] = [{}, split(parts)]
    everything = {
        bits
        for env in environments
        for bits in spawn(size, "torch", env=env).run(train_sharded, kind)
    }
    assert len(everything) == 1


def clips() -> list[float]:
    """A norm is summed up in pieces, which are others over hosts."""
    begin_torch()
    model = make()
    optimizer = sharded(model, "momentum")
    norms = []
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, batch(step, hvd.rank())).backward()
        norms += [
            float(optimizer.clip_grad_norm_(0.1)),
            float(optimizer.clip_grad_norm_(1e9, "inf")),
        ]
        optimizer.step()
    return norms


def test_sharded_updates_clip_alike(spawn: Spawn) -> None:
    alone = spawn(2, "torch").run(clips)[0]
    for norms in spawn(2, "torch", env=split("1,1")).run(clips):
        assert norms == pytest.approx(alone, rel=1e-5)


def gives_up() -> None:
    """A rank that refuses its step ends it on all; the next one is taken."""
    begin_torch()
    model = make()
    optimizer = sharded(model)
    loss_of(model, batch(0, hvd.rank())).backward()
    before = [p.detach().clone() for p in model.parameters()]
    if hvd.rank() == 1:
        optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(fd.InvalidArgument if hvd.rank() == 1 else fd.RemoteError):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    optimizer.param_groups[0]["amsgrad"] = False
    optimizer.step()
    check_same_everywhere(model)


def test_a_sharded_step_that_one_rank_refuses_changes_nothing(spawn: Spawn) -> None:
    spawn(2, "torch", env=split("1,1")).run(gives_up)


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
