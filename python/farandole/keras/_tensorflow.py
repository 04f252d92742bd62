"""Keras on TensorFlow: every gradient is an operation of the graph, reduced while others are
computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from farandole.keras._exchange import BROADCAST, PlannedExchange, times
from farandole.keras._reduction import Reduction
from farandole.tensorflow._reduction import Reduction as OpReduction
from farandole.tensorflow._weights import compared


class GraphExchange(PlannedExchange):
    """What `farandole.tensorflow` does for a tape, for an optimizer."""

    def __init__(self, label: str, reduction: Reduction, *arguments: Any, **others: Any) -> None:
        super().__init__(label, reduction, *arguments, **others)
        self._ops = OpReduction(
            reduction.horovods_op,
            reduction.gradient_predivide_factor,
            reduction.compression,
            reduction.sparse_as_dense,
            reduction.process_set,
            groups=self.groups,
            label=label,
        )

    def kind_of(self, gradient: Any) -> str:
        if isinstance(gradient, tf.IndexedSlices) and not self.reduction.sparse_as_dense:
            return f"slices by {gradient.indices.dtype.name}"
        return "dense"

    def reduce_all(
        self, names: Sequence[str], gradients: Sequence[Any], variables: Sequence[Any]
    ) -> list[Any]:
        members = self.reduction.process_set
        weights = compared(self.label, members, variables, names, BROADCAST, while_traced=True)
        reduced = self._ops.reduce(gradients, variables, names, weights)
        return [times(g, self.reduction.passes_factor) for g in reduced]
