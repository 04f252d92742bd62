"""Whether pushed gradients are finite: a worker looks at its own, and reports with the push."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from farandole import _world
from farandole._numerics import Judge, count_step, first_found
from farandole.parameter_server._rows import Gradient, Rows

_Found = tuple[str, int] | None  # the variable, and the kind of number


class Looking:
    """The checks of one worker, or of one server."""

    def __init__(self) -> None:
        self._judge = Judge("pushed")

    def found(self, gradients: Mapping[str, Gradient]) -> _Found:
        """On a worker, before it pushes. Raises NumericsError by the setting."""
        if not self._judge.looks:
            return None
        names = list(gradients)
        found = first_found(enumerate(map(_values, gradients.values())))
        if found is None:
            return None
        named = names[found.tensor], found.kind
        self._judge.judge({_world.rank(): named}, speaks=True)
        return named

    def hear(self, rank: int, kind: int, place: int, names: Sequence[str]) -> None:
        """On a server: takes the numbers that told() gave on a worker. `names`: of its pieces."""
        if kind == 0:
            return
        if place == 0:  # another server has the variable, and says so
            count_step()
        else:
            self._judge.judge({rank: (names[place - 1], kind - 1)}, speaks=True)


def told(found: _Found, names: Sequence[str]) -> tuple[int, int]:
    """The numbers that go with a push to a server: the kind, and the variable's position among
    those of which the server has a part. From 1 on; 0: none."""
    if found is None:
        return 0, 0
    name, kind = found
    return kind + 1, names.index(name) + 1 if name in names else 0


def _values(gradient: Gradient) -> np.ndarray:
    return gradient.values if isinstance(gradient, Rows) else gradient
