"""A rank of a training that torchrun starts again when one of them is lost. In each round another
rank kills itself, as told; the last round ends with the right numbers.

    torchrun_rounds.py KIND FOLDER VICTIM…
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch

import farandole as fd
import farandole.torch as hvd

STEPS = 4
KIND, FOLDER, *VICTIMS = sys.argv[1:]
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


ROUND = len(list(Path(FOLDER).glob("died-*")))


def die_in_turn(step: int) -> None:
    """In the second step; the next round finds a note."""
    if step == 1 and [str(RANK)] == VICTIMS[ROUND : ROUND + 1]:
        Path(FOLDER, f"died-{ROUND}").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def by_numpy() -> float:
    fd.init()
    value = np.float64(0)
    for step in range(STEPS):
        die_in_turn(step)
        value += fd.all_reduce(np.float64(RANK + step))
    return float(value)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, weight: torch.Tensor) -> float:
    for step in range(STEPS):
        die_in_turn(step)
        optimizer.zero_grad()
        (model(torch.ones(1, 1)) * (RANK + step)).sum().backward()
        optimizer.step()
    return -SIZE * weight.item()


def linear() -> torch.nn.Linear:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    return model


def by_the_hook() -> float:
    hvd.init()
    model = linear()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 1.0))
    return train(model, optimizer, model.weight)


def by_ddp() -> float:
    torch.distributed.init_process_group("farandole")
    model = linear()
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    found = train(ddp, torch.optim.SGD(ddp.parameters(), 1.0), model.weight)
    torch.distributed.destroy_process_group()
    return found


torch.set_num_threads(1)
try:
    total = {"numpy": by_numpy, "hook": by_the_hook, "DDP": by_ddp}[KIND]()
except fd.PeerLost:
    time.sleep(60)  # as one that ends slowly: its agent starts it again, and counts no restart
    raise
print(f"\ndone {total:.6g}", flush=True)
