"""PyTorch's own operations, as they are measured beside collectives on devices."""

from __future__ import annotations

import functools
import importlib.metadata
import math
import time


@functools.cache
def place(ordinal: int) -> str | None:
    """PyTorch's name of that device; None where there is no PyTorch that has it."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
    if version.endswith("+cpu"):  # to import it takes seconds
        return None
    import torch

    return f"cuda:{ordinal}" if ordinal < torch.cuda.device_count() else None


def operation(*, folds: bool) -> str:
    return "add" if folds else "cat"


def seconds(place: str, size: int, *, folds: bool, rounds: int = 20) -> float:
    """The time of a float32 sum of two arrays of `size` bytes (`add`), or of joining two halves
    (`cat`): the best of a few batches, by the host's clock."""
    import torch

    count = max(size // 8, 1)
    halves = [torch.full((count,), 1.5, device=place) for _ in range(2)]
    one, to = torch.cat(halves), torch.cat(halves)
    best = math.inf
    for _ in range(6):
        _wait(place)
        begin = time.perf_counter()
        for _ in range(rounds):
            if folds:
                torch.add(one, one, out=to)
            else:
                torch.cat(halves, out=to)
        _wait(place)
        best = min(best, time.perf_counter() - begin)
    return best / rounds


def _wait(place: str) -> None:
    import torch

    if place != "cpu":
        torch.cuda.synchronize(place)
