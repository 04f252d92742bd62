"""Whether the ranks of a model have the same weights, as training begins and later.

Where they have not (a broadcast that was forgotten, a checkpoint that one rank loads, seeds), each
trains a model of its own, and nobody notices: all gradients have the same shapes. So ranks compare
a checksum of every parameter in a step, before it changes any. A framework says which arrays these
are, when a step begins, and which line of a program makes them equal.

Where a reducer runs through a step, the core does it beside the gradients (fusion/weights.h).
Elsewhere it is a gather by name, which goes on without a rank that has joined.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from farandole import _core, _world
from farandole._core import Mismatch
from farandole._limits import setting
from farandole.common._objects import gathered
from farandole.common._process_set import ProcessSet, global_process_set, number_of


def period() -> float | None:
    """Every how many steps weights are compared: infinity where that is in the first one alone,
    None where it is never."""
    value = setting("FARANDOLE_CHECK_WEIGHTS")
    return {"off": None, "first": math.inf}.get(value) if not value.isdigit() else float(value)


def compares(steps: Any, period: float) -> Any:
    """Whether weights are compared after so many steps: before the first and the second, where
    ranks begin apart or update apart, and then every `period` steps. Of an array of JAX, an array.
    """
    if math.isinf(period):
        return steps == 0
    return (steps == 0) | (steps == 1) | (steps % int(period) == 0)


def looked_at(count: int) -> int:
    """How many numbers are compared of a tensor of an optimizer's state, the first ones: state may
    have twice the bytes of the weights, and what differs in it soon differs in the weights."""
    return min(count, max(1024, count // 8))


class Weights:
    """Compares the weights of one model on every rank of a set.

    Args:
        label: of this model, the same on every rank.
        names: of the parameters, in the model's order.
        line: of a program, that makes them equal.
        process_set: the ranks that train it.
    """

    def __init__(
        self,
        label: str,
        names: Sequence[str],
        line: str,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        self.steps = 0  # that have begun, alike on every rank
        self._label, self._names, self._line = f"weights of {label}", list(names), line
        self._process_set = process_set
        self._period = period() if process_set.size() != 1 else None
        self._equal_before = 0  # the last step in which they were equal
        self.table: list[list[int]] = []  # rank, checksums; as last found to differ
        self._fingerprint = np.frombuffer("\n".join(names).encode(), np.uint8)

    def begin_step(self, checksums: Callable[[], Sequence[int]]) -> None:
        """Collective. In a step that compares, `checksums` gives those of the parameters.

        Raises:
            Mismatch: they differ; on every rank, naming the first that does. The step has not
                begun.
        """
        if self._period is not None and compares(self.steps, self._period):
            error = self.difference(checksums())
            if error is not None:
                raise error
        self.steps += 1

    def difference(self, checksums: Sequence[int]) -> Mismatch | None:
        """How the ranks' parameters differ, in the same words on every rank. Collective. None also
        where models differ, which another comparison reports."""
        digest = _core.checksums([np.array(checksums, np.uint64), self._fingerprint])
        heads = self._gathered([_world.rank(), self._equal_before, *digest])
        alike = len({fingerprint for *_, fingerprint in heads}) == 1
        step, before = self.steps + 1, max(row[1] for row in heads)  # some had joined then
        if not alike or len({row[2] for row in heads}) == 1:
            self._equal_before = step
            return None
        self.table = self._gathered([_world.rank(), *checksums])
        rows = [(rank, sums) for rank, *sums in self.table]
        return _core.weights_error(self._names, rows, step, before, self._line)

    def _gathered(self, mine: Sequence[int]) -> list[list[int]]:
        rows = gathered(np.array(mine, np.uint64), self._label, number_of(self._process_set))
        table: list[list[int]] = rows.reshape(-1, len(mine)).tolist()
        return table


class PatientWeights(Weights):
    """For programs that broadcast after the first step, as Horovod's do that make their variables
    in it. A difference is an error in the next step only, unless these variables were broadcast in
    between.
    """

    def watch(self, variables: Sequence[Any]) -> PatientWeights:
        """Before the first step. `variables`: whose values are compared, for note_broadcast()."""
        self._variables = [weakref.ref(variable) for variable in variables]
        self._at_start: list[list[int]] = []
        self._open = {id(variable) for variable in variables}  # may still differ from the start
        return self

    @property
    def waits(self) -> bool:
        """Whether begin_step() has to be called in every step from now on."""
        return self._period is not None and (bool(self._open) or self._period < math.inf)

    @property
    def is_over(self) -> bool:
        return any(ref() is None for ref in self._variables)

    def is_of(self, variables: Sequence[Any]) -> bool:
        return all(ref() is v for ref, v in zip(self._variables, variables, strict=True))

    def begin_step(self, checksums: Callable[[], Sequence[int]]) -> None:
        if self._period is None:
            return
        if self.steps > 0 and not self._open:
            super().begin_step(checksums)
            return
        if self.steps > 0:
            self._require_equal(checksums())
        elif self.difference(checksums()) is None:
            self._open.clear()
        else:
            self._at_start = self.table
        self.steps += 1

    def _require_equal(self, checksums: Sequence[int]) -> None:
        error = self.difference(checksums)
        if error is None:
            self._open.clear()
        elif self.table != self._at_start:  # else no rank has taken a step yet
            raise error

    def note_broadcast(self, variables: set[int]) -> None:
        self._open -= variables

    def give_up(self) -> None:
        self._period = None
        self._open.clear()


_patient: dict[Any, PatientWeights] = {}
_joined: set[int] = set()  # epochs in which ranks have joined


def patient_weights(
    label: str, names: Sequence[str], line: str, process_set: ProcessSet, variables: Sequence[Any]
) -> PatientWeights:
    """The weights of these variables, for callers that keep no state between steps."""
    key = (_world.epoch(), number_of(process_set), tuple(map(id, variables)))
    known = _patient.get(key)
    if known is None or not known.is_of(variables):
        over = [k for k, weights in _patient.items() if weights.is_over or k[0] != key[0]]
        for old in over:
            del _patient[old]
        known = PatientWeights(label, names, line, process_set).watch(variables)
        _patient[key] = known
        if _world.epoch() in _joined:
            known.give_up()
    return known


def note_join() -> None:
    """Ranks have taken different numbers of steps, so none can tell any more when to compare."""
    _joined.add(_world.epoch())
    for weights in _patient.values():
        weights.give_up()


def note_broadcast(variables: Iterable[Any]) -> None:
    """These variables have the root's values from now on, on every rank."""
    ids = set(map(id, variables))
    for weights in _patient.values():
        weights.note_broadcast(ids)
