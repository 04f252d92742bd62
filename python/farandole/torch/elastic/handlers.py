"""How parts of a TorchState are kept and shared: models, optimizers, samplers and whatever has a
``state_dict()``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from farandole._arguments import shown, type_of
from farandole._core import InvalidArgument
from farandole.common._objects import broadcast_object
from farandole.torch.elastic.copies import Commit
from farandole.torch.elastic.sampler import ElasticSampler, merged
from farandole.torch.functions import broadcast_optimizer_state, broadcast_parameters
from farandole.torch.global_batch import GlobalBatch

__all__ = [
    "ModelStateHandler",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "StateHandler",
    "get_handler_registry",
    "set_handler_registry",
]


class StateHandler:
    """Keeps one value of a state. For values of your own: derive from it, and register it.

    Args:
        value: the one that is kept.
    """

    needs_sync: bool = False  # sync also where ranks only leave, as each has its own part

    def __init__(self, value: Any) -> None:
        self.value: Any = value

    def save(self) -> None:
        """Keeps a copy of the value as it is."""
        raise NotImplementedError

    def restore(self) -> None:
        """The value becomes what was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """The value becomes rank 0's, on every rank, and is saved. Collective."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Replaces the value, and saves the new one."""
        self.value = value
        self.save()


class DictHandler(StateHandler):
    """Keeps an object with ``state_dict()`` and ``load_state_dict()``, such as a GradScaler."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._begin()

    def _begin(self) -> None:
        self._commit = Commit(self.value.state_dict())
        if isinstance(self.value, GlobalBatch):
            self.value.note_kept()

    def write(self) -> None:
        """Makes the next copy, which replaces the last one in keep()."""
        self._commit.write(self.value.state_dict())

    def keep(self) -> None:
        self._commit.keep()

    def save(self) -> None:
        self.write()
        self.keep()

    def restore(self) -> None:
        self.value.load_state_dict(self._commit.value())

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))
        self.save()

    def set_value(self, value: Any) -> None:
        self.value = value
        self._begin()


class ModelStateHandler(DictHandler):
    """Keeps a ``torch.nn.Module``."""

    def sync(self) -> None:
        state = self.value.state_dict()
        others = {k: v for k, v in state.items() if not isinstance(v, torch.Tensor)}
        broadcast_parameters({k: v for k, v in state.items() if k not in others}, root_rank=0)
        if others:  # what modules keep beside (get_extra_state)
            self.value.load_state_dict({**state, **broadcast_object(others)})
        self.save()


class OptimizerStateHandler(DictHandler):
    """Keeps a ``torch.optim.Optimizer``."""

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


class SamplerStateHandler(DictHandler):
    """Keeps an `ElasticSampler`: samples that some rank has processed are processed on all."""

    needs_sync = True

    def sync(self) -> None:
        self.value.load_state_dict(merged(self.value))
        self.save()


_Registry = list[tuple[type, type[StateHandler]]]

_registry: _Registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> _Registry:
    """Pairs of a type and the handler of its values; the first type that fits is taken."""
    return list(_registry)


def set_handler_registry(registry: Sequence[tuple[type, type[StateHandler]]]) -> None:
    """Sets the handlers of states that are made from now on.

    Raises:
        InvalidArgument: it is no list of pairs of a type and a handler.
    """
    rows = list(registry)
    for row in rows:
        pair = isinstance(row, tuple) and len(row) == 2
        if not pair or not all(isinstance(each, type) for each in row):
            raise InvalidArgument(
                f"set_handler_registry(): {shown(row)} is no pair of a type and a StateHandler"
            )
    _registry[:] = rows


def handler_of(value: Any) -> StateHandler | None:
    """None for plain values, which are copied and pickled."""
    for kind, handler in _registry:
        if isinstance(value, kind):
            return handler(value)
    methods = ("state_dict", "load_state_dict")
    if not isinstance(value, type) and all(callable(getattr(value, m, None)) for m in methods):
        try:
            return DictHandler(value)
        except Exception as error:
            raise InvalidArgument(
                f"the state of {type_of(value)} cannot be saved: {error}"
            ) from error
    return None
