"""Whether gradients are finite: one number that goes with their last bucket.

A sum of gradients is finite where its numbers are, unless it overflows; where it is not, they are
looked at one by one. In a compiled program a branch behind the reduction calls the core, which
calls back into Python; it runs only where some rank's flag is up, and fails the program where that
is an error. The call has a place in the order of collectives, as ranks then tell each other. It is
one by name, as of collectives, so that JAX keeps the program in its cache of compiled ones.
Derivatives of a reduction are not looked at; a batch is one reduction.

Gradients of float16 are those of a scaled loss: some overflow, and whether the program then skips
the step is its own affair. So they are looked at only where FARANDOLE_NUMERICS is set.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.state.discharge import register_discharge_rule
from jax._src.state.types import ReadEffect, WriteEffect
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from farandole._core import Error
from farandole._core import jax as _native
from farandole._numerics import INFINITE, NAN, Found, is_asked_for, mode
from farandole.common._numerics import FLAG, numerics_of
from farandole.common._process_set import ProcessSet, global_process_set, registered_sets
from farandole.jax._call import traced
from farandole.jax._order import group_of_calls, key_of, token

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
        sums = [_exact_sum(wire) for wire in looked.values()]
        self._sums = jnp.stack(sums) if sums else jnp.zeros(0, jnp.float32)
        self.flag = jnp.any(self._sums != 0).astype(jnp.float32)[None]

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
        told = {
            "label": self._label,
            "names": "\n".join(name.replace("\n", " ") for name in self._names),
            "ranks": key_of(self._set),
        }
        _told.bind(flag, self._sums, token(), **told)


@jax.jit
def _exact_sum(wire: Any) -> Any:
    """NaN or infinite, as the wire's numbers are; 0 where all are finite."""

    def of_each(wire: Any) -> Any:
        return jnp.where(jnp.isfinite(wire), 0, jnp.abs(wire)).astype(jnp.float32).sum()

    wide = jnp.promote_types(wire.dtype, jnp.float32)
    finite = jnp.isfinite(jnp.sum(wire, dtype=wide))
    return jax.lax.cond(finite, lambda _: jnp.zeros((), jnp.float32), of_each, wire)


# The call in its order, as of a collective (_call.py). JAX's own effect of calls is one that
# jax.checkpoint refuses.
_told: Any = Primitive("farandole_told")
_told.multiple_results = True


def _abstract(*_: Any, **__: str) -> Any:
    return [], {ReadEffect(2), WriteEffect(2)}


def _with_token(*given: Any, **told: str) -> Any:
    """Where JAX turns the Ref into an operand and a result, after what it says of them."""
    flag, sums, order = given[-3:]
    about = jax.ShapeDtypeStruct(flag.shape, flag.dtype)
    call = jax.ffi.ffi_call(TARGET, about, input_output_aliases={0: 0})

    def tell(order: Any) -> Any:
        same = call(flag, sums, **told)
        return order + (same < 0).astype(order.dtype)  # never; it comes behind the call

    return (None, None, jax.lax.cond(flag[0] > 0, tell, lambda order: order, order)), []


def _in_batch(operands: Sequence[Any], axes: Sequence[Any], **told: str) -> Any:
    """Once for all of a batch."""
    flag, sums = (
        x if axis is None else x.sum(axis) for x, axis in zip(operands[:2], axes[:2], strict=True)
    )
    return _told.bind(flag, sums, operands[2], **told), []


def _of_primals(primals: Sequence[Any], _: Sequence[Any], **told: str) -> Any:
    return _told.bind(*primals, **told), []


@functools.partial(jax.jit, static_argnames=("label", "names", "ranks"))
def _at_once(*operands: Any, **told: str) -> Any:
    return _told.bind(*operands, **told)


_told.def_effectful_abstract_eval(_abstract)
_told.def_impl(_at_once)
register_discharge_rule(_told)(_with_token)
batching.primitive_batchers[_told] = _in_batch
ad.primitive_jvps[_told] = _of_primals


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
