"""torch.distributed over farandole on this rank's device: collectives, DDP, FSDP2 and CUDA graphs,
beside the same on the host or in one process. Cases of cases.py."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch_training
from cases import Differs, Skipped, asked, compared, main
from torch_training import batch, device, loss_of, mean_of_parts, network, on_host

import farandole as fd

STEPS = 4
SERIAL = "training in one process"


def begin() -> None:
    torch_training.begin()
    import torch.distributed as dist

    import farandole.torch.distributed  # noqa: F401

    dist.init_process_group("cpu:farandole" if asked.host else "cpu:farandole,cuda:farandole")


def end() -> None:
    import torch.distributed as dist

    dist.destroy_process_group()
    fd.shutdown()


def all_over_ours() -> None:
    from farandole.torch.distributed import fallbacks

    if fallbacks():
        raise Differs(f"not over farandole, but another backend: {fallbacks()}")


# ---- collectives ----


def collectives() -> str:
    mine, wanted = _collectives(device(), 5000), _collectives("cpu", 5000)
    all_over_ours()
    return compared(mine, wanted, 0.0, "the host's results") + f", {len(mine)} of them"


def _collectives(where: Any, n: int) -> list[Any]:
    import torch
    import torch.distributed as dist

    size, rank = dist.get_world_size(), dist.get_rank()
    found: list[Any] = []

    def given(*shape: int) -> Any:
        drawn = torch.Generator().manual_seed(100 * len(found) + rank)
        found.append(torch.randn(shape, generator=drawn).to(where))
        return found[-1]

    def room(*shape: int) -> Any:
        found.append(torch.zeros(shape, device=where))
        return found[-1]

    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
        dist.all_reduce(given(n, 3), op)
    dist.all_reduce(given(50, 40).t())
    dist.broadcast(given(n), size - 1)
    if rank == 0:
        dist.reduce(given(n), 0)
    else:  # what it leaves here means nothing
        dist.reduce(torch.randn(n, generator=torch.Generator().manual_seed(1)).to(where), 0)
    dist.all_gather_into_tensor(room(size * n), given(n))
    dist.reduce_scatter_tensor(room(n), given(size * n))
    dist.all_to_all_single(room(size * n), given(size * n))
    work: Any = dist.isend(given(n), (rank + 1) % size)
    dist.recv(room(n), (rank - 1) % size)
    work.wait()
    with dist._coalescing_manager(async_ops=True) as block:
        for k in range(3):
            dist.all_reduce(given(n + k))
    block.wait()
    works: Any = [dist.all_reduce(given(n), async_op=True) for _ in range(3)]
    works[1].get_future().wait()
    for each in works:
        each.wait()
    return on_host(found)


# ---- training ----


def _steps(model: Any, optimizer: Any, backward: Callable[[Any], Any]) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(loss_of(model, batch(step, fd.rank())))
        optimizer.step()


def _alone(half: bool = False) -> list[Any]:
    """`half`: gradients are made by a copy in bfloat16, as FSDP makes them."""
    import torch

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(STEPS):
        trained = copy.deepcopy(model).to(torch.bfloat16) if half else model

        def backward(rank: int, step: int = step, trained: Any = trained) -> None:
            loss_of(trained, batch(step, rank)).backward()

        mean_of_parts(trained.parameters(), backward)
        for p, q in zip(model.parameters(), trained.parameters(), strict=True):
            p.grad = q.grad.float()
        optimizer.step()
    return on_host(model.parameters())


def by_ddp(**options: Any) -> str:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(network(), bucket_cap_mb=0.1, **options)
    _steps(
        model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), lambda loss: loss.backward()
    )
    found = compared(on_host(model.module.parameters()), _alone(), 1e-5, SERIAL)
    all_over_ours()
    return found


def by_fsdp(half: bool = False) -> str:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = network()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if half else MixedPrecisionPolicy()
    mesh = init_device_mesh(device().type, (fd.size(),))
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    norms = []

    def backward(loss: Any) -> None:
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6))

    _steps(model, optimizer, backward)
    whole = [p.full_tensor() for p in model.parameters()]
    if not all(float(norm.full_tensor()) > 0 for norm in norms):
        raise Differs(f"norms of gradients are {norms}")
    found = compared(on_host(whole), _alone(half), 0.1 if half else 1e-5, SERIAL)
    all_over_ours()
    return found


# ---- graphs ----


class Recorded:
    """A function that runs again and again: as a CUDA graph; on the host as itself."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.replay = run
        if asked.host:
            return
        import torch

        if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
            raise Skipped(f"PyTorch {torch.__version__} does not say which stream is captured")
        with self._aside():  # what is made when a function runs first is no part of a graph
            run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        self.replay = graph.replay

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        import torch

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield
        torch.cuda.current_stream().wait_stream(stream)


def collectives_in_a_graph() -> str:
    """The graph has collectives of torch.distributed and of farandole."""
    import torch
    import torch.distributed as dist

    n, size, rank = 3000, fd.size(), fd.rank()
    x, total, largest = (torch.zeros(n, device=device()) for _ in range(3))
    whole = torch.zeros(size * n, device=device())

    def run() -> None:
        total.copy_(x)
        dist.all_reduce(total)
        work: Any = dist.all_gather_into_tensor(whole, total, async_op=True)
        work.wait()
        fd.all_reduce(x, "max", out=largest)

    recorded = Recorded(run)

    def contents(step: int, of_rank: int) -> Any:
        drawn = torch.Generator().manual_seed(10 * step + of_rank)
        return torch.randn(n, generator=drawn)

    mine, wanted = [], []
    for step in range(5):
        x.copy_(contents(step, rank))
        recorded.replay()
        mine += on_host([total, whole, largest])
        parts = torch.stack([contents(step, r) for r in range(size)])
        wanted += on_host([parts.sum(0), parts.sum(0).repeat(size), parts.amax(0)])
    return compared(mine, wanted, 0.0, "the host's sums") + ", in 5 replays"


def training_in_a_graph() -> str:
    """Forward, backward, the mean of gradients and the optimizer's step."""
    import torch

    model, x = network(), torch.zeros_like(batch(0, 0))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    before = [p.detach().clone() for p in model.parameters()]

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, x).backward()
        gradients = [p.grad for p in model.parameters()]
        fd.grouped_all_reduce(gradients, "mean", out=gradients)
        optimizer.step()

    recorded = Recorded(step)
    with torch.no_grad():  # as if nothing had run before
        for p, value in zip(model.parameters(), before, strict=True):
            p.copy_(value)
            if (momentum := optimizer.state[p].get("momentum_buffer")) is not None:
                momentum.zero_()
    for i in range(STEPS):
        x.copy_(batch(i, fd.rank()))
        recorded.replay()
    return compared(on_host(model.parameters()), _alone(), 1e-5, SERIAL)


CASES = {
    "collectives": collectives,
    "DDP": by_ddp,
    "DDP, gradients as views of buckets": lambda: by_ddp(gradient_as_bucket_view=True),
    "FSDP2": by_fsdp,
    "FSDP2, bfloat16": lambda: by_fsdp(half=True),
    "collectives in a graph": collectives_in_a_graph,
    "training in a graph": training_in_a_graph,
}

if __name__ == "__main__":
    sys.exit(main(CASES, begin, end))
