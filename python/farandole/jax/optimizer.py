"""Gradients of all ranks for optax, and for training loops without it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp

from farandole._arguments import explained
from farandole._core import InvalidArgument
from farandole._limits import Limits
from farandole.common._process_set import ProcessSet, global_process_set, number_of
from farandole.jax._finite import FLAG, FiniteCheck, check_of
from farandole.jax._trees import A_TREE, NUMBERS
from farandole.jax._weights import ArrayWeights, rows_of
from farandole.jax.ops import titled_allreduce
from farandole.typing import SumOp

if TYPE_CHECKING:
    import optax

_T = TypeVar("_T")
_AN_OPTIMIZER = (
    "an optimizer of optax",
    lambda v: callable(getattr(v, "init", None)) and callable(getattr(v, "update", None)),
)


class Compression:
    """The dtype in which floating-point gradients are sent; sums round to it at every addition."""

    none: Any = None
    fp16: Any = jnp.float16
    bf16: Any = jnp.bfloat16


@explained(optimizer=_AN_OPTIMIZER)
def distributed(
    optimizer: optax.GradientTransformation,
    *,
    op: SumOp = "mean",
    compression: Any = Compression.none,
    bucket_bytes: int | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> optax.GradientTransformationExtraArgs:
    """The optimizer with the gradients of all ranks, reduced before anything else is done to them.

    State and parameters are the optimizer's own. ``optax.MultiSteps(distributed(optimizer), n)``
    reduces every n-th time.

    In the first ``update()`` ranks compare checksums of the parameters, if it is given any, and it
    fails on every rank where they start from different ones; they compare again in the second one
    and every 2000 steps. ``FARANDOLE_CHECK_WEIGHTS`` says how often.

    Args:
        optimizer: of optax; chains with clipping see reduced gradients, and with ``op="mean"`` what
            ``update()`` is given as ``value`` is a mean, too (``reduce_on_plateau``).
        op: as for :func:`allreduce_gradients`.
        compression: likewise.
        bucket_bytes: likewise.
        name: likewise.
        process_set: the ranks that take part; elsewhere the optimizer steps by itself.

    Raises:
        InvalidArgument: an argument is wrong, or the set is not registered; from ``update()``: a
            gradient is of single samples.
        Mismatch: from ``update()`` outside ``jit``: the ranks' parameters differ. In a program it
            is the text of a ``JaxRuntimeError``, as of all that fails there.

    Examples:
        >>> optimizer = fdj.distributed(optax.sgd(0.5))
        >>> state = optimizer.init(jnp.zeros(2))
        >>> optimizer.update(jnp.ones(2), state)[0].tolist()
        [-0.5, -0.5]
    """
    import optax

    _check(op, compression)
    Limits.of(bucket_bytes, None)
    number_of(process_set)
    inner = optax.with_extra_args_support(optimizer)
    weights = ArrayWeights(name or "an optimizer", process_set)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        if process_set.included():
            weights.compare(rows_of(params))
            if process_set.size() != 1:
                _refuse_samples(updates, params)
            updates = _allreduce(
                updates,
                op=op,
                compression=compression,
                bucket_bytes=bucket_bytes,
                name=name,
                process_set=process_set,
                looks=not _skips(state),
            )
            if op == "mean" and "value" in extra:
                extra["value"] = _of_all_ranks(extra["value"], name, process_set)
        return inner.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(inner.init, update)


@explained(gradients=A_TREE)
def allreduce_gradients(
    gradients: _T,
    *,
    op: SumOp = "mean",
    compression: Any = Compression.none,
    bucket_bytes: int | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> _T:
    """Reduces a pytree of gradients in buckets, so that communication begins before all are there.

    Buckets begin with what stands last in the tree ('layer_10' after 'layer_2'), whose gradients
    come first when layers are named in order. The bits of the result do not depend on buckets.

    Args:
        gradients: a pytree of arrays; None is no array.
        op: ``mean`` or ``sum``.
        compression: ``Compression.none``, ``.fp16`` or ``.bf16``.
        bucket_bytes: how much goes in one call; default ``FARANDOLE_BUCKET_BYTES``.
        name: part of errors and traces; tells optimizers apart, as the line of the call does
            without one.
        process_set: the ranks that take part; means are theirs.

    Raises:
        InvalidArgument: an argument is wrong, or this rank is not in the set.
        NumericsError: outside ``jit``, with ``FARANDOLE_NUMERICS=error``: some rank's gradient is
            NaN or infinite. In a program it is the text of a ``JaxRuntimeError``.

    Examples:
        >>> fdj.allreduce_gradients({"w": jnp.ones(2)})["w"].tolist()
        [1.0, 1.0]
    """
    _check(op, compression)
    return _allreduce(
        gradients,
        op=op,
        compression=compression,
        bucket_bytes=bucket_bytes,
        name=name,
        process_set=process_set,
    )


def _refuse_samples(gradients: Any, params: Any) -> None:
    """Gradients of single samples would each be reduced with another rank's sample."""
    shapes = {name: jnp.shape(leaf) for name, leaf in rows_of(params)}
    for name, gradient in rows_of(gradients):
        shape = jnp.shape(gradient)
        if name in shapes and len(shape) > 0 and shape[1:] == shapes[name] != shape:
            raise InvalidArgument(
                f"the gradient of '{name}' has shape {shape}, and the parameter {shapes[name]}: of "
                "gradients of single samples, each would be reduced with another rank's sample\n"
                "  advice: optax.chain(what takes them, fdj.distributed(optimizer))"
            )


def _of_all_ranks(value: Any, name: str | None, process_set: ProcessSet) -> Any:
    """The mean of the loss that an optimizer decides by; what is no such number stays."""
    if not isinstance(value, NUMBERS) or not jnp.issubdtype(jnp.result_type(value), jnp.floating):
        return value
    named = None if name is None else f"{name}, value"
    sent = {"value": jnp.asarray(value)}
    return titled_allreduce("value", sent, "mean", name=named, process_set=process_set)["value"]


def _skips(state: Any) -> bool:
    """Whether the optimizer leaves out steps whose gradients are not finite."""
    import optax

    kind = optax.ApplyIfFiniteState
    parts = jax.tree_util.tree_leaves(state, is_leaf=lambda part: isinstance(part, kind))
    return any(isinstance(part, kind) for part in parts)


def _allreduce(
    gradients: _T,
    *,
    op: SumOp,
    compression: Any,
    bucket_bytes: int | None,
    name: str | None,
    process_set: ProcessSet,
    looks: bool = True,
) -> _T:
    pairs, structure = jax.tree_util.tree_flatten_with_path(gradients)
    leaves = {jax.tree_util.keystr(path): jnp.asarray(leaf) for path, leaf in pairs}
    wire = {key: _compressed(leaf, compression) for key, leaf in leaves.items()}
    label = f"gradients of {name or 'an optimizer'}"
    check = check_of(label, wire, process_set, leaves.values()) if looks else None
    wire = reduced_gradients(
        wire, check, op=op, bucket_bytes=bucket_bytes, name=name, process_set=process_set
    )
    reduced: _T = jax.tree_util.tree_unflatten(
        structure, [wire[key].astype(leaf.dtype) for key, leaf in leaves.items()]
    )
    return reduced


def reduced_gradients(
    gradients: dict[Any, Any],
    check: FiniteCheck | None,
    *,
    op: str,
    bucket_bytes: int | None = None,
    name: str | None,
    process_set: ProcessSet,
    groups: Sequence[Sequence[Any]] = (),
) -> dict[Any, Any]:
    """Arrays by name or number, as they are sent. The flag of `check` goes with the last bucket.

    Args:
        groups: keys of those that are a bucket of their own; the others' go by size.
    """
    names = {key: key if isinstance(key, str) else f"[{key}]" for key in gradients}
    keys = {called: key for key, called in names.items()}
    grouped = {key for group in groups for key in group}
    sizes = {
        names[key]: leaf.size * leaf.dtype.itemsize
        for key, leaf in gradients.items()
        if key not in grouped
    }
    buckets = [(f", group {g}", [names[k] for k in group]) for g, group in enumerate(groups)]
    by_size = enumerate(_buckets(sizes, Limits.of(bucket_bytes, None)))
    buckets += [(f", bucket {number}", members) for number, members in by_size]
    reduced: dict[Any, Any] = {}
    for which, members in buckets:
        bucket = {called: gradients[keys[called]] for called in members}
        if check is not None and members is buckets[-1][1]:
            bucket[FLAG] = check.flag
        named = None if name is None else name + which
        reduced |= titled_allreduce(
            "gradients" + which, bucket, op, name=named, process_set=process_set
        )
    if check is not None:
        check.judge(reduced.pop(FLAG))
    return {keys[called]: leaf for called, leaf in reduced.items()}


def _check(op: str, compression: Any) -> None:
    if op not in ("mean", "sum"):
        raise InvalidArgument(f"op {op!r}: gradients are reduced with mean or sum")
    known = (Compression.none, Compression.fp16, Compression.bf16)
    if not any(compression is each for each in known):
        raise InvalidArgument(
            f"compression is {compression!r}; there are Compression.none, .fp16 and .bf16"
        )


def _compressed(leaf: Any, wire: Any) -> Any:
    floating = jnp.issubdtype(leaf.dtype, jnp.floating)
    return leaf.astype(wire) if wire is not None and floating else leaf


def _buckets(sizes: dict[str, int], limits: Limits) -> list[list[str]]:
    """Names by bucket, last ones first; the first bucket is small, so that it begins early."""
    room, buckets = 0, list[list[str]]()
    for key in sorted(sizes, key=_natural, reverse=True):
        if not buckets or sizes[key] > room:
            room = limits.bucket_bytes if buckets else min(limits[:2])
            buckets.append([])
        buckets[-1].append(key)
        room -= sizes[key]
    return buckets


def _natural(key: str) -> list[tuple[int, str]]:
    """Numbers inside names count as numbers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", key)]
