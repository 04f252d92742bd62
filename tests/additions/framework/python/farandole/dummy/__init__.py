"""Row "a framework" of CONTRIBUTING.md: one whose tensor is a list of floats."""

from __future__ import annotations

from array import array

import numpy as np

from farandole import _core
from farandole.common import _basics
from farandole.common._basics import *  # noqa: F403
from farandole.common._objects import run_named
from farandole.common._process_set import ProcessSet, global_process_set, number_of
from farandole.common._reduction import Average, core_op
from farandole.common._weights import Weights

__all__ = ["Optimizer", "allreduce", *_basics.__all__]


def allreduce(
    tensor: list[float],
    name: str,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
) -> list[float]:
    """The tensors of all ranks, reduced by name."""
    mine = np.array(tensor)
    result = np.empty_like(mine)
    run_named("all_reduce", name, mine, result, op=core_op(op), set=number_of(process_set))
    return list(array("d", result.tobytes()))


class Optimizer:
    """Descends by the ranks' mean gradient."""

    def __init__(self, parameters: dict[str, list[float]], rate: float) -> None:
        self._parameters, self._rate = parameters, rate
        line = "the dummy has no broadcast"
        self._weights = Weights("the dummy", list(parameters), line)

    def step(self, gradients: dict[str, list[float]]) -> None:
        values = [np.array(p) for p in self._parameters.values()]
        self._weights.begin_step(lambda: [_core.checksums([value])[0] for value in values])
        for name, parameter in self._parameters.items():
            for i, slope in enumerate(allreduce(gradients[name], f"gradient of {name}")):
                parameter[i] -= self._rate * slope
