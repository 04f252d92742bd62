"""Groups of gradients that the user asks for: Horovod's `num_groups` and `groups`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from farandole._arguments import type_of
from farandole._core import InvalidArgument
from farandole.common.util import split_list

Groups = int | Sequence[Sequence[Any]]


def groups_of(groups: Any, num_groups: Any, of: str = "variables") -> Groups:
    """A number of groups, 0 for none, or lists. Raises InvalidArgument."""
    given = num_groups if groups is None else groups
    if isinstance(given, int) and not isinstance(given, bool):
        if given < 0:
            raise InvalidArgument(f"groups is {given}; a number of groups is at least 0")
        return given
    if not isinstance(given, list | tuple):
        raise InvalidArgument(
            f"groups is {type_of(given)}; pass a number, or a list of lists of {of}"
        )
    for g, group in enumerate(given):
        if not isinstance(group, list | tuple):
            raise InvalidArgument(f"groups[{g}] is {type_of(group)}, not a list")
    return given


def weights_of(layers: Any) -> list[Any]:
    """Those that layers of Keras train, of `local_layers`. Raises InvalidArgument."""
    given = [] if layers is None else list(layers) if isinstance(layers, Iterable) else [layers]
    for layer in given:
        if not hasattr(layer, "trainable_weights"):
            raise InvalidArgument(f"local_layers has {type_of(layer)}, which is no layer")
        if not getattr(layer, "built", True):
            raise InvalidArgument(
                f"local_layers has '{layer.name}', which has no variables yet; build the model"
            )
    return [weight for layer in given for weight in layer.trainable_weights]


def _path_of(variable: Any) -> str:
    return f"'{getattr(variable, 'path', type(variable).__name__)}'"


def members(
    groups: Groups,
    variables: Sequence[Any],
    what: str = "variables that ranks share",
    name_of: Callable[[Any], str] = _path_of,
) -> list[list[int]]:
    """The places of each group's variables. Those that no list names are in none.

    Raises:
        InvalidArgument: a list names what is none of the variables, or one of them twice.
    """
    if isinstance(groups, int):
        groups = min(groups, len(variables))
        return split_list(range(len(variables)), groups) if groups else []
    places = {id(variable): i for i, variable in enumerate(variables)}
    group_of: dict[int, int] = {}
    for g, group in enumerate(groups):
        for variable in group:
            i, name = places.get(id(variable), -1), name_of(variable)
            if i < 0:
                raise InvalidArgument(
                    f"groups[{g}] has {name}, which is none of the optimizer's {what}"
                )
            if i in group_of:
                raise InvalidArgument(f"groups name {name} twice: in {group_of[i]} and {g}")
            group_of[i] = g
    return [[places[id(variable)] for variable in group] for group in groups]
