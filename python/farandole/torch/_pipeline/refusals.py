"""Layers that cannot be in a pipeline, or that compute something else there."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from farandole._core import InvalidArgument
from farandole.data._share import FEW
from farandole.torch.sync_batch_norm import SyncBatchNorm


def refuse_shared(model: Any, bounds: Sequence[int], names: Sequence[str]) -> None:
    """Refuses parameters that several stages share, as their copies would diverge."""
    if not isinstance(model, nn.Sequential):
        modules = [each if isinstance(each, nn.Module) else None for each in model]
    else:
        modules = [model.get_submodule(name) for name in names]
    owner: dict[int, tuple[int, str]] = {}
    for stage, (begin, end) in enumerate(pairwise(bounds)):
        for name, module in zip(names[begin:end], modules[begin:end], strict=True):
            for key, p in () if module is None else module.named_parameters():
                other, first = owner.setdefault(id(p), (stage, f"{name}.{key}"))
                if other != stage:
                    raise InvalidArgument(
                        f"parameter '{name}.{key}' of stage {stage} is '{first}' of stage {other}, "
                        "too: each stage would train its own\n  advice: a split that puts the "
                        "layers that share it into one stage"
                    )


def refuse_synchronized(module: nn.Module) -> None:
    kinds = (SyncBatchNorm, nn.SyncBatchNorm)
    for name, each in module.named_modules():
        if isinstance(each, kinds):
            raise InvalidArgument(
                f"layer '{name}' normalizes over the samples of all ranks, which have other layers "
                "of a Pipeline\n  advice: torch.nn.BatchNorm, whose statistics are those of each "
                "micro-batch, or torch.nn.GroupNorm"
            )


def warn_of_few_samples(module: nn.Module, samples: int) -> None:
    """Warns of layers that normalize by the statistics of each micro-batch, if it is small."""
    kinds = [name for name, each in module.named_modules() if isinstance(each, _BatchNorm)]
    if kinds and samples < FEW:
        warnings.warn(
            f"layer '{kinds[0]}' normalizes by the statistics of each micro-batch, which has "
            f"{samples} samples: the result is not that of the whole batch\n  advice: larger "
            "batches, fewer micro-batches, or a layer like torch.nn.GroupNorm",
            stacklevel=2,
        )


def check_devices(tensors: Mapping[str, torch.Tensor]) -> None:
    for name, each in tensors.items():
        if each.device.type != "cpu":
            raise InvalidArgument(
                f"'{name}' is on {each.device}; only CPU tensors are supported yet"
            )
