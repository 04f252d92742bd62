"""The state of the optimizers of all stages, in the form of one process' optimizer.

One process numbers parameters by groups, and within a group in the order of the model. So group k
of the whole has the parameters of group k of each stage, in the order of the stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch

from farandole import _world
from farandole._arguments import shown
from farandole._core import Group, InvalidArgument
from farandole.common._objects import made_by_all
from farandole.pipeline._places import Place
from farandole.torch._pipeline.state import gathered

_Groups = list[tuple[dict[str, Any], int]]  # options, and how many parameters
# State that PyTorch's optimizers keep for each element of a parameter.
_LIKE_PARAMETERS = (
    "momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum",
)  # fmt: skip
_NONE: dict[str, Any] = {"state": {}, "param_groups": []}


def gathered_state(
    optimizer: Any, group: Group, place: Place, root_rank: int | None
) -> dict[str, Any]:
    """The state of all stages' optimizers, as of one process. Collective."""
    own, stages = _told(lambda: _state_of(optimizer), place)
    _require_alike(stages)
    flat = {
        (place.stage, i, name): value
        for i, entry in own["state"].items()
        for name, value in entry.items()
    }
    whole = gathered(flat, group, place, root_rank)
    if root_rank not in (None, _world.rank()):
        return {}
    numbers = _numbers(stages)
    state: dict[int, dict[str, Any]] = {}
    for (stage, i, name), value in whole.items():
        state.setdefault(numbers[stage][i], {})[name] = value
    return {"state": dict(sorted(state.items())), "param_groups": _whole_groups(stages)}


def load(optimizer: Any, state: Mapping[str, Any], place: Place) -> None:
    """Loads this stage's part of such a state. Collective. Raises InvalidArgument."""

    def checked() -> Any:
        own = _state_of(optimizer)
        if not isinstance(state, Mapping) or not {"state", "param_groups"} <= state.keys():
            raise InvalidArgument(
                f"state is {shown(state)}; it is an optimizer's state_dict(), of one process or of "
                "Pipeline.optimizer_state_dict()"
            )
        return own

    own, stages = _told(checked, place)
    wanted = [len(each["params"]) for each in _whole_groups(stages)]
    given = [len(each["params"]) for each in state["param_groups"]]
    if wanted != given:
        raise InvalidArgument(
            f"this optimizer's state is of groups of {given} parameters, and those of all stages "
            f"are {wanted}"
        )
    numbers = _numbers(stages)[place.stage]
    if optimizer is None:
        return
    listed = [p for each in optimizer.param_groups for p in each["params"]]
    mine = {i: state["state"][n] for i, n in enumerate(numbers) if n in state["state"]}
    for i, entry in mine.items():
        _check_shapes(entry, listed[i], numbers[i])
    groups = [
        {**theirs, "params": ours["params"]}
        for theirs, ours in zip(state["param_groups"], own["param_groups"], strict=True)
    ]
    optimizer.load_state_dict({"state": mine, "param_groups": groups})


def _state_of(optimizer: Any) -> Any:
    if optimizer is None:  # of a stage without parameters
        return _NONE
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgument(
            f"optimizer is {shown(optimizer)}; it is a torch.optim.Optimizer of this rank's "
            "parameters, or None on a stage without any"
        )
    return optimizer.state_dict()


def _groups_of(own: Any) -> _Groups:
    return [
        ({k: v for k, v in each.items() if k not in ("params", "param_names")}, len(each["params"]))
        for each in own["param_groups"]
    ]


def _told(state_of: Callable[[], Any], place: Place) -> tuple[Any, list[_Groups]]:
    """Collective: this rank's state, and the groups of each stage; or an error on every rank."""
    own: Any = _NONE

    def mine() -> _Groups:
        nonlocal own
        own = state_of()
        return _groups_of(own)

    theirs = made_by_all("optimizers of a Pipeline", mine, place.failed)
    return own, [theirs[place.rank_of(stage, 0)] for stage in range(place.stages)]


def _require_alike(stages: Sequence[_Groups]) -> None:
    """Requires the same options on all stages, as one process has one value for each group."""
    known = [groups for groups in stages if groups]
    for groups in known[1:]:
        if len(groups) != len(known[0]):
            raise InvalidArgument(
                f"optimizers of stages have {len(known[0])} and {len(groups)} groups of parameters"
                "\n  advice: as many groups on each stage, if need be without parameters"
            )
        for k, ((first, _), (other, _)) in enumerate(zip(known[0], groups, strict=True)):
            for name in {**first, **other}:
                if repr(first.get(name)) != repr(other.get(name)):
                    raise InvalidArgument(
                        f"optimizers of stages differ in {name!r} of group {k}: "
                        f"{shown(first.get(name))} and {shown(other.get(name))}; one process has "
                        "one for all its parameters"
                    )


def _counts(stages: Sequence[_Groups]) -> list[list[int]]:
    """Parameters by stage and group."""
    most = max(map(len, stages), default=0)
    return [[n for _, n in groups] + [0] * (most - len(groups)) for groups in stages]


def _numbers(stages: Sequence[_Groups]) -> list[list[int]]:
    """By stage: each parameter's number in the whole model, in the order of its optimizer."""
    counts = _counts(stages)
    found: list[list[int]] = [[] for _ in stages]
    following = 0
    for k in range(len(counts[0])):
        for stage, of_groups in enumerate(counts):
            found[stage] += range(following, following + of_groups[k])
            following += of_groups[k]
    return found


def _whole_groups(stages: Sequence[_Groups]) -> list[dict[str, Any]]:
    totals = [sum(column) for column in zip(*_counts(stages), strict=True)]
    begins = [0, *accumulate(totals)]
    options = next((groups for groups in stages if groups), [])
    return [
        {**each, "params": list(range(begins[k], begins[k + 1]))}
        for k, (each, _) in enumerate(options)
    ]


def _check_shapes(entry: Mapping[str, Any], parameter: torch.Tensor, number: int) -> None:
    for name in _LIKE_PARAMETERS:
        value = entry.get(name)
        if isinstance(value, torch.Tensor) and value.shape != parameter.shape:
            raise InvalidArgument(
                f"'{name}' of parameter {number} is of shape {tuple(value.shape)} in this state, "
                f"and the parameter is of shape {tuple(parameter.shape)}"
            )
