"""Keras' optimizers in the scope of a CentralStorageStrategy: rank 0 alone has their state and
updates, and all ranks get the variables."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from farandole import _world
from farandole.strategy._central import CentralExtended
from farandole.strategy._extended import as_is
from farandole.tensorflow._weights import raw

# Each rank accumulates its own gradients, before they are reduced.
_OF_EACH_RANK = "gradient_accumulator"


@functools.cache
def teach(optimizers: Any) -> None:
    owner: Any = next(c for c in optimizers.Optimizer.__mro__ if "apply" in vars(c))
    owner.apply = _applied(owner.apply)
    owner.finalize_variable_values = _finalized(owner.finalize_variable_values)
    owner.add_variable = _added(owner.add_variable)


def _central_of(optimizer: Any) -> CentralExtended | None:
    strategy = getattr(optimizer, "_distribution_strategy", None)
    extended = getattr(strategy, "extended", None)
    return extended if isinstance(extended, CentralExtended) and _world.size() > 1 else None


def _applied(own: Callable[..., Any]) -> Callable[..., Any]:
    @as_is
    @functools.wraps(own)
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        central = _central_of(self)
        gradients = list(grads)
        given = None if trainable_variables is None else list(trainable_variables)
        if central is None or central.updating or not gradients:
            return own(self, gradients, given)
        with central.central_update(gradients):
            result = own(self, gradients, given)
        written = self._trainable_variables if given is None or self.use_ema else given
        central.publish([raw(each) for each in written])
        return result

    method: Callable[..., Any] = apply
    return method


def _finalized(own: Callable[..., Any]) -> Callable[..., Any]:
    """With use_ema, variables get their averages, which rank 0 has."""

    @functools.wraps(own)
    def finalize_variable_values(self: Any, var_list: Any) -> None:
        central = _central_of(self)
        if central is None or not self.use_ema:
            own(self, var_list)
            return
        with central.central_update():
            own(self, var_list)
        central.publish([raw(each) for each in var_list])

    return finalize_variable_values


@functools.cache
def teach_swapping(callback: Any) -> None:
    """SwapEMAWeights, which exchanges variables and their averages between two epochs."""
    for name in ("_tf_swap_variables", "_tf_finalize_ema_values"):
        setattr(callback, name, _swapped(getattr(callback, name)))


def _swapped(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def method(self: Any, optimizer: Any) -> None:
        central = _central_of(optimizer)
        if central is None:
            own(self, optimizer)
            return
        with central.central_update():
            own(self, optimizer)
        central.publish([raw(each) for each in optimizer._trainable_variables])

    return method


def _added(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def add_variable(self: Any, *args: Any, **kwargs: Any) -> Any:
        central = _central_of(self)
        if central is None or str(kwargs.get("name")).endswith(_OF_EACH_RANK):
            return own(self, *args, **kwargs)
        with central.making_state():
            return own(self, *args, **kwargs)

    return add_variable
