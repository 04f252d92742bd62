"""Training by way of torch.distributed over farandole equals one rank on the joined batch."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from c10d_work import gloo, ours_alone, prepare
from rank_cases import make_tests, numerics, on_ranks, told
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import farandole as fd

BATCH, WIDE = 12, 16  # of all ranks together


def model() -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Linear(WIDE, WIDE), nn.ReLU(), nn.Linear(WIDE, 300), nn.ReLU(), nn.Linear(300, 4)]
    return nn.Sequential(*layers)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    seed = torch.Generator().manual_seed(100 + step)
    return torch.randn(BATCH, WIDE, generator=seed), torch.randn(BATCH, 4, generator=seed)


def train(trained: nn.Module, optimizer: Any, mine: slice, steps: int = 4) -> None:
    for step in range(steps):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(trained(inputs[mine]), targets[mine]).backward()
        optimizer.step()


def my_part() -> slice:
    share = BATCH // dist.get_world_size()
    return slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)


def serial(optimizer: Callable[[Any], Any] | None = None) -> list[torch.Tensor]:
    alone = model()
    train(alone, (optimizer or sgd)(alone.parameters()), slice(None))
    return [p.detach() for p in alone.parameters()]


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def close(got: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    for a, b in zip(got, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def same_everywhere(parameters: list[torch.Tensor]) -> None:
    for p in parameters:
        others = [torch.empty_like(p) for _ in range(dist.get_world_size())]
        dist.all_gather(others, p.contiguous())
        assert all(torch.equal(p, other) for other in others)


# ---- DistributedDataParallel ----


def ddp(group: Any = None, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model(), process_group=group, bucket_cap_mb=0.01, **options)


@on_ranks(2, 3, 4)
def ddp_trains_as_one_rank() -> None:
    for options in (
        {},
        {"gradient_as_bucket_view": True, "broadcast_buffers": False},
        {"static_graph": True},
        {"find_unused_parameters": True},
    ):
        wrapped = ddp(**options)
        train(wrapped, sgd(wrapped.parameters()), my_part())
        got = [p.detach() for p in wrapped.parameters()]
        close(got, serial())
        same_everywhere(got)
    ours_alone()


@on_ranks(2, 3, 4)
def ddp_over_gloo_with_our_hook_trains_as_one_rank() -> None:
    import farandole.torch as hvd

    for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
        wrapped = ddp(gloo(), **options)
        wrapped.register_comm_hook(gloo(), hvd.ddp_comm_hook)
        train(wrapped, sgd(wrapped.parameters()), my_part())
        got = [p.detach() for p in wrapped.parameters()]
        close(got, serial())
        same_everywhere(got)
    wrapped = ddp(gloo())
    wrapped.register_comm_hook(3, hvd.ddp_comm_hook)
    with pytest.raises(ValueError, match="process group"):
        wrapped(batch(0)[0]).sum().backward()


def assign_data(module: nn.Module) -> None:
    for p in module.parameters():
        if p.grad is not None:
            p.grad.data = p.grad.data * 0.5


def set_storage(module: nn.Module) -> None:
    for p in module.parameters():
        if p.grad is not None:
            p.grad.set_(p.grad * 0.5)


REPLACEMENTS: dict[str, Callable[[nn.Module], object]] = {
    "p.grad.data = ...": assign_data,
    "p.grad.set_()": set_storage,
    "share_memory": lambda module: module.share_memory(),
}


def train_replacing(trained: nn.Module, change: Any, mine: slice, clears: bool) -> None:
    optimizer = sgd(trained.parameters())
    for step in range(6):
        inputs, targets = batch(step)
        optimizer.zero_grad(set_to_none=clears)
        nn.functional.mse_loss(trained(inputs[mine]), targets[mine]).backward()
        if step in (0, 2, 3):
            change(trained)
        optimizer.step()


@on_ranks(2, 3)
def our_hook_sees_bucket_views_that_a_program_replaces() -> None:
    """Where DDP over any group would step with an old gradient for ever."""
    import farandole.torch as hvd

    for name, change in REPLACEMENTS.items():
        for options in ({"gradient_as_bucket_view": True}, {}):
            for clears in (True, False):
                wrapped, alone = ddp(gloo(), **options), model()
                wrapped.register_comm_hook(gloo(), hvd.ddp_comm_hook)
                train_replacing(wrapped, change, my_part(), clears)
                train_replacing(alone, change, slice(None), clears)
                for p, q in zip(wrapped.parameters(), alone.parameters(), strict=True):
                    message = f"{name} with {options}, clears={clears}"
                    torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6, msg=message)


@on_ranks(2, 3)
def our_hook_gives_the_same_bits_for_all_buckets_and_moves_them_where_it_may() -> None:
    import farandole.torch as hvd
    from farandole.torch._c10d import shared_buckets

    results = []
    for megabytes, options in (
        (0.001, {}), (25, {}), (0.001, {"gradient_as_bucket_view": True}),
        (25, {"gradient_as_bucket_view": True}),
    ):  # fmt: skip
        before = len(shared_buckets._moved)
        wrapped = DistributedDataParallel(
            model(), process_group=gloo(), bucket_cap_mb=megabytes, **options
        )
        wrapped.register_comm_hook(gloo(), hvd.ddp_comm_hook)
        optimizer = sgd(wrapped.parameters())
        for to_none in (True, False):
            optimizer.zero_grad(set_to_none=to_none)
            train(wrapped, optimizer, my_part())
        assert (len(shared_buckets._moved) > before) == bool(options)
        with wrapped.no_sync():
            wrapped(batch(0)[0]).sum().backward()
        wrapped(batch(1)[0]).sum().backward()
        results.append([*wrapped.parameters(), *(p.grad for p in wrapped.parameters())])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


@on_ranks(2)
def ddp_with_buffers_unused_parameters_and_no_sync() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Linear(WIDE, 8), nn.BatchNorm1d(8)
            self.unused, self.last = nn.Linear(3, 3), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.last(self.norm(self.first(x)))
            return out

    import farandole.torch as hvd

    torch.manual_seed(dist.get_rank())  # DDP broadcasts
    for group in (None, gloo()):
        wrapped = DistributedDataParallel(Net(), process_group=group, find_unused_parameters=True)
        if group is not None:
            wrapped.register_comm_hook(group, hvd.ddp_comm_hook)
        inputs, targets = batch(0)
        with wrapped.no_sync():
            nn.functional.mse_loss(wrapped(inputs[my_part()]), targets[my_part()]).backward()
        nn.functional.mse_loss(wrapped(inputs[my_part()]), targets[my_part()]).backward()
        assert wrapped.module.unused.weight.grad is None
        same_everywhere([p.grad for p in wrapped.module.last.parameters()])
    ours_alone()


@on_ranks(2)
def pytorch_s_own_hooks_and_checkpointing_work() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.utils.checkpoint import checkpoint

    import farandole.torch as hvd

    for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook):
        wrapped = ddp()
        wrapped.register_comm_hook(None, hook)
        train(wrapped, sgd(wrapped.parameters()), my_part())
        same_everywhere([p.detach() for p in wrapped.parameters()])
    for reentrant in (False, True):
        for group in (None, gloo()):
            inner = model()

            class Checkpointed(nn.Module):
                def __init__(self, inner: nn.Module, reentrant: bool) -> None:
                    super().__init__()
                    self.inner, self.reentrant = inner, reentrant

                def forward(self, x: torch.Tensor) -> Any:
                    x = x.detach().requires_grad_()
                    return checkpoint(self.inner, x, use_reentrant=self.reentrant)

            wrapped = DistributedDataParallel(
                Checkpointed(inner, reentrant), process_group=group, bucket_cap_mb=0.01
            )
            if group is not None:
                wrapped.register_comm_hook(group, hvd.ddp_comm_hook)
            train(wrapped, sgd(wrapped.parameters()), my_part())
            close([p.detach() for p in inner.parameters()], serial())
    ours_alone()


@on_ranks(2)
def a_program_may_wait_for_a_future_inside_of_backward() -> None:
    seen = []

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.clone()
        seen.append(dist.all_reduce(total, async_op=True).get_future().wait())
        return total

    w = torch.ones(3, requires_grad=True)
    w.register_hook(hook)
    (w * (dist.get_rank() + 1)).sum().backward()
    assert w.grad is not None
    assert w.grad.tolist() == [3.0] * 3
    assert len(seen) == 1


@on_ranks(2)
def a_mismatch_is_raised_by_backward_itself() -> None:
    import farandole.torch as hvd

    def uneven(state: Any, bucket: Any) -> Any:
        if dist.get_rank() == 1:
            bucket.set_buffer(torch.cat([bucket.buffer(), torch.ones(1)]))
        if state is not None:
            return hvd.ddp_comm_hook(state, bucket)
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future()

    uneven.__annotations__.clear()  # DDP compares them, and these are texts
    for group in (None, gloo()):
        wrapped = DistributedDataParallel(nn.Linear(4, 4), process_group=group)
        wrapped.register_comm_hook(group, uneven)
        with pytest.raises(fd.Mismatch, match="20"):
            wrapped(torch.ones(2, 4)).sum().backward()
    dist.barrier()


@on_ranks(2, 3)
def our_hook_tells_of_a_gradient_that_is_not_finite() -> None:
    import farandole.torch as hvd

    me, last = dist.get_rank(), dist.get_world_size() - 1
    for how in "warn", "error", None:
        group: Any = dist.new_group(backend="gloo")
        wrapped = ddp(group)
        wrapped.register_comm_hook(group, hvd.ddp_comm_hook)
        optimizer = sgd(wrapped.parameters())

        def step(bad: bool, wrapped: Any = wrapped, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            inputs = batch(0)[0].clone()
            inputs[0] = math.nan if bad and me == last else 1.0
            wrapped(inputs).sum().backward()
            optimizer.step()

        before = fd.nonfinite_steps()
        with contextlib.nullcontext() if how is None else numerics(how):
            step(False)
        step(False)
        assert fd.nonfinite_steps() == before
        words = f"rank {last} has a gradient that is NaN: 'parameter "
        if how == "error":
            with pytest.raises(fd.NumericsError, match=words):
                step(True)
            assert all(bool(p.isfinite().all()) for p in wrapped.parameters())
            step(False)
            assert fd.nonfinite_steps() == before + 1
            continue
        if how is None:  # each rank for itself
            with told(int(me == last)) as texts:
                step(True)
            assert all(words in text for text in texts)
            assert fd.nonfinite_steps() == before + int(me == last)
            continue
        with told(int(me in (0, last))) as texts:
            step(True)
            step(True)
        assert all(words in text for text in texts)
        assert fd.nonfinite_steps() == before + 2


def fully_sharded(group: Any) -> nn.Module:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group, "cpu")
    sharded = model()
    for layer in sharded:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    return sharded


def fsdp(group: Any) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    cpu = torch.device("cpu")
    return FullyShardedDataParallel(model(), process_group=group, device_id=cpu)


@on_ranks(2, 3)
def our_backend_tells_of_a_gradient_that_is_not_finite() -> None:
    me, last = dist.get_rank(), dist.get_world_size() - 1
    wraps: list[Callable[[Any], nn.Module]] = [ddp, fully_sharded, fsdp]
    for wrap in wraps:
        for how in "warn", "error", None:
            with contextlib.nullcontext() if how is None else numerics(how):
                wrapped = wrap(dist.new_group())
            optimizer = sgd(wrapped.parameters())

            def step(bad: bool, wrapped: Any = wrapped, optimizer: Any = optimizer) -> None:
                optimizer.zero_grad()
                inputs = batch(0)[0].clone()
                inputs[0] = math.nan if bad and me == last else 1.0
                wrapped(inputs).sum().backward()
                optimizer.step()

            before = fd.nonfinite_steps()
            with told(0):
                step(False)
                step(False)
            words = f"rank {last} has a gradient that is NaN: 'parameter "
            if how == "error":
                with pytest.raises(fd.NumericsError, match=words):
                    step(True)
                assert all(bool(p.isfinite().all()) for p in wrapped.parameters())
                step(False)
                assert fd.nonfinite_steps() == before + 1
                continue
            blamed = me == last if how is None else me in (0, last)
            with told(int(blamed)) as texts:
                step(True)
            assert all(words in text for text in texts)
            counts = how is not None or me == last  # else each rank for itself
            assert fd.nonfinite_steps() == before + int(counts)


@on_ranks(4)
def a_rank_that_has_others_sums_is_not_blamed() -> None:
    """Sharded over one dimension of the mesh, and summed up over the other."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    sharded = model()
    fully_shard(sharded, mesh=mesh)
    optimizer = sgd(sharded.parameters())
    inputs = batch(0)[0].clone()
    inputs[0] = math.inf if dist.get_rank() == 3 else 1.0
    with told(int(dist.get_rank() == 3)):
        sharded(inputs).sum().backward()
        optimizer.step()


@on_ranks(4)
def replicas_of_a_shard_raise_with_it() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    for bad in (3,), (0, 3):
        with numerics("error"):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        sharded = model()
        fully_shard(sharded, mesh=mesh)
        optimizer = sgd(sharded.parameters())
        before = fd.nonfinite_steps()
        sharded(batch(0)[0] * (math.nan if dist.get_rank() in bad else 1.0)).sum().backward()
        with pytest.raises(fd.NumericsError, match=f"rank {bad[0]} has a gradient that is NaN"):
            optimizer.step()
        optimizer.zero_grad()
        sharded(batch(0)[0]).sum().backward()
        optimizer.step()
        assert all(bool(p.to_local().isfinite().all()) for p in sharded.parameters())  # type: ignore[attr-defined]
        assert fd.nonfinite_steps() == before + 1


@on_ranks(2)
def a_part_of_a_step_counts_that_another_rank_holds() -> None:
    """Rank 1 spoils what lies in rank 0's shard, in the first of two backwards."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    me = dist.get_rank()
    for how in "warn", None:
        with contextlib.nullcontext() if how is None else numerics(how):
            mesh = DeviceMesh.from_group(dist.new_group(), "cpu")
        layer = nn.Linear(3, 4, bias=False)
        fully_shard(layer, mesh=mesh)
        optimizer = sgd(layer.parameters())
        with told(1 if me == 1 or how else 0) as texts:
            for number in math.nan, 1.0:
                factors = torch.tensor([number if me == 1 else 1.0, 1.0, 1.0, 1.0])
                (layer(torch.ones(2, 3)) * factors).sum().backward()
            optimizer.step()
        assert all("rank 1 has a gradient that is NaN" in text for text in texts)
        with told(0):
            optimizer.zero_grad()
            layer(torch.ones(2, 3)).sum().backward()
            optimizer.step()


@on_ranks(2)
def sums_that_a_program_scatters_hide_no_gradient() -> None:
    me = dist.get_rank()
    wrapped = ddp(dist.new_group())
    optimizer = sgd(wrapped.parameters())

    def scatter(_: torch.Tensor) -> None:
        dist.reduce_scatter_tensor(torch.empty(1), torch.ones(2))

    out = wrapped(batch(0)[0] * (math.nan if me == 1 else 1.0))
    out.register_hook(scatter)
    with told(int(me == 1)):
        out.sum().backward()
        optimizer.step()


@on_ranks(2)
def a_setting_of_some_ranks_alone_asks_no_others() -> None:
    import farandole.torch as hvd

    me = dist.get_rank()
    with numerics("warn") if me == 0 else contextlib.nullcontext():
        for backend in "gloo", None:
            group: Any = dist.new_group(backend=backend)
            wrapped = ddp(group)
            if backend == "gloo":
                wrapped.register_comm_hook(group, hvd.ddp_comm_hook)
            optimizer = sgd(wrapped.parameters())
            with told(int(me == 1)):
                wrapped(batch(0)[0] * (math.nan if me == 1 else 1.0)).sum().backward()
                optimizer.step()


@on_ranks(2)
def infinities_of_a_program_are_its_own() -> None:
    """Rank 1 has some on purpose, and rank 0 a gradient that is NaN."""
    from torch.utils.checkpoint import checkpoint

    me = dist.get_rank()

    def masked(x: torch.Tensor) -> torch.Tensor:
        mask = torch.tensor([0.0, -math.inf if me else 0.0])
        dist.all_reduce(mask)  # in forward, and again in backward
        return (x + mask).softmax(0)

    def reduced(grad: torch.Tensor) -> torch.Tensor:
        most = torch.tensor([math.inf if me else 0.0])
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        total = grad * (1.0 if me else math.nan)
        dist.all_reduce(total)
        return total

    weights = torch.ones(2, requires_grad=True)
    weights.register_hook(reduced)
    optimizer = sgd([weights])
    with told(int(me == 0)):
        dist.all_reduce(torch.tensor([math.nan if me else 0.0]))
        checkpoint(masked, weights, use_reentrant=False)[0].backward()  # type: ignore[no-untyped-call]
        optimizer.step()


@on_ranks(2)
def a_step_of_ddp_that_a_scaler_skips_is_none() -> None:
    import farandole.torch as hvd

    for fused, backend in (False, "gloo"), (True, "gloo"), (False, None), (True, None):
        with numerics("error"):
            group: Any = dist.new_group(backend=backend)
            wrapped = ddp(group)
        if backend == "gloo":
            wrapped.register_comm_hook(group, hvd.ddp_comm_hook)
        optimizer = torch.optim.Adam(wrapped.parameters(), fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
        before = fd.nonfinite_steps()
        with numerics("error"), told(0):
            for _ in range(2):
                optimizer.zero_grad()
                scaler.scale(wrapped(batch(0)[0] * 1e3).sum()).backward()
                scaler.step(optimizer)
                scaler.update()
        assert scaler.get_scale() < 2.0**127
        assert fd.nonfinite_steps() == before


# ---- the rest of torch.distributed ----


@on_ranks(2, 4)
def fully_shard_trains_as_one_rank() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    size = dist.get_world_size()
    meshes = [init_device_mesh("cpu", (size,))]
    if size == 4:  # replicated over one dimension, sharded over the other
        meshes.append(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    for mesh in meshes:
        sharded = model()
        for layer in sharded:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        train(sharded, sgd(sharded.parameters()), my_part())
        close([p.full_tensor().detach() for p in sharded.parameters()], serial())
    ours_alone()


@on_ranks(2, 4)
def fsdp_trains_as_one_rank() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        sharded = FullyShardedDataParallel(
            model(), sharding_strategy=strategy, device_id=torch.device("cpu")
        )
        train(sharded, sgd(sharded.parameters()), my_part())
        with FullyShardedDataParallel.summon_full_params(sharded):
            close(
                [p.detach().view(-1) for p in sharded.parameters()], [p.view(-1) for p in serial()]
            )
    ours_alone()


@on_ranks(2, 3)
def zero_redundancy_optimizer_trains_as_one_rank() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def zero(parameters: Any) -> Any:
        return ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=0.01)

    wrapped = ddp()
    optimizer = zero(wrapped.parameters())
    train(wrapped, optimizer, my_part())
    close(
        [p.detach() for p in wrapped.parameters()],
        serial(lambda p: torch.optim.Adam(p, lr=0.01)),
    )
    optimizer.consolidate_state_dict(0)
    if dist.get_rank() == 0:
        assert len(optimizer.state_dict()["state"]) == 6
    ours_alone()


@on_ranks(2)
def distributed_sampler_and_join_share_the_data() -> None:
    from torch.distributed.algorithms.join import Join
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    dataset = TensorDataset(torch.arange(10.0))
    loader = DataLoader(dataset, batch_size=1, sampler=DistributedSampler(dataset, shuffle=False))
    seen = torch.cat([row for (row,) in loader])
    everyones = [torch.empty(5), torch.empty(5)]
    dist.all_gather(everyones, seen)
    assert sorted(torch.cat(everyones).tolist()) == list(range(10))
    wrapped = ddp()  # ranks with different numbers of batches
    with Join([wrapped]):
        for step in range(2 + dist.get_rank()):
            wrapped(batch(step)[0]).sum().backward()
    same_everywhere([p.detach() for p in wrapped.parameters()])
    ours_alone()


@on_ranks(2)
def functional_collectives_run_eagerly_and_compiled() -> None:
    from torch.distributed import _functional_collectives as functional

    size, rank = dist.get_world_size(), dist.get_rank()
    everyone = dist.group.WORLD

    def program(x: torch.Tensor) -> list[torch.Tensor]:
        total = functional.all_reduce(x, "sum", everyone)
        rows = functional.all_gather_tensor(x, 0, everyone)
        part = functional.reduce_scatter_tensor(rows, "sum", 0, everyone)
        turned = functional.all_to_all_single(rows, None, None, everyone)
        many = functional.all_reduce_coalesced([x, 2 * x], "avg", everyone)
        told = functional.broadcast(x, 1, everyone)
        return [torch.as_tensor(t + 0) for t in (total, rows, part, turned, *many, told)]

    x = torch.ones(4) * (rank + 1)
    right = [
        [3.0] * 4, [1.0] * 4 + [2.0] * 4, [size * (rank + 1.0)] * 4, [rank + 1.0] * 8,
        [1.5] * 4, [3.0] * 4, [2.0] * 4,
    ]  # fmt: skip
    assert [t.tolist() for t in program(x)] == right
    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    assert [t.tolist() for t in compiled(x)] == right

    @torch.compile(backend="aot_eager", fullgraph=True)
    def in_place(y: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(y)
        return y + 1

    assert in_place(torch.ones(2)).tolist() == [3.0, 3.0]
    net = DistributedDataParallel(model())
    step: Any = torch.compile(net, backend="aot_eager")
    step(batch(0)[0][my_part()]).sum().backward()
    same_everywhere([p.grad for p in net.parameters()])
    ours_alone()


@on_ranks(2)
def compiled_functions_call_collectives_as_over_gloo() -> None:
    rank = dist.get_rank()

    def exchange(x: torch.Tensor, group: Any) -> torch.Tensor:
        dist.broadcast(x, 1, group=group)
        y = x * (rank + 2)
        dist.barrier(group)
        dist.all_reduce(y, group=group)
        work = dist.all_reduce(y, group=group, async_op=True)
        work.wait()
        parts = [torch.empty_like(x), torch.empty_like(x)]
        dist.all_gather(parts, x + y + rank, group=group)
        if rank == 0:
            dist.send(y, 1, group=group)
        else:
            dist.recv(x, 0, group=group)
        dist.scatter(y, parts if rank == 0 else None, src=0, group=group)
        return torch.stack(parts) + x + y

    for backend in ("eager", "aot_eager"):
        found = []
        for group in (gloo(), dist.group.WORLD):
            torch._dynamo.reset()
            compiled: Any = torch.compile(exchange, backend=backend)
            found.append([compiled(torch.ones(3) * (rank + step), group) for step in (1, 2)])
        assert torch.equal(torch.stack(found[0]), torch.stack(found[1]))
    ours_alone()


@on_ranks(2)
def compiled_ddp_trains_as_over_gloo() -> None:
    """Its buffers are broadcast within the forward pass that is compiled."""
    import farandole.torch as hvd

    def gradients(group: Any, backend: str, *, synchronized: bool) -> torch.Tensor:
        torch.manual_seed(3)
        net: nn.Module = nn.Sequential(nn.Linear(WIDE, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        if synchronized:
            net = hvd.convert_sync_batchnorm(net)
        torch._dynamo.reset()
        step: Any = torch.compile(
            DistributedDataParallel(net, process_group=group), backend=backend
        )
        for i in range(2):
            step(batch(i)[0][my_part()]).square().sum().backward()
        flat = [p.grad for p in net.parameters()] + [b.float() for b in net.buffers()]
        return torch.cat([t.reshape(-1) for t in flat if t is not None])

    for synchronized in (False, True):
        over_gloo = gradients(gloo(), "eager", synchronized=synchronized)
        for backend in ("eager", "aot_eager"):
            ours = gradients(dist.group.WORLD, backend, synchronized=synchronized)
            torch.testing.assert_close(ours, over_gloo)
    ours_alone()


@on_ranks(2)
def copies_of_models_can_be_trained_in_one_backward() -> None:
    one, two = ddp(), ddp()
    copy.deepcopy(one.module)
    x = batch(0)[0][my_part()]
    (one(x).sum() + two(x).sum()).backward()
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    same_everywhere([p.grad for p in two.parameters()])


@on_ranks(2)
def zz_sparse_gradients_go_past_our_hook_and_are_counted() -> None:
    """Last: others expect that nothing has been counted."""
    import farandole.torch as hvd
    from farandole.torch.distributed import fallbacks

    def gradients(group: Any, *, hooked: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        words = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 2))
        wrapped = DistributedDataParallel(words, process_group=group)
        if hooked:
            wrapped.register_comm_hook(group, hvd.ddp_comm_hook)
        wrapped(torch.tensor([dist.get_rank(), 5])).square().sum().backward()
        return [p.grad.to_dense() for p in words.parameters() if p.grad is not None]

    expected = gradients(gloo(), hooked=False)
    for count, group in enumerate((gloo(), dist.group.WORLD), start=1):
        torch.testing.assert_close(gradients(group, hooked=True), expected)
        assert fallbacks() == {"all_reduce of sparse tensors": count}


@on_ranks(2)
def zz_sparse_gradients_that_are_not_finite_are_told_of() -> None:
    import farandole.torch as hvd

    bad = math.nan if dist.get_rank() == 1 else 1.0
    for hooked in False, True:
        words = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 2))
        group: Any = dist.new_group(backend="gloo" if hooked else None)
        wrapped = DistributedDataParallel(words, process_group=group)
        if hooked:
            wrapped.register_comm_hook(group, hvd.ddp_comm_hook)
        optimizer = torch.optim.SparseAdam(list(words[0].parameters()))
        rest = sgd(words[1].parameters())
        with told(dist.get_rank()) as texts:
            (wrapped(torch.tensor([1, 5])) * bad).sum().backward()
            optimizer.step()
            rest.step()
        assert all("rank 1 has a gradient that is NaN" in text for text in texts)


test_on_ranks = make_tests(__name__, "torch", prepare=prepare)
