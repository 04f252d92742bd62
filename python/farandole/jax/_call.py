"""One collective as JAX knows it: a primitive that XLA lowers to a call into the core."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.state.discharge import register_discharge_rule
from jax._src.state.types import ReadEffect, WriteEffect
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from farandole._core import InvalidArgument
from farandole._core import jax as _native
from farandole.jax import _place
from farandole.jax._order import TARGET, token

_ROWS = {"all_gather", "reduce_scatter", "all_to_all"}  # results are not where operands lie
_LINEAR = ("sum", "mean")


@dataclass(frozen=True)
class Call:
    """The parameters of a collective that are the same in every execution."""

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


# ---- batches: an axis more, which all ranks have ----


def _in_batch(operands: Sequence[Any], axes: Sequence[Any], *, call: Call) -> Any:
    """Rows are cut along the first axis, so that a batch's goes to the end there."""
    last = call.kind in _ROWS
    moved = [
        x if axis is None else jnp.moveaxis(x, axis, -1 if last else 0)
        for x, axis in zip(operands[:-1], axes[:-1], strict=True)
    ]
    results = _ordered.bind(*moved, operands[-1], call=replace(call, label=f"vmap of {call.label}"))
    where = [
        None if axis is None else result.ndim - 1 if last else 0
        for result, axis in zip(results, axes[:-1], strict=True)
    ]
    return results, where


# ---- derivatives: a collective of the tangents, or of the cotangents ----


def _forward(primals: Sequence[Any], tangents: Sequence[Any], *, call: Call) -> Any:
    order = primals[-1]
    results = _ordered.bind(*primals, call=call)
    given = tangents[:-1]
    moving = [i for i, t in enumerate(given) if type(t) is not ad.Zero]
    out = [ad.Zero(jax.typeof(r).to_tangent_aval()) for r in results]
    if not moving:
        return results, out
    if call.op not in _LINEAR:
        raise InvalidArgument(
            f"{call.kind} '{call.label}' with op={call.op!r} has no gradient\n  advice: put "
            "jax.lax.stop_gradient around what it takes, or reduce with sum or mean"
        )
    moved = _ordered.bind(
        *(given[i] for i in moving), order, call=replace(call, label=f"tangent of {call.label}")
    )
    for i, t in zip(moving, moved, strict=True):
        out[i] = t
    return results, out


def _backward(cotangents: Sequence[Any], *operands: Any, call: Call) -> list[Any]:
    """The cotangent of the function of all ranks' arrays, as if the ranks' losses were added."""
    given = [
        i
        for i, (x, ct) in enumerate(zip(operands[:-1], cotangents, strict=True))
        if ad.is_undefined_primal(x) and type(ct) is not ad.Zero
    ]
    back: list[Any] = [None] * len(operands)
    if given:
        sums = _transposed(call, [cotangents[i] for i in given], operands[-1])
        for i, ct in zip(given, sums, strict=True):
            back[i] = ct
    return [
        ad.Zero(x.aval.to_ct_aval()) if ct is None and ad.is_undefined_primal(x) else ct
        for x, ct in zip(operands, back, strict=True)
    ]


def _transposed(call: Call, given: Sequence[Any], order: Any) -> Sequence[Any]:
    label = call.label.removeprefix("tangent of ")
    back = replace(
        call, label=f"gradient of {label}", prescale=call.postscale, postscale=call.prescale
    )
    if call.kind in ("all_reduce", "all_to_all"):
        return _bind(back, given, order)
    if call.kind == "all_gather":
        return _bind(replace(back, kind="reduce_scatter"), given, order)
    if call.kind == "reduce_scatter":
        factor = call.prescale * call.postscale / (call.size if call.op == "mean" else 1)
        scaled = given if factor == 1 else [ct * jnp.asarray(factor, ct.dtype) for ct in given]
        gather = replace(back, kind="all_gather", op="sum", prescale=1.0, postscale=1.0)
        return _bind(gather, scaled, order)
    sums = _bind(replace(back, kind="all_reduce"), given, order)  # of a broadcast
    # The same program on every rank, so that they meet in its derivatives.
    return [jnp.where(call.rank == call.root, ct, jnp.zeros_like(ct)) for ct in sums]


def _bind(call: Call, arrays: Sequence[Any], order: Any) -> Sequence[Any]:
    results: Sequence[Any] = _ordered.bind(*arrays, order, call=call)
    return results


# ---- the collective in its order: its last operand is the Ref that holds the token ----

# One primitive has both, so that a derivative finds the order wherever JAX moves it to. JAX has no
# public names for what such a primitive needs (tests/frameworks/test_jax_derivatives.py).
_ordered: Any = Primitive("farandole_ordered")
_ordered.multiple_results = True


def _abstract_ordered(*operands: Any, call: Call) -> Any:
    place = len(operands) - 1
    arrays = [jax.core.ShapedArray(call.result_shape(a.shape), a.dtype) for a in operands[:-1]]
    return arrays, {ReadEffect(place), WriteEffect(place)}


def _with_token(about: Any, *given: Any, call: Call) -> Any:
    """Where JAX turns Refs into operands and results.

    It says first what operands and results are: in two sequences up to 0.11.0, since then in one
    object."""
    operands = given[-len(getattr(about, "in_avals", about)) :]
    *results, token_after = _collective.bind(*operands, call=call)
    return [*[None] * (len(operands) - 1), token_after], results


def _at_once_in_order(*operands: Any, call: Call) -> Any:
    with jax.disable_jit(False):
        return _compiled(call, operands[:-1], operands[-1])


_ordered.def_effectful_abstract_eval(_abstract_ordered)
_ordered.def_impl(_at_once_in_order)
register_discharge_rule(_ordered)(_with_token)
batching.primitive_batchers[_ordered] = _in_batch
ad.primitive_jvps[_ordered] = _forward
ad.primitive_transposes[_ordered] = _backward

_compiled = jax.jit(_bind, static_argnums=0)


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
    if traced(arrays):
        return tuple(_bind(call, arrays, token()))
    try:
        return tuple(_compiled(call, tuple(arrays), token()))
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
