"""Whether gradients are finite: one number that goes with their last bucket.

Sums of gradients are not finite where one of their numbers is not. In a compiled program a branch
behind the reduction calls back into Python; it runs only where some rank's flag is up, and fails
the program where that is an error. JAX does not keep such a program in its cache of compiled ones,
so a program looks only where FARANDOLE_NUMERICS is set. Derivatives and batches of a reduction are
not looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from farandole._numerics import INFINITE, NAN, Found, is_asked_for, mode
from farandole.common._numerics import FLAG, numerics_of
from farandole.common._process_set import ProcessSet
from farandole.jax._call import traced
from farandole.jax._order import group_of_calls

__all__ = ["FLAG", "FiniteCheck", "check_of"]


def check_of(label: str, wires: Mapping[str, Any], process_set: ProcessSet) -> FiniteCheck | None:
    """The check of these gradients; None where it is off.

    Args:
        label: of the gradients.
        wires: as they are sent, by name.
    """
    looks = is_asked_for() if traced(list(wires.values())) else mode() != "off"
    if not wires or not looks or group_of_calls(process_set).size == 1:
        return None
    return FiniteCheck(label, wires, process_set)


class FiniteCheck:
    """The check of one reduction's gradients; see `check_of`."""

    def __init__(self, label: str, wires: Mapping[str, Any], process_set: ProcessSet) -> None:
        looked = {
            name: jax.lax.stop_gradient(wire)
            for name, wire in wires.items()
            if jnp.issubdtype(wire.dtype, jnp.floating)
        }
        self._how = (label, tuple(looked), process_set)
        sums = [jnp.sum(wire, dtype=jnp.float32) for wire in looked.values()]
        self._sums = jnp.stack(sums) if sums else jnp.zeros(0)
        self.flag = jnp.logical_not(jnp.isfinite(jnp.sum(self._sums))).astype(jnp.float32)[None]

    def judge(self, flag: Any) -> None:
        """Collective where it is up on some rank.

        Raises:
            NumericsError: outside of programs, by the setting. In a program it is the text of a
                JaxRuntimeError.
        """
        if not traced([flag]):
            if np.asarray(flag)[0] > 0:
                self._report(flag, self._sums)
            return

        def tell() -> None:
            io_callback(self._report, None, flag, self._sums)

        jax.lax.cond(flag[0] > 0, tell, lambda: None)

    def _report(self, flag: Any, sums: Any) -> None:
        values = np.asarray(sums)
        bad = np.flatnonzero(~np.isfinite(values))
        if np.asarray(flag)[0] == 0:  # of a batch, whose branches all run
            return
        mine = None
        if len(bad):
            at = int(bad[-1])  # the last layer's gradient comes first
            mine = Found(at, NAN if np.isnan(values[at]) else INFINITE)
        numerics_of(*self._how).report(mine)
