"""Collects losses, metrics, outputs and weights from all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import numpy as np

from farandole import _world
from farandole._collectives import all_gather, broadcast
from farandole._core import Group, InvalidArgument
from farandole.common._objects import allgather_object, broadcast_object
from farandole.keras._global.metrics import summed
from farandole.keras._pipeline.replicas import Replicas
from farandole.keras._pipeline.tensors import array_of
from farandole.pipeline._places import Place

_Array = np.ndarray[Any, Any]


class Results:
    """Losses and metrics of all samples so far, on every rank.

    A metric's state is sums: added up over the replicas of the last stage it is that of one process
    (keras/_global/metrics.py).
    """

    def __init__(self, module: Any, place: Place, group: Group, replicas: Replicas) -> None:
        self._module, self._place = module, place
        self._group, self._replicas = group, replicas
        self._root = place.rank_of(place.stages - 1, 0)
        self._names: list[str] | None = None
        self._listed: list[str] = []  # the same, as Keras' lists have them

    def reset(self) -> None:
        if self._place.is_last:
            self._module.reset_metrics()

    def note_loss(self, loss: float, samples: int) -> None:
        """Notes a whole batch's loss once: on the last stage of the first replica."""
        if _world.rank() == self._root:
            self._module._loss_tracker.update_state(loss, sample_weight=samples)

    def compute(self) -> dict[str, float]:
        """Collective."""
        mine = self._of_last_stage() if self._place.is_last else {}
        if self._names is None:
            told = list(mine), self._in_lists(mine)
            self._names, self._listed = broadcast_object(told, self._root, "names of metrics")
        values = np.array([mine.get(name, 0.0) for name in self._names])
        values = broadcast(values, root=self._root, name="metrics", group=self._group)
        return dict(zip(self._names, values.tolist(), strict=True))

    def listed(self, logs: dict[str, float]) -> Any:
        """The results of methods that return no dict: a list, or a single value by itself."""
        values = [logs[name] for name in self._listed]
        return values[0] if len(values) == 1 else values

    def _in_lists(self, mine: dict[str, float]) -> list[str]:
        if not mine:
            return []
        names = self._module._flatten_metrics_in_order({name: name for name in mine})
        return [names] if isinstance(names, str) else list(names)

    def _of_last_stage(self) -> dict[str, float]:
        module, variables = self._module, [v for m in self._module.metrics for v in m.variables]
        whole: AbstractContextManager[None] = nullcontext()
        if self._place.replicas > 1 and variables:
            whole = summed(variables, lambda flat: self._replicas.sum_of(flat, "state of metrics"))
        with whole:
            return {
                name: float(keras.ops.convert_to_numpy(value))
                for name, value in module.get_metrics_result().items()
            }


def outputs_of_all(
    parts: Sequence[Sequence[Any]], samples: Sequence[int], group: Group, place: Place
) -> list[_Array]:
    """Collective: the flat outputs of all replicas, on every rank, in the order of samples.

    Args:
        parts: of this rank's micro-batches; none on other stages than the last.
        samples: of each rank.

    Raises:
        InvalidArgument: an output has not a row for each sample; on every rank.
    """
    mine: list[_Array] = []
    if parts and place.is_last:
        columns = zip(*([array_of(each) for each in part] for part in parts), strict=True)
        mine = [np.concatenate(column) for column in columns]
    told = allgather_object([(a.shape, a.dtype.name) for a in mine], "outputs of a Pipeline")
    forms = [each for each in told if each]
    for rank, rows in enumerate(told):
        if any(shape[:1] != (samples[rank],) for shape, _ in rows):
            raise InvalidArgument(
                f"predict(): outputs of rank {rank} have shapes {[shape for shape, _ in rows]}, "
                f"for {samples[rank]} samples; outputs have a row for each"
            )
    counts = [n if each else 0 for n, each in zip(samples, told, strict=True)]
    whole = []
    for i, (shape, dtype) in enumerate(forms[0]):
        own = mine[i] if mine else np.empty((0, *shape[1:]), dtype)
        whole.append(all_gather(own, counts=counts, name="outputs of a Pipeline", group=group))
    return whole


def weights_of_all(
    weights: Sequence[Any], places: Sequence[int], group: Group, place: Place, root: int | None
) -> list[_Array]:
    """Collective: the weights of the whole model, in its order; empty on others than the root.

    Args:
        places: of this stage's weights, in the whole model's list.
        root: None: all ranks get them.
    """
    mine = [array_of(each) for each in weights]
    rows = [(i, a.shape, a.dtype.name) for i, a in zip(places, mine, strict=True)]
    told = allgather_object(rows if place.replica == 0 else [], "weights of a Pipeline")
    found: dict[int, _Array] = {}
    takes = root in (None, _world.rank())
    for source, theirs in enumerate(told):
        is_source = source == _world.rank()
        for k, (i, shape, dtype) in enumerate(theirs):
            if not is_source and not takes:
                continue
            array = mine[k].copy() if is_source else np.empty(shape, dtype)
            if array.size and root is None:
                group.run("broadcast", array, array, root=source, name="weight of a stage")
            elif array.size and root != source:
                kind, peer = ("send", root) if is_source else ("recv", source)
                assert peer is not None
                group.run_between(kind, array, peer, 1, "weight of a stage")
            found[i] = array
    return [found[i] for i in sorted(found)] if takes else []
