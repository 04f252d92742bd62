"""The state of the optimizers of all stages, in the form of one process' optimizer.

An optimizer's variables are a list: some of its own, as how many steps it has done, and *slots*,
one for each variable that it trains, as a momentum. In which order they are follows from its class
and options: a copy of it that trains two small variables shows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import keras
import numpy as np

from farandole._arguments import shown
from farandole._core import Group, InvalidArgument
from farandole.common._objects import compare, made_by_all
from farandole.keras._pipeline.results import weights_of_all
from farandole.pipeline._places import Place

# A block of the list: slots of every variable, in turn; or () for one of the optimizer's own.
_Layout = list[tuple[str, ...]]
# A variable of the list: its block, its slot, and the trained variable's number in the model.
_Row = tuple[int, int, int]
_OWN = -1


def layout_of(optimizer: Any) -> _Layout:
    """Raises InvalidArgument if the names of variables do not show where they belong."""
    small, variables = _probe(optimizer, 2)
    found = [_slot_of(each, small) for each in variables]
    layout: _Layout = []
    while found:
        if found[0][0] == _OWN:
            layout.append(())
            del found[0]
            continue
        slots = tuple(slot for _, slot in takewhile(lambda each: each[0] == 0, found))
        expected = [(i, slot) for i in range(2) for slot in slots]
        if not slots or found[: len(expected)] != expected:
            raise _unknown(optimizer)
        layout.append(slots)
        del found[: len(expected)]
    if len(_probe(optimizer, 3)[1]) != len(_rows(layout, range(3))):
        raise _unknown(optimizer)
    return layout


def _probe(optimizer: Any, count: int) -> tuple[list[Any], list[Any]]:
    """Small variables, and those of a copy of the optimizer that trains them."""
    small = [keras.Variable([[0.0]], name=f"farandole_probe_{i}") for i in range(count)]
    probe = type(optimizer).from_config(optimizer.get_config())
    probe.build(small)
    return small, probe.variables


def _slot_of(variable: Any, trained: Sequence[Any]) -> tuple[int, str]:
    """The position of the trained variable that it is a slot of, or _OWN; and the slot's name."""
    for i, each in enumerate(trained):
        if variable.name.startswith(each.name):
            return i, variable.name[len(each.name) :]
    return _OWN, ""


def _unknown(optimizer: Any) -> InvalidArgument:
    return InvalidArgument(
        f"optimizer '{optimizer.name}' has variables that do not say which variable of the model "
        "they belong to, so its state cannot be put together from stages"
    )


def _rows(layout: _Layout, trained: Sequence[int]) -> list[_Row]:
    """The list of an optimizer that trains these variables."""
    rows: list[_Row] = []
    for block, slots in enumerate(layout):
        if not slots:
            rows.append((block, 0, _OWN))
        rows += [(block, slot, number) for number in trained for slot in range(len(slots))]
    return rows


class _Told:
    """Layouts that ranks exchange before they gather or load a state. Collective.

    Args:
        trained: by this rank's optimizer, in its order, as numbers in the whole model.
    """

    def __init__(self, optimizer: Any, trained: Sequence[int], place: Place) -> None:
        layout: _Layout = []

        def mine() -> tuple[str, list[int]]:
            nonlocal layout
            layout = _checked(optimizer, len(trained))
            return f"{type(optimizer).__name__} with variables {layout}", list(trained)

        told = made_by_all("optimizers of stages", mine, place.failed)
        compare(
            "the optimizer of a Pipeline",
            {rank: [theirs] for rank, (theirs, _) in enumerate(told)},
            "compile with the same optimizer on every rank",
        )
        stages = [told[place.rank_of(stage, 0)][1] for stage in range(place.stages)]
        self.whole = _rows(layout, sorted(number for each in stages for number in each))
        self.mine = _rows(layout, trained) if trained else []
        # The optimizer's own variables come from the first stage that trains something.
        self.has_own = next((s for s, each in enumerate(stages) if each), 0) == place.stage


def _checked(optimizer: Any, trained: int) -> _Layout:
    if optimizer is None:
        raise InvalidArgument("the model is not compiled; call compile() before")
    layout = layout_of(optimizer)
    if trained and len(optimizer.variables) != len(_rows(layout, range(trained))):
        raise _unknown(optimizer)
    return layout


def gathered_state(
    optimizer: Any, trained: Sequence[int], group: Group, place: Place, root: int | None
) -> dict[str, Any]:
    """Collective: as Keras' ``save_own_variables`` of one process gives it."""
    told = _Told(optimizer, trained, place)
    places = {row: i for i, row in enumerate(told.whole)}
    sent = [
        (variable, places[row])
        for variable, row in zip(optimizer.variables, told.mine, strict=False)
        if row[2] != _OWN or told.has_own
    ]
    variables, numbers = [v for v, _ in sent], [i for _, i in sent]
    arrays = weights_of_all(variables, numbers, group, place, root)
    return {str(i): array for i, array in enumerate(arrays)}


def load(optimizer: Any, trained: Sequence[int], state: Any, place: Place) -> None:
    """Collective. Raises InvalidArgument."""
    told = _Told(optimizer, trained, place)
    if not isinstance(state, Mapping):
        raise InvalidArgument(
            f"set_optimizer_state(): {shown(state)}; it is a dictionary of arrays, as of "
            "get_optimizer_state(), or of save_own_variables() of one process' optimizer"
        )
    if sorted(state, key=str) != sorted(map(str, range(len(told.whole)))):
        raise InvalidArgument(
            f"set_optimizer_state(): the state has {len(state)} variables, and the optimizer of "
            f"the whole model has {len(told.whole)}, '0' to '{len(told.whole) - 1}'"
        )
    places = {row: str(i) for i, row in enumerate(told.whole)}
    pairs = [
        (variable, places[row], state[places[row]])
        for variable, row in zip(optimizer.variables, told.mine, strict=False)
    ]
    for variable, name, value in pairs:
        if np.shape(value) != tuple(variable.shape):
            raise InvalidArgument(
                f"set_optimizer_state(): variable '{name}' has the shape {np.shape(value)}, and "
                f"'{variable.path}' has {tuple(variable.shape)}"
            )
    for variable, _, value in pairs:
        variable.assign(value)
