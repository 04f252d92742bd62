"""Whether a backward is of a loss that has its weight (farandole.torch.GlobalBatch).

A hook on the weighed loss notes the graph task that it runs in, which is the backward's outermost.
"""

from __future__ import annotations

from typing import Any

import torch

from farandole._core import InvalidArgument
from farandole.torch._entries import entry
from farandole.torch._training.passes import graph_task

_last = -1  # the last backward of a weighed loss


@entry()
def _mark(_: torch.Tensor) -> None:
    global _last
    _last = graph_task()


def weighed(loss: torch.Tensor, weight: float) -> torch.Tensor:
    scaled = loss * weight
    if scaled.requires_grad:
        hook: Any = scaled.register_hook
        hook(_mark)
    return scaled


def last_weighed() -> int:
    """The graph task."""
    return _last


def not_weighed() -> InvalidArgument:
    return InvalidArgument(
        "backward() of a loss without its weight: ranks with more samples of the global batch must "
        "weigh more\n  advice: batches.scale_loss(loss).backward(), where batches is the "
        "GlobalBatch"
    )


def left_open() -> InvalidArgument:
    return InvalidArgument(
        "step() in the middle of a global batch, of which more micro-batches come\n"
        "  advice: if batches.sync_gradients: optimizer.step(), where batches is the GlobalBatch"
    )


def zeroed_midway() -> InvalidArgument:
    return InvalidArgument(
        "zero_grad() in the middle of a global batch, of which some parts are computed\n"
        "  advice: if batches.sync_gradients: optimizer.step(); optimizer.zero_grad(), where "
        "batches is the GlobalBatch"
    )
