"""Layers that look at other samples of a batch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from farandole import _world
from farandole._core import InvalidArgument
from farandole.data._share import FEW
from farandole.torch._global.reading import Whole
from farandole.torch.sync_batch_norm import SyncBatchNorm


def warn_of_few_samples(
    model: torch.nn.Module, batch: int | None, at_once: int | None, parts: int
) -> None:
    """Warns on rank 0 of layers that normalize each part of a batch by its own statistics."""
    few = (batch or 0) / parts
    if at_once is not None:
        few = min(few, at_once)
    names = [name for name, each in model.named_modules() if _takes_own(each)]
    if parts == 1 or _world.rank() != 0 or not names or not 0 < few < FEW:
        return
    whose, advice = (
        ("each rank's own", "model = convert_sync_batchnorm(model) before the optimizer is made")
        if parts == _world.size()
        else ("each logical rank's", "a larger batch, or a layer like torch.nn.GroupNorm")
    )
    warnings.warn(
        f"layer '{names[0]}' normalizes by the statistics of {whose} samples, which are "
        f"{few:g} of a batch of {batch}: the result is not that of one process\n  advice: "
        f"{advice}",
        stacklevel=4,
    )


def warn_of_own_statistics(model: torch.nn.Module) -> None:
    """Warns on rank 0 of layers that normalize single samples, and keep running statistics of those
    of this rank. Logical ranks join these."""
    layers = model.named_modules()
    names = [name for name, each in layers if isinstance(each, _InstanceNorm) and _keeps(each)]
    if names and _world.size() > 1 and _world.rank() == 0:
        warnings.warn(
            f"layer '{names[0]}' keeps running statistics of each rank's own samples: in eval() "
            "the model is not that of one process\n  advice: GlobalBatch(…, logical_ranks=…) "
            "joins them; or track_running_stats=False",
            stacklevel=4,
        )


def _keeps(layer: Any) -> bool:
    return bool(layer.track_running_stats and layer.training)


def _takes_own(module: Any) -> bool:
    return isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm)


@contextmanager
def statistics_of(model: torch.nn.Module | None, whole: Whole, size: int) -> Iterator[None]:
    """A rank without samples computes on one that does not count: statistics leave it out."""
    layers: list[SyncBatchNorm] = []
    if model is not None and whole.total < size:
        layers = [each for each in model.modules() if isinstance(each, SyncBatchNorm)]
    for layer in layers:
        layer.counts = any(micro.samples for micro in whole.micros)
    try:
        yield
    finally:
        for layer in layers:
            layer.counts = True


def refuse_micro_batches(model: torch.nn.Module, at_once: int | None) -> None:
    """Refuses layers that span ranks, as ranks may have different numbers of micro-batches."""
    if at_once is None or _world.size() == 1:
        return
    if (name := _over_all_ranks(model)) is not None:
        raise InvalidArgument(
            f"micro_batch_size={at_once}: layer '{name}' normalizes over the samples of all ranks, "
            "which may have different numbers of micro-batches\n"
            "  advice: without micro_batch_size, or torch.nn.BatchNorm"
        )


def refuse_synchronized(model: torch.nn.Module, logical_ranks: int) -> None:
    """A rank computes parts one after the other, and has not the samples of all at once."""
    kinds = (SyncBatchNorm, torch.nn.SyncBatchNorm)
    name = next((name for name, each in model.named_modules() if isinstance(each, kinds)), None)
    if name is not None:
        raise InvalidArgument(
            f"GlobalBatch(logical_ranks={logical_ranks}): layer '{name}' normalizes over the "
            "samples of all ranks, which are never computed at once\n"
            "  advice: torch.nn.BatchNorm, whose statistics are those of each part"
        )


def _over_all_ranks(model: torch.nn.Module) -> str | None:
    """The first layer that normalizes over all ranks."""
    layers = model.named_modules()
    return next((name for name, each in layers if isinstance(each, SyncBatchNorm)), None)
