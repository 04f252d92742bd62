"""Gradients that an optimizer adds up over several steps: each rank's own, until they are reduced.

Where all ranks are given one state, these become the mean of the ranks', with which each goes on:
what is reduced in the end is the same. The root's alone would be taken for everybody's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np

from farandole import _world
from farandole.keras import _host


def inner_of(optimizer: Any) -> Any:
    """The optimizer inside a LossScaleOptimizer; any other one is returned as it is."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def accumulated_of(optimizer: Any) -> list[Any]:
    """In the order of the variables that it trains; none where it adds up nothing."""
    return list(getattr(inner_of(optimizer), "_accumulated_gradients", ()))


def accumulated_for(optimizer: Any, trained: Iterable[Any]) -> list[Any]:
    """Those of these variables."""
    wanted, inner = set(map(id, trained)), inner_of(optimizer)
    pairs = zip(inner._trainable_variables, accumulated_of(optimizer), strict=False)
    return [gradient for variable, gradient in pairs if id(variable) in wanted]


def besides(variables: Iterable[Any], others: Iterable[Any]) -> list[Any]:
    """Returns the variables without those others."""
    left_out = set(map(id, others))
    return [variable for variable in variables if id(variable) not in left_out]


def share_all(
    variables: Sequence[Any],
    optimizers: Sequence[Any],
    share: Callable[[list[Any]], None],
    accumulated: Callable[[Any], list[Any]] = accumulated_of,
) -> None:
    """Collective: gives all ranks the root's values of variables, among them the optimizers'.

    Args:
        share: does so with those of which the root's values count.
        accumulated: those of an optimizer that hold this rank's gradients.
    """
    given = set(map(id, variables))
    adding = [(each, [v for v in accumulated(each) if id(v) in given]) for each in optimizers]
    before = [_steps_of(optimizer) if own else 0 for optimizer, own in adding]
    share(besides(variables, (v for _, own in adding for v in own)))
    for number, ((optimizer, own), steps) in enumerate(zip(adding, before, strict=True)):
        if own:  # a rank that has not taken the root's steps has nothing of the present window
            _average(number, optimizer, own, takes_part=steps == _steps_of(optimizer))


def average_accumulated(optimizer: Any, variables: list[Any]) -> None:
    """Collective, between ranks that have trained together. `variables`: those with gradients."""
    if variables:
        _average(0, optimizer, variables, takes_part=True)


def _steps_of(optimizer: Any) -> int:
    """Those that only add up gradients, too."""
    return int(keras.ops.convert_to_numpy(inner_of(optimizer)._iterations))


def _average(number: int, optimizer: Any, variables: list[Any], *, takes_part: bool) -> None:
    if _world.size() == 1:
        return
    if _steps_of(optimizer) % inner_of(optimizer).gradient_accumulation_steps == 0:
        if not takes_part:
            for variable in variables:
                variable.assign(keras.ops.zeros_like(variable))
        return
    label = f"accumulated gradients of optimizer {number}"
    parts = int(_host.all_gather(np.array([takes_part], np.int64), label).sum())
    for i, variable in enumerate(variables):
        mine = np.array(keras.ops.convert_to_numpy(variable), np.float64)
        ours = mine if takes_part else np.zeros_like(mine)
        mean = _host.all_reduce(ours, "sum", f"{label}, {i}") / parts
        variable.assign(keras.ops.cast(mean, variable.dtype))
