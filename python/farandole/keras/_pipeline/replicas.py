"""Between the replicas of a stage: equal weights at the start, and the sum of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from farandole import _core
from farandole._collectives import all_reduce, broadcast, grouped_all_reduce
from farandole._core import Group, RemoteError
from farandole.common._process_set import ProcessSet, own_group_of
from farandole.keras._exchange import label_of
from farandole.keras._pipeline.tensors import array_of


class Replicas:
    """The replicas of one stage.

    Args:
        replicas: ranks with the same stage; None: this one alone.
    """

    def __init__(self, replicas: ProcessSet | None) -> None:
        self._group: Group | None = None if replicas is None else own_group_of(replicas)

    def share_first(self, variables: Sequence[Any]) -> None:
        """Collective: all replicas take the values of the first."""
        if self._group is None:
            return
        for i, variable in enumerate(variables):
            value = np.array(keras.ops.convert_to_numpy(variable), order="C")
            if value.dtype.name in _core.dtypes and value.size:
                label = f"first value of '{label_of(i, variable)}'"
                variable.assign(broadcast(value, root=0, name=label, group=self._group))

    def summed(self, gradients: Sequence[Any], *, failed: bool) -> list[Any]:
        """Collective: the sums over all replicas, some of which may have no gradient of a variable.

        Raises:
            RemoteError: a replica has failed.
        """
        if self._group is None:
            return list(gradients)
        failures = self.sum_of(np.array([int(failed)]), "whether a replica has failed")
        if failed:
            return list(gradients)
        if failures[0]:
            raise RemoteError("another replica of this stage has failed")
        has = np.array([int(each is not None) for each in gradients])
        places = np.flatnonzero(self.sum_of(has, "which gradients there are")).tolist()
        made = list(gradients)
        like = self._like
        arrays = [like[i] if made[i] is None else array_of(made[i]) for i in places]
        if arrays:
            sums = grouped_all_reduce(
                arrays, op="sum", name="gradients of a stage", group=self._group
            )
            for i, array in zip(places, sums, strict=True):
                made[i] = keras.ops.convert_to_tensor(array)
        return made

    def learn(self, variables: Sequence[Any]) -> None:
        """Notes the zeros that stand for a missing gradient."""
        self._like = [
            np.zeros(tuple(v.shape), keras.backend.standardize_dtype(v.dtype)) for v in variables
        ]

    _like: Sequence[Any] = ()

    def sum_of(self, values: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
        """Collective: the sum over all replicas."""
        if self._group is None or values.size == 0:
            return values
        total: np.ndarray[Any, Any] = all_reduce(values, op="sum", name=name, group=self._group)
        return total
