"""Checks of a collective's tensors, before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from farandole._core import InvalidArgument
from farandole.torch._c10d.tensors import engine_numel

Tensors = Sequence[torch.Tensor]


def one(tensors: Any, what: str) -> Any:
    if len(tensors) != 1:
        raise InvalidArgument(f"{what}: {len(tensors)} tensors; farandole takes one for each rank")
    return tensors[0]


def sizes(tensors: Tensors) -> list[int]:
    return [engine_numel(t) for t in tensors]


def check_shares(whole: torch.Tensor, part: torch.Tensor, size: int, verb: str) -> None:
    if whole.numel() != part.numel() * size:
        raise InvalidArgument(
            f"{verb}: {whole.numel()} elements are not {size} times {part.numel()}"
        )


def elements(tensor: torch.Tensor, splits: Sequence[int], size: int, what: str) -> list[int]:
    """The number of elements in each rank's rows."""
    rows = tensor.shape[0] if tensor.dim() else 0
    splits = list(splits) or [rows // size] * size
    if len(splits) != size or sum(splits) != rows or min(splits) < 0:
        raise InvalidArgument(
            f"all_to_all_single: {what} splits {splits} do not make the {rows} rows of the {what} "
            f"tensor, one for each of {size} ranks"
        )
    width = engine_numel(tensor) // rows if rows else 0
    return [n * width for n in splits]


def differing_counts(
    parts: Tensors, own: torch.Tensor, rank: int, size: int, verb: str
) -> list[int]:
    """Elements of each rank's part; empty where they are all equal."""
    counts = sizes(parts)
    if len(parts) != size:
        raise InvalidArgument(f"{verb}: a list of {len(parts)} tensors for {size} ranks")
    if counts[rank] != sizes([own])[0]:
        raise InvalidArgument(
            f"{verb}: tensor {rank} of the list has {counts[rank]} elements, this rank's own "
            f"{sizes([own])[0]}"
        )
    return counts if len(set(counts)) > 1 else []


def check_equal(parts: Tensors, own: torch.Tensor, size: int, verb: str) -> None:
    if len(parts) != size or set(sizes(parts)) != set(sizes([own])):
        raise InvalidArgument(
            f"{verb}: a list of tensors of {sizes(parts)} elements; it takes {size} of "
            f"{sizes([own])[0]} each"
        )
