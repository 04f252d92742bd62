"""farandole.torch on this rank's device: operations, and trainings by DistributedOptimizer beside
the same training in one process. Cases of cases.py."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
from cases import Differs, compared, main
from torch_training import (
    batch,
    begin,
    device,
    loss_of,
    mean_of_parts,
    network,
    on_host,
)

import farandole as fd

STEPS = 4
SERIAL = "training in one process"
BUCKET = 64 << 10  # bytes: several buckets, small as models are here


@dataclass(frozen=True)
class How:
    """A training."""

    dtype: str = "float32"
    adam: bool = False  # SGD with momentum otherwise, to which a wrong scale shows
    scaled: bool = False  # float16 by autocast and GradScaler, with an infinite loss in one step
    clipped: bool = False
    sharded: bool = False
    split: bool = False  # the last layer's parameters are on the host
    passes: int = 1
    tolerance: float = 1e-5


class Split:
    """Each layer where its parameters lie."""

    def __init__(self, layers: Any) -> None:
        self.layers = layers
        layers[-1].to("cpu")

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            place = next((p.device for p in layer.parameters()), x.device)
            x = layer(x.to(place))
        return x

    def parameters(self) -> Any:
        return self.layers.parameters()

    def named_parameters(self) -> Any:
        return self.layers.named_parameters()


class Training:
    """By ranks, or by this one alone."""

    def __init__(self, how: How, *, exchanges: bool) -> None:
        import torch

        import farandole.torch as hvd

        self.how, self.exchanges = how, exchanges
        model = network(getattr(torch, how.dtype))
        self.model = Split(model) if how.split else model
        parameters = self.model.parameters()
        self.optimizer: Any = torch.optim.SGD(parameters, 0.1, momentum=0.9)
        if how.adam:
            self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-2)
        if exchanges:
            self.optimizer = hvd.DistributedOptimizer(
                self.optimizer, self.model.named_parameters(), sharded_update=how.sharded,
                backward_passes_per_step=how.passes, bucket_bytes=BUCKET,
            )  # fmt: skip
        self.scaler = torch.amp.GradScaler(device().type, init_scale=1024.0, enabled=how.scaled)

    def backward(self, step: int, rank: int) -> None:
        import torch

        half: Any = contextlib.nullcontext()
        if self.how.scaled:
            half = torch.autocast(device().type, torch.float16)
        for i in range(self.how.passes):
            with half:
                loss = loss_of(self.model, batch(self.how.passes * step + i, rank))
            if self.how.scaled and step == 2 and rank == 1:
                loss = loss * float("inf")
            self.scaler.scale(loss).backward()

    def step(self, step: int) -> None:
        import torch

        self.optimizer.zero_grad()
        if self.exchanges:
            self.backward(step, fd.rank())
        else:
            mean_of_parts(self.model.parameters(), lambda rank: self.backward(step, rank))
        self.scaler.unscale_(self.optimizer)
        if self.how.clipped and self.exchanges and self.how.sharded:
            self.optimizer.clip_grad_norm_(0.05)
        elif self.how.clipped:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def run(self) -> list[Any]:
        for step in range(STEPS):
            self.step(step)
        return on_host(self.model.parameters())


def train(**how: Any) -> str:
    asked_for = How(**how)
    together = Training(asked_for, exchanges=True).run()
    alone = Training(asked_for, exchanges=False).run()
    before = on_host(network().parameters())
    if all(np.array_equal(one, other) for one, other in zip(alone, before, strict=True)):
        raise Differs("no weight has moved: this compares nothing")
    return compared(together, alone, asked_for.tolerance, SERIAL)


def sharded_here_and_there() -> str:
    """Gradients that are the same on the host, so the bits are those of the host."""
    return compared(_sharded(device()), _sharded("cpu"), 0.0, "the same on the host")


def _sharded(where: Any) -> list[Any]:
    import torch

    import farandole.torch as hvd

    shapes = [(300, 401), (17,), (1000,), (3, 5, 7)]
    seed = torch.Generator().manual_seed(5)

    def drawn(shape: tuple[int, ...]) -> Any:
        return torch.randn(shape, generator=seed).to(where)

    parameters = [torch.nn.Parameter(drawn(shape)) for shape in shapes]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(parameters, 1e-2), [(f"{i}", p) for i, p in enumerate(parameters)],
        sharded_update=True, bucket_bytes=BUCKET,
    )  # fmt: skip
    for _ in range(STEPS):
        optimizer.zero_grad()
        # The gradients of the products are these factors.
        of_ranks = [[drawn(shape) for shape in shapes] for _ in range(fd.size())]
        products = zip(parameters, of_ranks[fd.rank()], strict=True)
        sum((p * factor).sum() for p, factor in products).backward()  # type: ignore[union-attr]
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
    return on_host(parameters)


def operations() -> str:
    """All of them, small, and large enough to go where they lie; results are those of the host."""
    mine, wanted = _operations(device()), _operations("cpu")
    return compared(mine, wanted, 0.0, "the host's results") + f", {len(mine)} of them"


def _operations(where: Any) -> list[Any]:
    import torch

    import farandole.torch as hvd

    rank, size = hvd.rank(), hvd.size()
    found: list[Any] = []

    def given(count: int, seed: int, dtype: Any = torch.float32) -> Any:
        drawn = torch.Generator().manual_seed(1000 * seed + rank)
        return torch.randn(count, generator=drawn).to(dtype).to(where)

    for count in (7, 100_000):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            found.append(hvd.allreduce(given(count, 1, dtype), name=f"mean {count} {dtype}"))
        found.append(hvd.allreduce(given(count, 2), op=hvd.Max, name=f"max {count}"))
        found.append(hvd.broadcast(given(count, 3), size - 1, name=f"broadcast {count}"))
        found.append(hvd.allgather(given(count + rank, 4), name=f"gather {count}"))
        found.append(hvd.alltoall(given(count // size * size, 5), name=f"turn {count}"))
        found.append(hvd.reducescatter(given(count, 6), name=f"scatter {count}"))
        three = [given(count + i, 7 + i) for i in range(3)]
        found += hvd.grouped_allreduce(three, name=f"group {count}")
        handles = [hvd.allreduce_async(x, name=f"later {count} {i}") for i, x in enumerate(three)]
        found += [hvd.synchronize(handle) for handle in reversed(handles)]
    return on_host(found)


CASES = {
    "float32": train,
    "float32, Adam": lambda: train(adam=True),
    "GradScaler and float16, one step infinite": lambda: train(scaled=True),
    "bfloat16": lambda: train(dtype="bfloat16", tolerance=1e-2),
    "clipped by norm": lambda: train(clipped=True),
    "sharded update": lambda: train(sharded=True, adam=True),
    "sharded update, clipped by norm": lambda: train(sharded=True, clipped=True),
    "sharded update, bits of the host": sharded_here_and_there,
    "parameters on the device and on the host": lambda: train(split=True),
    "two passes a step": lambda: train(passes=2),
    "operations by name": operations,
}

if __name__ == "__main__":
    sys.exit(main(CASES, begin, fd.shutdown))
