"""Tensors whose values ranks compare: all that an optimizer holds, also frozen ones; of a
GlobalBatch also the rest of what is the same on all ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from farandole import _core
from farandole.common._weights import Weights, looked_at, period
from farandole.torch import _devices
from farandole.torch._tensors import DTYPE_NAMES, as_reals, borrow

BROADCAST = "hvd.broadcast_parameters(model.state_dict(), root_rank=0)"


def checksums_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Checksums of the values in the order of indices, as strides may differ between ranks. Tensors
    on a device are copied to the host first."""
    here = (_devices.on_host(tensor.detach()).contiguous() for tensor in tensors)
    return _core.checksums([borrow(as_reals(tensor)) for tensor in here])


class Rest(Protocol):
    """Tensors that are equal on all ranks, besides the parameters of an optimizer."""

    line: str  # of code, which makes everything equal

    def rows(self) -> dict[str, list[torch.Tensor]]:
        """The tensors by name."""


class RestOfModel:
    """Tensors of a GlobalBatch that are equal on all ranks, besides the optimizer's parameters.

    Holds weak references, so that model and optimizer die as they would without it.

    Args:
        model: its other parameters are compared.
        optimizer: its state is compared, unless each rank holds a part of it (`sharded`).
        buffers: of the model, those that are alike on all ranks when gradients are reduced.
    """

    line = f"{BROADCAST} and hvd.broadcast_optimizer_state(optimizer, root_rank=0)"

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        buffers: Callable[[Any, Any], Mapping[str, torch.Tensor]],
        *,
        sharded: bool,
    ) -> None:
        self._model, self._optimizer = weakref.ref(model), weakref.ref(optimizer)
        self._buffers, self._sharded = buffers, sharded

    def rows(self) -> dict[str, list[torch.Tensor]]:
        """The tensors by name, also for a parameter that has no state yet."""
        model, optimizer = self._model(), self._optimizer()
        if model is None or optimizer is None:
            return {}
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        named = list(model.named_parameters())
        rows: dict[str, list[torch.Tensor]] = {n: [p] for n, p in named if id(p) not in held}
        rows |= {name: [buffer] for name, buffer in self._buffers(model, optimizer).items()}
        if not self._sharded:
            state = optimizer.state
            rows |= {f"state of {n}": _parts_of(state.get(p)) for n, p in named if id(p) in held}
        return {name: list(filter(_is_comparable, tensors)) for name, tensors in rows.items()}


def _parts_of(state: Any) -> list[torch.Tensor]:
    """The elements of a parameter's state that are compared."""
    tensors = [value for _, value in sorted((state or {}).items()) if torch.is_tensor(value)]
    return [beginning_of(tensor) for tensor in tensors if not tensor.is_sparse]


def beginning_of(tensor: torch.Tensor) -> torch.Tensor:
    """The first elements of a tensor of state, which are compared."""
    return tensor.detach().reshape(-1)[: looked_at(tensor.numel())]


def _is_comparable(tensor: torch.Tensor) -> bool:
    known = tensor.is_complex() or tensor.dtype in DTYPE_NAMES
    return known and tensor.layout == torch.strided and tensor.device.type in ("cpu", "cuda")


class Compared:
    """The tensors of one optimizer that ranks compare.

    Args:
        named: what it holds, in the model's order.
        line: of code, which makes them equal.
    """

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]], line: str) -> None:
        self._names, self._tensors = [n for n, _ in named], [tensor for _, tensor in named]
        self._line = line
        self.rest: Rest | None = None
        self._rest_names: list[str] = []

    def watch(self, step: _core.Reducer | _core.ShardedUpdate) -> None:
        """Makes it compare them as often as the setting says."""
        self._rest_names = [] if self.rest is None else list(self.rest.rows())
        line = self._line if self.rest is None else self.rest.line
        steps = period()
        if steps is not None:
            step.watch_weights([*self._names, *self._rest_names], steps, line)

    def show(self, step: _core.Reducer | _core.ShardedUpdate) -> None:
        """Gives a step its checksums before it is launched, if it compares them."""
        if not step.weights_due:
            return
        sums = checksums_of(self._tensors)
        if self.rest is not None:
            rows = self.rest.rows()
            each = [checksums_of(rows.get(name, [])) for name in self._rest_names]
            sums += _core.checksums([np.array(few, np.uint64) for few in each])
        step.show_weights(sums)


class TensorWeights(Weights):
    """The weights of an optimizer that exchanges in its step.

    Args:
        label: of this model, the same on every rank.
        named: in the model's order.
    """

    def __init__(self, label: str, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        super().__init__(label, [name for name, _ in named], BROADCAST)
        self._tensors = [tensor for _, tensor in named]

    def compare(self) -> None:
        """Compares them as a step begins, if it is due. Raises Mismatch."""
        self.begin_step(lambda: checksums_of(self._tensors))
