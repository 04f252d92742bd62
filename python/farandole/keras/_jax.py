"""Keras on JAX: gradients are reduced inside the compiled training step, in buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from farandole import jax as fdj
from farandole.common._weights import looked_at
from farandole.jax._finite import check_of
from farandole.jax._weights import ArrayWeights
from farandole.jax.optimizer import reduced_gradients
from farandole.keras._exchange import BROADCAST, PlannedExchange, label_of
from farandole.keras._present import is_present, value_of
from farandole.keras._reduction import Reduction


class ProgramExchange(PlannedExchange):
    """Reduces an optimizer's gradients as `farandole.jax` reduces a pytree."""

    def __init__(self, label: str, reduction: Reduction, *arguments: Any, **others: Any) -> None:
        super().__init__(label, reduction, *arguments, **others)
        self._members = [set(map(id, group)) for group in self.groups]
        self._weights = ArrayWeights(label, reduction.process_set, BROADCAST)

    @staticmethod
    def prepare() -> None:
        fdj.init()  # farandole.init() knows nothing of JAX

    def compare_weights(self, variables: Sequence[Any]) -> None:
        rows = [(label_of(i, v), value_of(v)) for i, v in enumerate(variables)]
        for name, variable, is_state in self.alike:
            if is_present(variable):  # else it has no value in this program
                value = value_of(variable)
                if is_state:
                    value = value.reshape(-1)[: looked_at(value.size)]
                rows.append((name, value))
        self._weights.compare(rows)

    def at_update(
        self, optimizer: Any, gradients: list[Any], reduce: Callable[[list[Any]], list[Any]]
    ) -> list[Any]:
        # Keras computes an update in every pass here, and keeps the last. All ranks have the same
        # number of iterations, and take the same branch.
        updates = (optimizer._iterations + 1) % optimizer.gradient_accumulation_steps == 0
        return list(jax.lax.cond(updates, reduce, list, gradients))

    def reduce_all(
        self,
        names: Sequence[str],
        gradients: Sequence[Any],
        variables: Sequence[Any],
    ) -> list[Any]:
        reduction = self.reduction
        # Keyed by position, which ranks compare.
        wires, contexts = dict[int, Any](), dict[int, Any]()
        for i, gradient in enumerate(gradients):
            if gradient is not None:
                scaled = _times(jnp.asarray(gradient), reduction.prescale)
                wires[i], contexts[i] = reduction.compression.compress(scaled)
        check = None
        if not self.skips:
            sent = {names[i]: wire for i, wire in wires.items()}
            given = [jnp.asarray(gradients[i]) for i in wires]
            check = check_of(f"gradients of {self.label}", sent, reduction.process_set, given)
        members = [[i for i in wires if id(variables[i]) in group] for group in self._members]
        reduced = reduced_gradients(
            wires,
            check,
            op=reduction.op,
            name=self.label,
            process_set=reduction.process_set,
            groups=[group for group in members if group],
        )
        return [
            _times(reduction.compression.decompress(reduced[i], contexts[i]), reduction.postscale)
            if i in reduced
            else None
            for i in range(len(gradients))
        ]


def _times(gradient: Any, factor: float) -> Any:
    return gradient if factor == 1 else gradient * jnp.asarray(factor, gradient.dtype)
