"""Keras on TensorFlow: every gradient is an operation of the graph, reduced while others are
computed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from farandole import _elastic
from farandole.common._process_set import ProcessSet, global_process_set
from farandole.keras._exchange import BROADCAST, PlannedExchange, agreed_label, label_of, times
from farandole.keras._reduction import Reduction
from farandole.tensorflow._calls import members_when_run
from farandole.tensorflow._graph import goes_on
from farandole.tensorflow._reduction import Reduction as OpReduction
from farandole.tensorflow._reduction import after, divided
from farandole.tensorflow._weights import Compared


class GraphExchange(PlannedExchange):
    """Reduces an optimizer's gradients as `farandole.tensorflow` reduces those of a tape."""

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

    @staticmethod
    def agreed_label(name: str, label: str, process_set: ProcessSet) -> str:
        """In an elastic job the name alone: graphs of an earlier world have it in their operations,
        and do not ask other ranks."""
        return name if _elastic.is_elastic() else agreed_label(name, label, process_set)

    @staticmethod
    def has_others(reduction: Reduction) -> bool:
        """Whether there are other ranks, or may be when a graph runs."""
        return reduction.members > 1 or (
            _elastic.is_elastic() and reduction.process_set is global_process_set
        )

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        if goes_on():  # ranks compare when it runs, which is in all worlds
            names = [label_of(i, v) for i, v in enumerate(variables)]
            return self.reduce_all(names, gradients, variables)
        return super().reduce(gradients, variables)

    def local(self, gradient: Any) -> Any:
        if not goes_on():
            return super().local(gradient)
        scaled = times(gradient, self.reduction.passes_factor)
        if scaled is None or not self.reduction.scale_local_gradients:
            return scaled
        return divided(scaled, members_when_run(0))

    def kind_of(self, gradient: Any) -> str:
        if isinstance(gradient, tf.IndexedSlices) and not self.reduction.sparse_as_dense:
            return f"slices by {gradient.indices.dtype.name}"
        return "dense"

    def reduce_all(
        self, names: Sequence[str], gradients: Sequence[Any], variables: Sequence[Any]
    ) -> list[Any]:
        weights = self._weights_of(names, variables) if self.compares else None
        reduced = self._ops.reduce(gradients, variables, names, weights, finite=not self.skips)
        return [times(g, self.reduction.passes_factor) for g in reduced]

    def _weights_of(self, names: Sequence[str], variables: Sequence[Any]) -> Compared:
        others = [row for row in self.alike if not row.is_state]
        return Compared(
            self.label,
            self.reduction.process_set,
            [*variables, *(row.variable for row in others)],
            [*names, *(row.name for row in others)],
            BROADCAST,
            [(row.name, row.variable) for row in self.alike if row.is_state],
        )

    def updating(self, gradients: Sequence[Any]) -> AbstractContextManager[Any]:
        return after(gradients)
