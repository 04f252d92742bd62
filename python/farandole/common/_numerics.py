"""Gradients that are NaN or infinite on one rank: every rank notices, names them and counts.

Each rank looks at its own gradients before they are reduced. It says in one number, the *flag*,
whether one of them is not finite. The flag is reduced with the gradients, so all ranks know of it
in the same step, and an ordinary step has no collective more. Only when a flag is up do ranks tell
each other which rank has which tensor. A framework says how it looks at gradients, and when a step
uses them: a step that is skipped is none. Where nothing is reduced the flag goes with what ranks
send anyway: with the end of a pipeline's step, with a worker's push.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from farandole import _world
from farandole._numerics import Found, Judge, count_step
from farandole.common._objects import allgather_object, run_named
from farandole.common._process_set import ProcessSet, global_process_set, number_of

FLAG: Final = "whether gradients are finite"  # the flag's name among the gradients


class Numerics(Judge):
    """The check of one optimizer's gradients, on every rank of a set.

    Args:
        label: of its gradients, the same on every rank.
        names: of this rank's gradients.
        process_set: the ranks that reduce them.
    """

    def __init__(
        self, label: str, names: Sequence[str], process_set: ProcessSet = global_process_set
    ) -> None:
        super().__init__()
        self._label, self._names, self._process_set = label, names, process_set

    @property
    def looks(self) -> bool:
        return super().looks and self._process_set.size() != 1

    def on_any_rank(self, mine: bool) -> bool:
        """Whether it is true on any rank, for steps without a flag. Collective."""
        flag = np.array([mine], np.uint8)
        run_named("all_reduce", FLAG, flag, flag, op="max", set=number_of(self._process_set))
        return bool(flag[0])

    def report(self, mine: Found | None, step: int | None = None) -> None:
        """Collective: some rank has such a gradient, and this step uses it.

        Args:
            mine: this rank's.
            step: from 1 on, where they are counted.

        Raises:
            NumericsError: by the setting; on every rank, naming the first rank that has one.
        """
        if not self.asks_who:
            count_step()
            return
        row = None if mine is None else (self._names[mine.tensor], mine.kind)
        name = f"{self._label} that are not finite"
        rows = allgather_object((_world.rank(), row), name, self._process_set)
        found = {rank: each for rank, each in rows if each is not None}
        if found:  # else a sum of finite numbers was not finite, and no gradient is wrong
            self.judge(found, step, speaks=_world.rank() in (rows[0][0], *found))


_known: dict[tuple[int, int, str, tuple[str, ...]], Numerics] = {}


def numerics_of(label: str, names: tuple[str, ...], process_set: ProcessSet) -> Numerics:
    """The check of these gradients in the present world, for hooks that keep no state."""
    epoch = _world.epoch()
    key = (epoch, number_of(process_set), label, names)
    if key not in _known:
        for old in [k for k in _known if k[0] != epoch]:
            del _known[old]
        _known[key] = Numerics(label, names, process_set)
    return _known[key]
