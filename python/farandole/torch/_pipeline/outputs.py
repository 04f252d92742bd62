"""Gathers the last stages' outputs of a batch on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from farandole import _world
from farandole._arguments import type_of
from farandole._core import Group, InvalidArgument
from farandole.common._objects import made_by_all
from farandole.data._tree import leaves, map_leaves
from farandole.pipeline._places import Place
from farandole.pipeline._wire import Form
from farandole.torch._pipeline.tensors import form_of
from farandole.torch._tensors import DTYPES, borrow


def over_all_ranks(parts: Sequence[Any], samples: Sequence[int], group: Group, place: Place) -> Any:
    """Collective: outputs of all replicas, on every rank.

    Args:
        parts: of this rank's micro-batches; none on other stages than the last.
        samples: of each rank.

    Raises:
        InvalidArgument: an output has no samples as its first dimension; on every rank.
    """
    mine = None

    def form() -> Form | None:
        nonlocal mine
        if parts and place.is_last:
            mine = _joined(parts, samples[group.rank])
        return None if mine is None else form_of(mine)[0]

    theirs = made_by_all(
        "outputs of a Pipeline",
        form,
        lambda rank, why: f"rank {rank} has outputs that cannot be joined: {why}",
    )
    forms = [each for each in theirs if each is not None]
    counts = [n if each is not None else 0 for n, each in zip(samples, theirs, strict=True)]
    own = [] if mine is None else leaves(mine)
    whole = []
    for i, leaf in enumerate(forms[0].leaves):
        shape = (sum(counts), *leaf.shape[1:])
        width = 1
        for n in leaf.shape[1:]:
            width *= n
        target = torch.empty(shape, dtype=DTYPES[leaf.dtype])
        source = own[i].contiguous() if own else target[:0]
        if target.numel():
            group.run(
                "all_gather", borrow(source), borrow(target), name="outputs of a Pipeline",
                counts=[n * width for n in counts],
            )  # fmt: skip
        whole.append(target)
    return map_leaves(lambda i: whole[i], forms[0].structure)


def _joined(parts: Sequence[Any], samples: int) -> Any:
    columns = [leaves(each) for each in parts]
    for column in columns:
        for leaf in column:
            if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
                raise InvalidArgument(
                    f"an output is {type_of(leaf)} without a first dimension, which is the samples"
                )
    made = [torch.cat([column[i].detach() for column in columns]) for i in range(len(columns[0]))]
    for each in made:
        if each.shape[0] != samples:
            raise InvalidArgument(
                f"rank {_world.rank()} has outputs of {each.shape[0]} rows for {samples} samples"
            )
    rest = iter(made)
    return map_leaves(lambda _: next(rest), parts[0])
