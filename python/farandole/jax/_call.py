"""One collective as JAX knows it: a primitive that XLA lowers to a call into the core."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from farandole._core import InvalidArgument
from farandole._core import jax as _native
from farandole.jax import _place
from farandole.jax._order import TARGET, token

_ROWS = {"all_gather", "reduce_scatter", "all_to_all"}  # results are not where operands lie
_LINEAR = ("sum", "mean")


@dataclass(frozen=True)
class Call:
    """What is the same in every execution, and on every rank but the label's array."""

    kind: str
    size: int
    label: str
    line: str | None = None  # of the user's code; None: the label says which call this is
    op: str = "sum"
    prescale: float = 1.0
    postscale: float = 1.0
    ranks: str = ""  # of the process set, of which `size` are and in which `root` and `rank` are
    root: int = 0  # places
    rank: int = 0

    def result_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if self.kind == "all_gather":
            return (self.size * shape[0], *shape[1:])
        if self.kind == "reduce_scatter":
            return (shape[0] // self.size, *shape[1:])
        return shape


_collective: Any = Primitive("farandole")
_collective.multiple_results = True


def _abstract(*operands: Any, call: Call) -> list[Any]:
    arrays = [jax.core.ShapedArray(call.result_shape(a.shape), a.dtype) for a in operands[:-1]]
    return [*arrays, jax.core.ShapedArray((1,), np.uint32)]


_collective.def_abstract_eval(_abstract)


@functools.partial(jax.jit, static_argnames="call")
def _program(*operands: Any, call: Call) -> Any:
    return _collective.bind(*operands, call=call)


def _at_once(*operands: Any, call: Call) -> Any:
    with jax.disable_jit(False):  # without jit, the program would be this very call
        return _program(*operands, call=call)


_collective.def_impl(_at_once)


def _lower(ctx: Any, *operands: Any, call: Call) -> Any:
    last = len(operands) - 1
    in_place = range(last) if call.kind not in _ROWS else ()
    rule = jax.ffi.ffi_lowering(
        TARGET, has_side_effect=True, operand_output_aliases={i: i for i in [*in_place, last]}
    )
    label = call.label
    if call.line is not None:
        label = _place.name_in(ctx, label, call.line, call.ranks)
    return rule(
        ctx,
        *operands,
        kind=call.kind,
        label=label,
        op=call.op,
        prescale=np.float64(call.prescale),
        postscale=np.float64(call.postscale),
        ranks=call.ranks,
        root=np.int64(call.root),
        size=np.int64(call.size),
    )


mlir.register_lowering(_collective, _lower, cacheable=False)  # calls have numbers


def _refuse_vmap(*_: Any, call: Call) -> NoReturn:
    raise InvalidArgument(
        f"{call.kind} '{call.label}' is inside vmap, where its place in the ranks' order has no "
        "meaning\n  advice: call it outside vmap, on the whole array"
    )


batching.primitive_batchers[_collective] = _refuse_vmap


def _bind(call: Call, arrays: Sequence[Any], order: Any) -> tuple[Any, ...]:
    *results, order[...] = _collective.bind(*arrays, order[...], call=call)
    return tuple(results)


# The Ref is an argument, so that backward finds it wherever JAX moves that to.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(call: Call, arrays: tuple[Any, ...], order: Any) -> tuple[Any, ...]:
    return _bind(call, arrays, order)


def _forward(call: Call, arrays: tuple[Any, ...], order: Any) -> Any:
    if call.op not in _LINEAR:
        raise InvalidArgument(f"{call.kind} '{call.label}' with op={call.op!r} has no gradient")
    return _bind(call, arrays, order), order


def _backward(call: Call, order: Any, cotangents: tuple[Any, ...]) -> Any:
    """The cotangent of the function of all ranks' arrays, as if the ranks' losses were added."""
    floats = [i for i, ct in enumerate(cotangents) if ct.dtype != jax.dtypes.float0]
    given = tuple(cotangents[i] for i in floats)
    back: list[Any] = [None] * len(cotangents)
    if given:
        for i, ct in zip(floats, _transposed(call, given, order), strict=True):
            back[i] = ct
    return tuple(back), None


_differentiable.defvjp(_forward, _backward)


def _transposed(call: Call, given: tuple[Any, ...], order: Any) -> Sequence[Any]:
    back = replace(
        call,
        label=f"gradient of {call.label}",
        prescale=call.postscale,
        postscale=call.prescale,
    )
    if call.kind in ("all_reduce", "all_to_all"):
        return _bind(back, given, order)
    if call.kind == "all_gather":
        return _bind(replace(back, kind="reduce_scatter"), given, order)
    if call.kind == "reduce_scatter":
        factor = call.prescale * call.postscale / (call.size if call.op == "mean" else 1)
        scaled = given if factor == 1 else tuple(ct * jnp.asarray(factor, ct.dtype) for ct in given)
        return _bind(replace(back, kind="all_gather", prescale=1.0, postscale=1.0), scaled, order)
    sums = _bind(replace(back, kind="all_reduce"), given, order)  # of a broadcast
    return sums if call.rank == call.root else tuple(jnp.zeros_like(ct) for ct in sums)


_compiled = jax.jit(_differentiable, static_argnums=0)


def _refuse_devices(call: Call) -> None:
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if axes:
        names = ", ".join(str(axis) for axis in axes)
        raise InvalidArgument(
            f"{call.kind} '{call.label}' is inside pmap or shard_map (axis {names}), which run it "
            "on several devices; a rank has one\n"
            "  advice: call it outside, on arrays of one device; start one rank per device instead"
        )


def traced(arrays: Sequence[Any]) -> bool:
    """They are of a program in the making. (A call outside of programs is compiled once for all
    lines that have one like it.)"""
    return any(isinstance(a, jax.core.Tracer) for a in arrays)


def run(call: Call, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """The collective on the arrays: at once, or as part of what is being traced.

    Raises:
        InvalidArgument: inside ``pmap`` or ``shard_map``, or a collective has failed before.
    """
    _refuse_devices(call)
    results: tuple[Any, ...]
    if traced(arrays):
        results = _differentiable(call, tuple(arrays), token())
        return results
    try:
        results = _compiled(call, tuple(arrays), token())
        return results
    except RuntimeError as error:
        failed = _native.last_error()
        if failed is None or "has been deleted" not in str(error):
            raise
        raise InvalidArgument(
            "a collective has failed before, and its token with it\n"
            "  advice: where the world still stands, call farandole.jax.recover() on every rank"
        ) from failed


def settle() -> None:
    """Outside of programs: waits until all collectives so far are over. Raises what failed."""
    order = token()[...]
    if not isinstance(order, jax.core.Tracer):
        order.block_until_ready()
