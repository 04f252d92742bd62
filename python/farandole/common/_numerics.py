"""Gradients that are NaN or infinite on one rank: every rank notices, names them and counts.

Each rank looks at its own gradients before they are reduced. It says in one number, the *flag*,
whether one of them is not finite. The flag is reduced with the gradients, so all ranks know of it
in the same step, and an ordinary step has no collective more. Only when a flag is up do ranks tell
each other which rank has which tensor. A framework says how it looks at gradients, and when a step
uses them: a step that is skipped is none.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from farandole import _world
from farandole._core import InvalidArgument, NumericsError
from farandole._numerics import count_step
from farandole.common._objects import gathered, run_named
from farandole.common._process_set import ProcessSet, global_process_set, number_of

FLAG: Final = "whether gradients are finite"  # what the flag is called among the gradients
_MODES = ("warn", "error", "off")
_KINDS = ("NaN", "infinite")
NAN, INFINITE = range(2)


def mode() -> str:
    """What happens in such a step."""
    value = os.environ.get("FARANDOLE_NUMERICS", "warn")
    if value not in _MODES:
        raise InvalidArgument(
            f"FARANDOLE_NUMERICS is '{value}'; it must be one of {' '.join(_MODES)}"
        )
    return value


def is_asked_for() -> bool:
    """Whether the program has set what happens, for those who look only then."""
    return "FARANDOLE_NUMERICS" in os.environ and mode() != "off"


class NonfiniteWarning(RuntimeWarning):
    """Some rank's gradient was NaN or infinite, and was used."""


class Found(NamedTuple):
    """A gradient of this rank that is not finite."""

    tensor: int  # its place among the names
    kind: int


class Numerics:
    """Of one optimizer, on every rank of a set.

    Args:
        label: of its gradients, the same on every rank.
        names: of its gradients.
        process_set: the ranks that reduce them.
    """

    def __init__(
        self, label: str, names: Sequence[str], process_set: ProcessSet = global_process_set
    ) -> None:
        self._label, self._names, self._process_set = label, names, process_set
        self._mode = mode()
        self._warned = False

    @property
    def looks(self) -> bool:
        """Whether gradients are looked at."""
        return self._mode != "off" and self._process_set.size() != 1

    @property
    def is_error(self) -> bool:
        return self._mode == "error"

    def on_any_rank(self, mine: bool) -> bool:
        """Collective, for steps that have no flag."""
        flag = np.array([mine], np.uint8)
        run_named("all_reduce", FLAG, flag, flag, op="max", set=number_of(self._process_set))
        return bool(flag[0])

    @property
    def asks_who(self) -> bool:
        """Whether report() will still ask which tensor it is."""
        return self.is_error or not self._warned

    def report(self, mine: Found | None, step: int | None = None) -> None:
        """Collective: some rank has such a gradient, and this step uses it.

        Args:
            mine: this rank's.
            step: from 1 on, where they are counted.

        Raises:
            NumericsError: by the setting; on every rank, naming the first rank that has one.
        """
        if self.asks_who:
            self._report(mine, step)
        else:
            count_step()

    def _report(self, mine: Found | None, step: int | None) -> None:
        row = np.array([[_world.rank(), *(mine or (-1, -1))]], np.int64)
        name, number = f"{self._label} that are not finite", number_of(self._process_set)
        rows = gathered(row, name, number).reshape(-1, 3).tolist()
        found = {rank: Found(tensor, kind) for rank, tensor, kind in rows if tensor >= 0}
        if not found:
            return  # a sum of finite numbers was not finite, and no gradient is wrong
        count_step()
        error = self._error(found, step)
        if self.is_error:
            raise error
        self._warned = True
        speaks = min(rank for rank, *_ in rows)
        if mine is not None or _world.rank() == speaks:
            warnings.warn(f"farandole: {error}", NonfiniteWarning, stacklevel=2)

    def _error(self, found: dict[int, Found], step: int | None) -> NumericsError:
        first = min(found)
        tensor, kind = found[first]
        name = self._names[tensor]
        when = "" if step is None else f" in step {step}"
        given = "; ".join(
            f"'{self._names[f.tensor]}' {_KINDS[f.kind]} on rank {rank}"
            for rank, f in sorted(found.items())
        )
        error = NumericsError(
            f"rank {first} has a gradient that is {_KINDS[kind]}{when}: '{name}'\n"
            "  evidence: ranks looked at their own gradients before these were reduced: "
            f"{given}\n"
            "  advice: look at that rank's input. FARANDOLE_NUMERICS=error ends training in such a "
            "step, before weights change; warn says it once and counts steps "
            "(farandole.nonfinite_steps()); off does not look"
        )
        error.rank, error.tensor, error.step = first, name, step
        return error


_known: dict[tuple[int, int, str, tuple[str, ...]], Numerics] = {}


def numerics_of(label: str, names: tuple[str, ...], process_set: ProcessSet) -> Numerics:
    """Those of these gradients, in the present world: for hooks that keep nothing between steps."""
    epoch = _world.epoch()
    key = (epoch, number_of(process_set), label, names)
    if key not in _known:
        for old in [k for k in _known if k[0] != epoch]:
            del _known[old]
        _known[key] = Numerics(label, names, process_set)
    return _known[key]
