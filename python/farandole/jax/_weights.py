"""Arrays whose values ranks compare: at once, or in the first step of a program.

A program has no room for what is done once, and a step that is not compared must cost nothing. So a
`jax.Ref` counts the optimizer's steps (as the token of `_order` counts calls), and a branch of the
program has the rest: checksums by a call into the core, their gather, and a call that fails the
program where they differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.interpreters.partial_eval import DynamicJaxprTracer

from farandole import _core, _world
from farandole.common._process_set import ProcessSet
from farandole.common._weights import Weights, compares, period
from farandole.jax._call import traced
from farandole.jax._order import group_of_calls, token
from farandole.jax._trees import NUMBERS, as_reals
from farandole.jax.ops import allgather

BROADCAST = "params = fdj.broadcast_parameters(params, root=0)"
CHECKSUMS, WEIGHTS = "farandole_checksums", "farandole_weights"

Rows = list[tuple[str, Any]]


class ArrayWeights:
    """Compares the arrays of one optimizer, which may have several models.

    Args:
        label: the same on every rank.
        process_set: the ranks that train; this is one of them.
        line: of a program, that makes weights equal.
    """

    def __init__(self, label: str, process_set: ProcessSet, line: str = BROADCAST) -> None:
        self._label, self._process_set, self._line = label, process_set, line
        self._period = period()
        self._outside: dict[tuple[int, tuple[str, ...]], Weights] = {}  # by world
        self._inside: dict[tuple[str, ...], tuple[Any, Any]] = {}  # the token's Ref, and a count

    def compare(self, named: Sequence[tuple[str, Any]]) -> None:
        """As a step begins, outside of programs or inside.

        Raises:
            Mismatch: outside, where the ranks' arrays differ.
        """
        if self._period is None or group_of_calls(self._process_set).size == 1:
            return
        arrays = [(name, jnp.asarray(leaf)) for name, leaf in named if isinstance(leaf, NUMBERS)]
        rows = [(name, as_reals(array)) for name, array in arrays if _is_comparable(array)]
        if not rows:
            return
        if any(_is_transformed(array) for _, array in rows):
            return
        if traced([array for _, array in rows]):
            self._in_program(rows)
            return
        names = tuple(name for name, _ in rows)
        key = _world.epoch(), names  # all ranks of a world have taken equally many steps in it
        if key not in self._outside:
            self._outside[key] = Weights(self._label, names, self._line, self._process_set)
        self._outside[key].begin_step(lambda: _core.checksums([_bytes(array) for _, array in rows]))

    def _in_program(self, rows: Rows) -> None:
        assert self._period is not None
        count = self._count_of(tuple(name for name, _ in rows))
        steps = count[...]
        arrays = [jax.lax.stop_gradient(array) for _, array in rows]
        zero = jax.lax.cond(
            compares(steps, self._period)[0],
            lambda: self._answer([name for name, _ in rows], arrays, steps + 1),
            lambda: jnp.zeros(1, jnp.uint32),
        )
        # A sum, so that XLA does not drop the answer as unused.
        count[...] = steps + 1 + zero

    def _answer(self, names: list[str], arrays: list[Any], step: Any) -> Any:
        """Zero; or the program fails."""
        sums = _call(CHECKSUMS, 2 * len(arrays), *arrays)
        table = allgather(sums, name=f"weights of {self._label}", process_set=self._process_set)
        return _call(
            WEIGHTS,
            1,
            table,
            step,
            names="\n".join(name.replace("\n", " ") for name in names),
            ranks="\n".join(map(str, self._process_set.ranks)),
            period=np.int64(min(self._period or math.inf, 2**62)),
            line=self._line,
        )

    def _count_of(self, names: tuple[str, ...]) -> Any:
        """Anew where calls have begun anew: after a failure, everything is traced again."""
        order, count = self._inside.get(names, (None, None))
        if order is not token():
            with jax.ensure_compile_time_eval():
                count = jax.new_ref(jnp.zeros(1, jnp.uint32))
            self._inside[names] = token(), count
        return count


def rows_of(tree: Any) -> Rows:
    """The leaves of a pytree, with their places."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(path) or "the array", leaf) for path, leaf in pairs]


def _is_comparable(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jnp.complexfloating) or array.dtype.name in _core.dtypes


def _is_transformed(array: Any) -> bool:
    """Whether a step is mapped or differentiated: there JAX has no branches with a Ref."""
    return isinstance(array, jax.core.Tracer) and not isinstance(array, DynamicJaxprTracer)


def _bytes(array: Any) -> Any:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _call(target: str, words: int, *operands: Any, **attributes: Any) -> Any:
    result = jax.ShapeDtypeStruct((words,), np.dtype(np.uint32))
    return jax.ffi.ffi_call(target, result, vmap_method="sequential")(*operands, **attributes)
