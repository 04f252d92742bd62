"""An optimizer's parameters: their names, and which of them are reduced together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from farandole._core import InvalidArgument
from farandole.common._deprecated import warn_deprecated
from farandole.torch._tensors import check_tensor

Named = list[tuple[str, torch.Tensor]]


def named_of(optimizer: torch.optim.Optimizer, named_parameters: Iterable[Any] | None) -> Named:
    """The optimizer's parameters in registration order, each with a name of its own."""
    owned = [
        (f"group {g}, parameter {i}", p)
        for g, group in enumerate(optimizer.param_groups)
        for i, p in enumerate(group["params"])
    ]
    for name, p in owned:
        check_tensor(p, name)
    if named_parameters is None:
        return owned
    given = list(named_parameters)
    if any(not (isinstance(row, tuple) and len(row) == 2) for row in given):
        raise InvalidArgument(
            "named_parameters must be a sequence of tuples (name, parameter), as "
            "model.named_parameters() gives it"
        )
    names = [name for name, _ in given]
    twice = sorted(name for name, times in Counter(names).items() if times > 1)
    if twice:
        raise InvalidArgument("named_parameters has these names twice: " + ", ".join(twice))
    by_parameter = {id(p): (name, p) for name, p in reversed(given)}
    unnamed = [name for name, p in owned if id(p) not in by_parameter]
    if unnamed:
        raise InvalidArgument(
            "named_parameters does not name these of the optimizer's parameters: "
            + "; ".join(unnamed)
        )
    mine = {id(p) for _, p in owned}
    return [(name, p) for name, p in given if id(p) in mine and by_parameter[id(p)][0] == name]


def groups_of(groups: Any, num_groups: Any, named: Named) -> dict[int, int]:
    """The number of its group by a trainable parameter's id. Parameters that are in none are put
    together by size, as all are without groups.

    Args:
        groups: None; how many, of about equally many parameters each; or lists of parameters.
        num_groups: its older name, for a number.
    """
    if num_groups != 0:
        warn_deprecated("num_groups is deprecated; pass groups")
        groups = num_groups if groups is None else groups
    if groups is None:
        return {}
    trainable = {id(p): None for _, p in named if p.requires_grad}
    if isinstance(groups, int) and not isinstance(groups, bool):
        if groups < 0:
            raise InvalidArgument(f"groups is {groups}; a number of groups is at least 0")
        return _evenly(list(trainable), groups)
    if not isinstance(groups, list | tuple):
        raise InvalidArgument(
            f"groups is a {type(groups).__name__}; pass a number, or a list of lists of parameters"
        )
    return {i: g for i, g in _listed(groups, named).items() if i in trainable}


def _evenly(ids: list[int], count: int) -> dict[int, int]:
    """The first groups have one more where they do not divide."""
    count = min(count, len(ids))
    rows, longer = divmod(len(ids), count) if count else (0, 0)
    ends = [(g + 1) * rows + min(g + 1, longer) for g in range(count)]
    begins = [0, *ends]
    return {i: g for g in range(count) for i in ids[begins[g] : ends[g]]}


def _listed(groups: Sequence[Any], named: Named) -> dict[int, int]:
    names = {id(p): name for name, p in named}
    found: dict[int, int] = {}
    for g, group in enumerate(groups):
        if not isinstance(group, list | tuple):
            raise InvalidArgument(f"groups[{g}] is a {type(group).__name__}, not a list")
        for p in group:
            if not isinstance(p, torch.Tensor):
                raise InvalidArgument(f"groups[{g}] has a {type(p).__name__} in it, not a tensor")
            if id(p) not in names:
                raise InvalidArgument(
                    f"groups[{g}] has a tensor of shape {tuple(p.shape)} that is none of the "
                    "optimizer's parameters"
                )
            if id(p) in found:
                raise InvalidArgument(
                    f"groups name the parameter '{names[id(p)]}' twice: in {found[id(p)]} and {g}"
                )
            found[id(p)] = g
    return found
