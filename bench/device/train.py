"""The cost for two ranks of training on one device over training alone, as a program of each rank:

    farandole run -np 2 python bench/device/train.py

A transformer of 100 million parameters, bfloat16, on ranks that share the device. Blocks of steps
with nothing exchanged and blocks with farandole take turns in the same processes, so that both have
the same share of the device, and are compared pair by pair. Without MPS ranks take turns on it, as
the driver decides, so nothing is judged. Under FARANDOLE_TRACE `farandole trace` then shows what
backward hid of the reductions, by the device's clock.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from typing import TYPE_CHECKING, Any

import mps
import numpy as np

import farandole as fd
from farandole._bench.statistics import median, median_interval, ratios

if TYPE_CHECKING:
    import torch

WORDS = 8192
GOAL = 0.05  # of a step


def transformer(width: int, layers: int) -> torch.nn.Module:
    """Guesses a word at every place."""
    from torch import nn

    layer = nn.TransformerEncoderLayer(
        width, max(width // 64, 1), 4 * width, dropout=0.0, batch_first=True, norm_first=True
    )
    return nn.Sequential(
        nn.Embedding(WORDS, width),
        nn.TransformerEncoder(layer, layers, enable_nested_tensor=False),
        nn.Linear(width, WORDS, bias=False),
    )


class Training:
    """A model of its own. `exchanges`: with the other rank."""

    def __init__(self, asked: argparse.Namespace, *, exchanges: bool) -> None:
        import torch

        torch.manual_seed(7)
        self.device = torch.device(asked.device)
        self.model = transformer(asked.width, asked.layers).to(self.device, torch.bfloat16)
        optimizer: Any = torch.optim.SGD(self.model.parameters(), 1e-3, momentum=0.9)
        if exchanges:
            import farandole.torch as hvd

            names = list(self.model.named_parameters())
            optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=names)
        self.optimizer = optimizer
        seed = torch.Generator().manual_seed(fd.rank())
        shape = (asked.batch, asked.length + 1)
        self.words = torch.randint(WORDS, shape, generator=seed).to(self.device)

    def block(self, steps: int) -> float:
        """Seconds of a step."""
        self.rest()
        fd.barrier()
        begin = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.rest()
        fd.barrier()
        return (time.perf_counter() - begin) / steps

    def step(self) -> None:
        from torch.nn.functional import cross_entropy

        self.optimizer.zero_grad()
        with fd.trace_span("forward"):
            guesses = self.model(self.words[:, :-1]).flatten(0, 1).float()
            loss = cross_entropy(guesses, self.words[:, 1:].flatten())
        with fd.trace_span("backward"):
            loss.backward()
        self.optimizer.step()

    def rest(self) -> None:
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def checksum(self) -> float:
        return float(sum(p.detach().double().sum() for p in self.model.parameters()))


def compare(asked: argparse.Namespace) -> None:
    alone, together = Training(asked, exchanges=False), Training(asked, exchanges=True)
    times: tuple[list[float], list[float]] = ([], [])
    for training in (alone, together):
        training.block(3)
    for _ in range(asked.blocks):
        for training, took in zip((alone, together), times, strict=True):
            took.append(training.block(asked.steps))
    sums = fd.all_gather(np.array([together.checksum()]))
    if len(set(sums.tolist())) != 1:
        raise RuntimeError(f"WRONG: ranks have different weights, by their sums {sums.tolist()}")
    if fd.rank() != 0:
        return
    count = sum(p.numel() for p in alone.model.parameters())
    ratio = ratios(times[1], times[0])
    interval = median_interval(ratio)
    over = median(ratio) - 1
    print(f"{fd.size()} ranks on {asked.device}, {count / 1e6:.1f} million parameters, bfloat16")
    alone_ms, together_ms = (median(took) * 1e3 for took in times)
    print(f"a step alone {alone_ms:.2f} ms, with farandole {together_ms:.2f} ms")
    print(
        f"overhead {over:+.1%} ({interval.low - 1:+.1%} to {interval.high - 1:+.1%} of "
        f"{asked.blocks} pairs of blocks); {verdict(asked.device, over)}"
    )


def verdict(device: str, over: float) -> str:
    if device == "cuda" and mps.PIPES not in os.environ:
        return "ranks take turns on the device: reported, not judged"
    return f"goal <= {GOAL:.0%}: " + ("reached" if over <= GOAL else "missed")


def why_not(device: str) -> str:
    if importlib.util.find_spec("torch") is None:
        return "there is no PyTorch"
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        return "this PyTorch sees no device"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=10, help="of a block")
    parser.add_argument("--blocks", type=int, default=9)
    asked = parser.parse_args()
    fd.init()
    if why := why_not(asked.device):
        if fd.rank() == 0:
            print(f"not done: {why}")
    else:
        compare(asked)
    fd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
