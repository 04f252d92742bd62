"""Adds and gathers the values that ranks have of their parts of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from farandole import _world
from farandole._arguments import shown, type_of
from farandole._core import InvalidArgument
from farandole.common._reduction import Sum
from farandole.data._logical import fold
from farandole.data._tree import leaves, map_leaves
from farandole.torch.ops import allgather, allreduce


def number_over_ranks(mine: float) -> float:
    """The sum over ranks. Collective."""
    if _world.size() == 1:
        return mine
    value = torch.tensor([mine], dtype=torch.float64)
    return float(allreduce(value, op=Sum, name="count of a GlobalBatch"))


def sum_of_parts(values: Sequence[Any], samples: Sequence[int]) -> Any:
    """Collective: the sum over all parts of all ranks, in the order of the canonical tree.

    Args:
        values: of each of this rank's parts, numbers or tensors.
        samples: of these parts; what a part without samples has does not count.
    """
    if not isinstance(values[0], torch.Tensor):
        numbers = [_number(value) for value in values]
        counted = [v if n else 0.0 for v, n in zip(numbers, samples, strict=True)]
        return number_over_ranks(fold(counted, float.__add__))
    tensors = [
        v.detach() if n else torch.zeros_like(v) for v, n in zip(values, samples, strict=True)
    ]
    return allreduce(fold(tensors, torch.add), op=Sum, name="sum of a GlobalBatch")


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise InvalidArgument(f"sum(): {shown(value)}; it takes a number or a tensor") from None


def gather_parts(outputs: Sequence[Any], samples: Sequence[int]) -> Any:
    """Joins tensors of each part's samples to the whole batch's, on every rank. Collective.

    Args:
        outputs: of each of this rank's parts, of one structure.

    Raises:
        InvalidArgument: a tensor has no first dimension, or another length.
    """
    parts = [leaves(each) for each in outputs]
    for tensors, n in zip(parts, samples, strict=True):
        for leaf in tensors:
            _check(leaf, n)
        if len(tensors) != len(parts[0]):
            raise InvalidArgument(
                f"gather_for_metrics(): {len(tensors)} tensors of one part of the batch, and "
                f"{len(parts[0])} of another"
            )
    columns = iter(list(zip(*parts, strict=True)))

    def gathered(_: Any) -> torch.Tensor:
        rows = [t.detach()[:n] for t, n in zip(next(columns), samples, strict=True)]
        mine = rows[0].contiguous() if len(rows) == 1 else torch.cat(rows)
        return allgather(mine, name="metrics of a GlobalBatch")

    return map_leaves(gathered, outputs[0])


def _check(leaf: Any, n: int) -> None:
    shape = tuple(getattr(leaf, "shape", ()))
    if not isinstance(leaf, torch.Tensor) or not shape or shape[0] != max(n, 1):
        raise InvalidArgument(
            f"gather_for_metrics(): {type_of(leaf)} of shape {shape}, where this "
            f"rank's part of the batch has {max(n, 1)} samples; pass tensors whose first "
            "dimension is the samples"
        )
