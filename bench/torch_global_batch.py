"""The cost of GlobalBatch in a step: farandole run -np 2 -- python bench/torch_global_batch.py

The same network learns from the same parts of the same batches in two ways, which take turns in
blocks of steps:

    by hand   a DistributedOptimizer; a batch sampler of this rank's numbers; the loss times its
              weight, written into the loop
    GlobalBatch

or, with ``--logical 4``, the cost of the same bits on any number of ranks beside as many
micro-batches:

    micro-batches   a GlobalBatch whose micro_batch_size makes four of a batch
    logical ranks   a GlobalBatch with logical_ranks=4

A ratio is of the two medians of a block's steps; the result is the median of the ratios over the
blocks, with the interval of the sign test. Afterwards both have the same weights: bit for bit, but
for those of logical ranks, whose gradients fold in another order.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import farandole.torch as fd
import training_step
from farandole._bench.statistics import median, median_interval
from farandole.data import share


class ByHand:
    """This rank's numbers of every batch."""

    def __init__(self, batches: BatchSampler) -> None:
        self.batches, self.weights = batches, list[float]()

    def __iter__(self) -> Iterator[list[int]]:
        self.weights.clear()
        for numbers in self.batches:
            mine = numbers[share(len(numbers), fd.size(), fd.rank())]
            self.weights.append(len(mine) * fd.size() / len(numbers))
            yield mine


def network(arguments: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    if arguments.model is not None:
        return training_step.MODELS[arguments.model].build()
    width = arguments.width
    return nn.Sequential(
        nn.Linear(256, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


def samples(arguments: argparse.Namespace) -> TensorDataset:
    """Some dozen batches of all ranks."""
    random = torch.Generator().manual_seed(0)
    if arguments.model is None:
        return TensorDataset(
            torch.randn(5000, 256, generator=random), torch.randint(10, (5000,), generator=random)
        )
    model = training_step.MODELS[arguments.model]
    xs, ys = zip(*(model.batch(random) for _ in range(40)), strict=True)
    x = torch.cat(xs)
    return TensorDataset(x, torch.cat(ys).view(len(x), -1))


class Way:
    """One of the two, with its model, endless over the data.

    Args:
        how: GlobalBatch's options; None: by hand.
    """

    def __init__(
        self, data: TensorDataset, arguments: argparse.Namespace, how: dict[str, int] | None
    ) -> None:
        by_hand = how is None
        self.model = network(arguments)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        sampler = RandomSampler(data, generator=torch.Generator().manual_seed(1))
        options: dict[str, Any] = {"num_workers": arguments.workers}
        if arguments.workers:
            options["persistent_workers"] = True
        self.by_hand = by_hand
        if by_hand:
            fd.broadcast_parameters(self.model.state_dict(), root_rank=0)
            named = self.model.named_parameters()
            self.optimizer = fd.DistributedOptimizer(self.optimizer, named)
            self.mine = ByHand(BatchSampler(sampler, arguments.batch, False))
            self.loader: Any = DataLoader(data, batch_sampler=self.mine, **options)
        else:
            loader = DataLoader(data, arguments.batch, sampler=sampler, **options)
            self.loader = fd.GlobalBatch(loader, self.model, self.optimizer, **how)
        self.steps = self._steps()

    def _steps(self) -> Iterator[None]:
        while True:
            begins = True
            for i, (x, y) in enumerate(self.loader):
                if begins:
                    self.optimizer.zero_grad()
                loss = cross_entropy(self.model(x), y.flatten())
                if self.by_hand:
                    (loss * self.mine.weights[i]).backward()
                else:
                    self.loader.scale_loss(loss).backward()
                begins = self.by_hand or self.loader.sync_gradients
                if begins:
                    self.optimizer.step()
                    yield

    def block(self, steps: int) -> float:
        """Seconds of its median step, the slowest rank's."""
        times = []
        for _ in range(steps):
            began = time.perf_counter()
            next(self.steps)
            times.append(time.perf_counter() - began)
        mine = torch.tensor([median(times)], dtype=torch.float64)
        return float(fd.allreduce(mine, op=fd.Max))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--steps", type=int, default=40, help="in a block")
    parser.add_argument("--batch", type=int, default=129, help="samples of all ranks")
    parser.add_argument(
        "--model", choices=training_step.MODELS, help="of training_step.py; default: three layers"
    )
    parser.add_argument("--width", type=int, default=512, help="of those three layers")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--logical", type=int, default=0, help="logical ranks")
    arguments = parser.parse_args()
    fd.init()
    torch.set_num_threads(1)
    parts = arguments.logical
    compared: list[dict[str, int] | None] = [None, {}]
    if parts:
        compared = [{"micro_batch_size": -(-arguments.batch // parts)}, {"logical_ranks": parts}]
    data = samples(arguments)
    ways = [Way(data, arguments, how) for how in compared]
    for way in ways:
        way.block(10)
    ratios, by_hand = [], []
    for block in range(arguments.blocks):
        times = [0.0, 0.0]
        for i in (0, 1) if block % 2 else (1, 0):
            times[i] = ways[i].block(arguments.steps)
        ratios.append(times[1] / times[0])
        by_hand.append(times[0])
    for a, b in zip(*(way.model.parameters() for way in ways), strict=True):
        alike = torch.allclose(a, b, atol=0.1) if parts else torch.equal(a, b)
        assert alike, "the two learned different weights"
    if fd.rank() == 0:
        middle, low, high, confidence = median_interval(ratios)
        print(
            f"step {'of micro-batches' if parts else 'by hand'} {1e3 * median(by_hand):.2f} ms; "
            f"{'logical ranks' if parts else 'GlobalBatch'} {middle:.4f} of it "
            f"({low:.4f} to {high:.4f} with {confidence:.0%}), {arguments.blocks} blocks of "
            f"{arguments.steps} steps, {fd.size()} ranks"
        )


if __name__ == "__main__":
    main()
