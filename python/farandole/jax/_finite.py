"""Whether gradients are finite: one number that goes with their last bucket.

Sums of gradients are not finite where one of their numbers is not. In a compiled program a branch
behind the reduction calls the core, which calls back into Python; it runs only where some rank's
flag is up, and fails the program where that is an error. The call is one by name, as of
collectives, so that JAX keeps the program in its cache of compiled ones. Derivatives and batches of
a reduction are not looked at.

Gradients of float16 are those of a scaled loss: some overflow, and whether the program then skips
the step is its own affair. So they are looked at only where FARANDOLE_NUMERICS is set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from farandole._core import Error
from farandole._core import jax as _native
from farandole._numerics import INFINITE, NAN, Found, is_asked_for, mode
from farandole.common._numerics import FLAG, numerics_of
from farandole.common._process_set import ProcessSet, global_process_set, registered_sets
from farandole.jax._call import traced
from farandole.jax._order import group_of_calls, key_of

__all__ = ["FLAG", "FiniteCheck", "check_of"]

TARGET = "farandole_gradients"


def check_of(
    label: str, wires: Mapping[str, Any], process_set: ProcessSet, given: Iterable[Any]
) -> FiniteCheck | None:
    """The check of these gradients; None where it is off.

    Args:
        label: of the gradients.
        wires: as they are sent, by name.
        given: the gradients before they were compressed.
    """
    if not wires or mode() == "off" or group_of_calls(process_set).size == 1:
        return None
    if not is_asked_for() and any(each.dtype == jnp.float16 for each in given):
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
        self._label, self._names, self._set = label, tuple(looked), process_set
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
                _report(self._label, self._names, self._set, np.asarray(self._sums))
            return
        call = jax.ffi.ffi_call(TARGET, (), has_side_effect=True, vmap_method="sequential")
        told = {
            "label": self._label,
            "names": "\n".join(name.replace("\n", " ") for name in self._names),
            "ranks": key_of(self._set),
        }
        jax.lax.cond(flag[0] > 0, lambda: call(flag, self._sums, **told), tuple)


def _report(label: str, names: tuple[str, ...], process_set: ProcessSet, sums: Any) -> None:
    bad = np.flatnonzero(~np.isfinite(sums))
    mine = None
    if len(bad):
        at = int(bad[-1])  # the last layer's gradient comes first
        mine = Found(at, NAN if np.isnan(sums[at]) else INFINITE)
    numerics_of(label, names, process_set).report(mine)


def _judge(label: str, names: str, ranks: str, sums: list[float]) -> Error | None:
    """The error that ends a program, if one does."""
    sets = [global_process_set, *registered_sets()]
    process_set = next(each for each in sets if key_of(each) == ranks)
    try:
        _report(label, tuple(names.split("\n")), process_set, np.asarray(sums))
    except Error as error:
        return error
    return None


_native.judge_by(_judge)
