"""Helpers that test modules of torch.distributed share: ranks with both backends."""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_gloo: Any = None


def prepare() -> None:
    global _gloo
    import farandole.torch.distributed  # noqa: F401

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # PyTorch's older names, what it says of FSDP on processors
    dist.init_process_group("farandole", timeout=timedelta(seconds=60))
    _gloo = dist.new_group(backend="gloo")


def gloo() -> Any:
    """A group of all ranks, over gloo."""
    return _gloo


def ours_alone() -> None:
    from farandole.torch.distributed import fallbacks

    assert fallbacks() == {}
