"""Steps that use a gradient that is NaN or infinite on some rank: counted, warned of, or an error.

How ranks learn of it is common/_numerics.py's.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from farandole._core import InvalidArgument, NumericsError

_MODES = ("warn", "error", "off")
_KINDS = ("NaN", "infinite")
NAN, INFINITE = range(2)
_ADVICE = (
    "look at that rank's input. FARANDOLE_NUMERICS=error ends training in such a step, before "
    "weights change; warn says it once and counts steps (farandole.nonfinite_steps()); off does "
    "not look"
)


def mode() -> str:
    """The setting of what happens in such a step."""
    value = os.environ.get("FARANDOLE_NUMERICS", "warn")
    if value not in _MODES:
        raise InvalidArgument(
            f"FARANDOLE_NUMERICS is '{value}'; it must be one of {' '.join(_MODES)}"
        )
    return value


def is_asked_for() -> bool:
    """Whether FARANDOLE_NUMERICS asks for checks, for callers that check only then. Ranks agree on
    its value alone, not on whether it is set."""
    return os.environ.get("FARANDOLE_NUMERICS", "off") != "off"


class NonfiniteWarning(RuntimeWarning):
    """Some rank's gradient was NaN or infinite, and was used."""


class Found(NamedTuple):
    """A gradient of this rank that is not finite."""

    tensor: int  # its place among the names
    kind: int


_steps = 0


def count_step() -> None:
    global _steps
    _steps += 1


def nonfinite_steps() -> int:
    """How many steps of this process have used gradients to which some rank gave a NaN or an
    infinity: the same number on all ranks that train together.

    Steps that are skipped, as a ``GradScaler`` and Keras' ``LossScaleOptimizer`` do, do not count.
    ``FARANDOLE_NUMERICS`` says what else happens in such a step.

    Examples:
        >>> fd.nonfinite_steps()
        0
    """
    return _steps


class Judge:
    """Handles such steps: they are counted, warned of once, or an error.

    Args:
        done: with gradients, after ranks look at their own.
    """

    def __init__(self, done: str = "reduced") -> None:
        self._mode, self._warned, self._done = mode(), False, done

    @property
    def looks(self) -> bool:
        """Whether gradients are looked at."""
        return self._mode != "off"

    @property
    def is_error(self) -> bool:
        return self._mode == "error"

    @property
    def asks_who(self) -> bool:
        """Whether judge() will still say which tensor it is."""
        return self.is_error or not self._warned

    def judge(
        self, found: Mapping[int, tuple[str, int]], step: int | None = None, *, speaks: bool
    ) -> None:
        """Some rank has such a gradient, and this step uses it.

        Args:
            found: tensor and kind, by rank.
            step: from 1 on, where they are counted.
            speaks: whether this rank warns.

        Raises:
            NumericsError: by the setting; it names the first rank that has one.
        """
        count_step()
        if self.is_error:
            raise self._error(found, step)
        if speaks and not self._warned:
            warnings.warn(f"farandole: {self._error(found, step)}", NonfiniteWarning, stacklevel=2)
        self._warned = True

    def _error(self, found: Mapping[int, tuple[str, int]], step: int | None) -> NumericsError:
        first = min(found)
        name, kind = found[first]
        when = "" if step is None else f" in step {step}"
        given = "; ".join(
            f"'{tensor}' {_KINDS[how]} on rank {rank}"
            for rank, (tensor, how) in sorted(found.items())
        )
        verdict = f"rank {first} has a gradient that is {_KINDS[kind]}{when}: '{name}'"
        evidence = f"ranks looked at their own gradients before these were {self._done}: {given}"
        error = NumericsError(f"{verdict}\n  evidence: {evidence}\n  advice: {_ADVICE}")
        error.rank, error.tensor, error.step = first, name, step
        error.evidence, error.advice = evidence, _ADVICE
        return error


def first_found(arrays: Iterable[tuple[int, np.ndarray]]) -> Found | None:
    """The first numpy array that is not finite, by its place among the names."""
    for i, array in arrays:
        if array.dtype.kind not in "fcV":  # V: of ml_dtypes
            continue
        with np.errstate(all="ignore"):  # a sum may overflow
            total = array.sum()
        if not np.isfinite(total) and not np.isfinite(array).all():
            return Found(i, NAN if np.isnan(array).any() else INFINITE)
    return None
