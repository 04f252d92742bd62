"""An optimizer's parameters: their names, and which of them are reduced together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from farandole._arguments import type_of
from farandole._core import InvalidArgument
from farandole.common import _groups
from farandole.common._deprecated import warn_deprecated
from farandole.torch._tensors import check_tensor

Named = list[tuple[str, torch.Tensor]]


def gets_gradients(p: torch.Tensor) -> bool:
    """Whether it is neither frozen nor empty now, and so has a gradient to be reduced."""
    return p.requires_grad and p.numel() > 0


def named_of(optimizer: torch.optim.Optimizer, named_parameters: Iterable[Any] | None) -> Named:
    """The optimizer's parameters in registration order, each with a name of its own."""
    owned = [
        (f"group {g}, parameter {i}", p)
        for g, group in enumerate(optimizer.param_groups)
        for i, p in enumerate(group["params"])
    ]
    for name, p in owned:
        check_tensor(p, name, or_complex=True)
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
    given = _groups.groups_of(groups, 0, "parameters")
    trainable = {id(p): p for _, p in named if p.requires_grad}
    # A list may name frozen ones, which are left out.
    parameters = list(trainable.values()) if isinstance(given, int) else [p for _, p in named]
    names = {id(p): f"'{name}'" for name, p in named}

    def name_of(p: Any) -> str:
        if isinstance(p, torch.Tensor):
            return names.get(id(p), f"a tensor of shape {tuple(p.shape)}")
        return f"{type_of(p)} in it"

    together = _groups.members(given, parameters, "parameters", name_of)
    ids = [(id(parameters[i]), g) for g, group in enumerate(together) for i in group]
    return {i: g for i, g in ids if i in trainable}
