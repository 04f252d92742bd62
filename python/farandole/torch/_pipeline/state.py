"""The whole model's state, in the form of one process, gathered from the stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from farandole import _world
from farandole._core import Group, InvalidArgument
from farandole.common._objects import allgather_object
from farandole.pipeline._places import Place
from farandole.torch._pipeline.layers import Outline
from farandole.torch._tensors import borrow


def gathered(
    mine: Mapping[Any, Any], group: Group, place: Place, root_rank: int | None
) -> dict[Any, Any]:
    """Gathers the values of all stages, in order, from the first replica. Tensors are sent as they
    are, other values as pickles. Collective."""
    sends = place.replica == 0
    named = [(k, v.detach()) for k, v in mine.items() if isinstance(v, torch.Tensor)]
    rows = [(k, tuple(t.shape), t.dtype) for k, t in named]
    rest = {k: v for k, v in mine.items() if not isinstance(v, torch.Tensor)}
    told: Any = allgather_object((rows, rest, list(mine)) if sends else None, "state of a Pipeline")
    whole: dict[Any, Any] = {}
    takes = root_rank in (None, _world.rank())
    for stage in range(place.stages):
        source = place.rank_of(stage, 0)
        is_source = group.rank == source
        rows, rest, order = told[source]
        found = dict(rest)
        for i, (key, shape, dtype) in enumerate(rows):
            if is_source or takes:
                tensor = named[i][1].clone() if is_source else torch.empty(shape, dtype=dtype)
                _moved(tensor, group, source, root_rank)
                found[key] = tensor
        if takes:
            whole |= {key: found[key] for key in order}
    return whole


def _moved(tensor: torch.Tensor, group: Group, source: int, root: int | None) -> None:
    """Sends a tensor as bytes, so that it may have any dtype."""
    flat = tensor.contiguous() if not tensor.is_contiguous() else tensor
    if flat.numel() == 0 or root == source:
        return
    data = borrow(flat.reshape(-1).view(torch.uint8))
    if root is None:
        group.run("broadcast", data, data, root=source, name="state of a stage")
    elif group.rank == source:
        group.run_between("send", data, root, 1, "state of a stage")
    else:
        group.run_between("recv", data, source, 1, "state of a stage")


def load(
    module: nn.Module, outlines: Sequence[Outline], state: Mapping[str, Any], *, strict: bool
) -> tuple[list[str], list[str]]:
    """A stage's part of a whole model's state.

    Returns:
        What of the whole model's is missing in it, and what in it the model has not.

    Raises:
        InvalidArgument: something does, and ``strict``; or a tensor has another shape.
    """
    known = dict.fromkeys(key for each in outlines for key in each.keys)
    missing = [key for key in known if key not in state]
    unexpected = [key for key in state if key not in known]
    if strict and (missing or unexpected):
        raise InvalidArgument(
            f"this state is not that of the model: missing {missing or 'nothing'}, unexpected "
            f"{unexpected or 'nothing'}\n  advice: pass the whole model's state_dict(), as of one "
            "process or of Pipeline.state_dict(); or strict=False"
        )
    own = module.state_dict()
    try:
        module.load_state_dict({k: v for k, v in state.items() if k in own}, strict=False)
    except RuntimeError as error:
        raise InvalidArgument(str(error)) from error
    return missing, unexpected
