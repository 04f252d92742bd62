"""A plan of an exchange holds its parameters as they are now, and what was made for them.

A program may convert its parameters, or unfreeze some, between two steps. Then there is another
plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from farandole import _core
from farandole._limits import Limits
from farandole._world import Group
from farandole.common._reduction import Reduction
from farandole.torch._tensors import dtype_name
from farandole.torch._training.finite import FiniteGradients
from farandole.torch._training.gradients import Gradients
from farandole.torch._training.late_gradients import LateGradients
from farandole.torch._training.layouts import lay_out_alike
from farandole.torch._training.names import Names
from farandole.torch._training.on_device import OnDevices
from farandole.torch._training.parameters import gets_gradients
from farandole.torch._training.settings import Settings
from farandole.torch._training.sparse_gradients import SparseGradients

Named = Sequence[tuple[str, torch.Tensor]]


class How(NamedTuple):
    """The options that all plans of an exchange have in common; GradientExchange explains them."""

    group: Group
    reduction: Reduction
    weights: Named
    groups: Mapping[int, int]
    limits: Limits
    overlap: bool
    looks: bool
    optimizer: Callable[[], torch.optim.Optimizer | None]


class Plan:
    """Collective: every rank makes one, of the same parameters."""

    def __init__(self, how: How, named: Named) -> None:
        reduction, compression = how.reduction, how.reduction.compression
        parameters = [p for _, p in named]
        self.finite = FiniteGradients(named, reduction.process_set, looks=how.looks)
        sent = [*named, *self.finite.named]
        wires = [compression.compress(p.detach().new_empty(0)) for _, p in sent]
        together = [how.groups.get(id(p), -1) for p in parameters]
        together += together[-1:] * len(self.finite.named)  # the flag goes with the last
        rows = [
            (n, *_elements(p, wire.dtype, n), together[i])
            for i, ((n, p), (wire, _)) in enumerate(zip(sent, wires, strict=True))
        ]
        self.reducer = reducer = _core.Reducer(
            how.group,
            rows,
            reduction.op,
            reduction.prescale,
            reduction.postscale,
            *how.limits,
            how.overlap,
            sparse_as_dense=reduction.sparse_as_dense,
        )
        over = how.group.size if reduction.op == "mean" else 1
        sparse = SparseGradients(
            f"gradients {reducer.key:x}",
            sent,
            reduction.process_set,
            compression=compression,
            prescale=reduction.prescale,
            postscale=reduction.postscale / over,
        )
        strides = lay_out_alike(how.group, sent, how.optimizer())
        self.gradients = Gradients(
            reducer,
            sent,
            wires,
            strides,
            sparse,
            OnDevices(reducer, sent),
            self.finite,
            compression=compression,
            sparse_as_dense=reduction.sparse_as_dense,
        )
        self.late = LateGradients(f"late gradients {reducer.key:x}", named, reduction)
        label = f"settings {reducer.key:x}"
        self.settings = Settings(label, how.optimizer, reduction.process_set, Names(named[::-1]))
        self._kinds = [_kind(p) for p in parameters]
        self._places = [p.data_ptr() for p in parameters]
        known = set(map(id, parameters))
        self._others = [(n, p) for n, p in how.weights if id(p) not in known]

    def unfrozen(self) -> Named:
        """Parameters that were frozen or empty when the plan was made, and now get gradients."""
        return [(n, p) for n, p in self._others if gets_gradients(p)]

    def added(self, parameters: Sequence[torch.Tensor]) -> Named | None:
        """Parameters that a new plan needs besides this one's; None where this plan still holds.
        Frozen ones stay in it, as programs freeze and unfreeze by turns."""
        added = self.unfrozen()
        places = list(map(torch.Tensor.data_ptr, parameters))
        if not added and places == self._places:
            return None
        self._places = places
        if not added and self._kinds == [_kind(p) for p in parameters]:
            return None  # they have moved
        return added


def _elements(p: torch.Tensor, dtype: torch.dtype, name: str) -> tuple[int, str]:
    """Returns how many elements the engine sends for a parameter, and their dtype."""
    pair = 2 if dtype.is_complex else 1
    return pair * p.numel(), dtype_name(dtype.to_real(), f"parameter '{name}'")


def _kind(p: torch.Tensor) -> tuple[torch.dtype, torch.device, torch.Size]:
    """Returns the properties of a gradient on which a plan depends."""
    return p.dtype, p.device, p.shape
