"""A training with PyTorch, for tests. Its results are the same, even if ranks die or join.

    python elastic_training.py RANKS

Three trainings, one after the other. Each loses a rank, of world 1, 3 or 5, and then waits until
its world has RANKS ranks again. Each rank that comes to the end prints its results as JSON.
Without RANKS no rank is lost.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import torch
from torch import nn

import farandole.torch as hvd
from farandole import _elastic

STEPS, BATCH, SAMPLES = 12, 30, 60
RANKS = int(sys.argv[1]) if __name__ == "__main__" else 0


def die_if_due(rank: int, world: int) -> None:
    if RANKS and (hvd.rank(), _elastic.world()) == (rank, world):
        os.kill(os.getpid(), signal.SIGKILL)


def wait_for_others(state: Any) -> None:
    """Waits until a new worker has come. Then all ranks leave the world here."""
    while hvd.size() < RANKS:
        time.sleep(0.01)
        state.check_host_updates()


# -- sums over samples, which are those of one process up to rounding -----------------------------


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def loss_of(model: nn.Module, step: int, part: slice) -> torch.Tensor:
    x = torch.randn(BATCH, 3, generator=torch.Generator().manual_seed(step)).double()[part]
    return (model(x) - x.sum(1, keepdim=True).sin()).square().sum()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def weights_of(model: nn.Module) -> list[float]:
    return torch.nn.utils.parameters_to_vector(model.parameters()).tolist()  # type: ignore[no-any-return]


def serial() -> list[float]:
    """The weights after the same steps in one process."""
    model = model_of(0)
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, slice(None)).backward()
        optimizer.step()
    return weights_of(model)


def train_by_sums(state: Any) -> None:
    while state.step < STEPS:
        if state.step == 4:
            state.model[0].weight.register_hook(lambda _: die_if_due(1, 1))
        if state.step == 7:
            wait_for_others(state)
        state.optimizer.zero_grad()
        loss_of(state.model, state.step, slice(hvd.rank(), None, hvd.size())).backward()
        state.optimizer.step()
        state.step += 1
        if state.step % 3 == 0:
            state.commit()


# -- logical ranks, with the bits of any number of ranks -------------------------------------------


def whole() -> tuple[nn.Module, Any, hvd.GlobalBatch]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.25), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    x = torch.randn(48, 3, generator=torch.Generator().manual_seed(3))
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    return model, optimizer, hvd.GlobalBatch(loader, model, optimizer, logical_ranks=4)


def train_as_one(state: Any) -> None:
    batches = state.batches
    while batches.epoch < 2:
        if len(state.losses) == 9:
            wait_for_others(state)
        parts = []
        for inputs, targets in batches:
            loss = nn.functional.mse_loss(state.whole(inputs), targets)
            batches.scale_loss(loss).backward()
            parts.append(loss.detach() * batches.samples)
            if len(state.losses) == 7:
                die_if_due(0, 3)
            if not batches.sync_gradients:
                continue
            state.whole_optimizer.step()
            state.whole_optimizer.zero_grad()
            state.losses.append(float(batches.sum(parts) / batches.total))
            parts = []
            if len(state.losses) % 3 == 0:
                state.commit()
                wait_for_others(state)
    state.commit()


def bits_of_any_number() -> tuple[list[float], list[float]]:
    """Losses and weights in a world that loses no rank."""
    hvd.init()
    model, optimizer, batches = whole()
    state = hvd.elastic.TorchState(
        whole=model, whole_optimizer=optimizer, batches=batches, losses=[]
    )
    hvd.elastic.run(train_as_one)(state)
    return state.losses, weights_of(model)


# -- an ElasticSampler -----------------------------------------------------------------------------


def count_samples(state: Any) -> None:
    """Counts how often each sample was processed, over all ranks."""
    loader = torch.utils.data.DataLoader(range(SAMPLES), 2, sampler=state.sampler)  # type: ignore[arg-type]
    while state.sampler.epoch < 2:
        for i, mine in enumerate(loader):
            mine_once = torch.bincount(mine, minlength=SAMPLES)
            state.counts += hvd.allreduce(mine_once, op=hvd.Sum)
            state.sampler.record_batch(i, 2)
            if state.sampler.epoch == 0 and i == 4:  # the third since the last commit
                die_if_due(2, 5)
            if i % 2 == 1:
                state.commit()
            if hvd.size() < RANKS and i == 2:
                state.commit()
                wait_for_others(state)
        state.sampler.set_epoch(state.sampler.epoch + 1)
        state.commit()


def main() -> None:
    torch.set_num_threads(1)
    hvd.init()
    model = model_of(int(os.environ["FARANDOLE_WORKER"]))  # seeds differ: rank 0's weights count
    optimizer = hvd.DistributedOptimizer(optimizer_of(model), model.named_parameters(), op=hvd.Sum)
    second, second_optimizer, batches = whole()
    sampler = hvd.elastic.ElasticSampler(range(SAMPLES))
    state = hvd.elastic.TorchState(
        model, optimizer, whole=second, whole_optimizer=second_optimizer, batches=batches,
        sampler=sampler, step=0, losses=[], counts=torch.zeros(SAMPLES, dtype=torch.int64),
    )  # fmt: skip

    @hvd.elastic.run
    def train(state: Any) -> None:
        for each in (train_by_sums, train_as_one, count_samples):
            each(state)

    train(state)
    found = {
        "sums": weights_of(model),
        "whole": [state.losses, weights_of(second)],
        "counts": state.counts.tolist(),
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
