"""The state of a training with PyTorch."""

from __future__ import annotations

from typing import Any

import torch

from farandole._arguments import type_of
from farandole._core import InvalidArgument
from farandole.common._objects import agree
from farandole.common.elastic import ObjectState
from farandole.torch.elastic import handlers
from farandole.torch.elastic.handlers import *  # noqa: F403 - Horovod has them here
from farandole.torch.elastic.handlers import DictHandler, StateHandler, handler_of

__all__ = ["TorchState", *handlers.__all__]


class TorchState(ObjectState):
    """The state with which training goes on in another world: a model, its optimizer, and further
    values by name. Each is an attribute.

    Models, optimizers and an ``ElasticSampler`` are kept by handlers (``get_handler_registry``);
    whatever else has ``state_dict()`` and ``load_state_dict()`` by these: LR schedulers,
    ``GradScaler``, ``GlobalBatch``. Anything else is copied and pickled. A commit stays in memory,
    on the device of each tensor, and takes that of the state twice.

    Args:
        model: a ``torch.nn.Module``.
        optimizer: of that model; a DistributedOptimizer or a plain one.
        kwargs: further values by name, as ``epoch=0, batch=0, scheduler=scheduler``.

    Raises:
        InvalidArgument: a name is one of the state's own, or a value cannot be copied.

    Examples:
        >>> import torch, farandole.torch as hvd
        >>> hvd.init()
        >>> model = torch.nn.Linear(1, 1)
        >>> state = hvd.elastic.TorchState(model, epoch=0)
        >>> state.epoch = 3
        >>> state.commit()
        >>> _ = torch.nn.init.zeros_(model.weight)
        >>> state.restore()
        >>> float(model.weight) == 0, state.epoch
        (False, 3)
    """

    _handlers: dict[str, StateHandler]

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        _check("model", model, torch.nn.Module)
        _check("optimizer", optimizer, torch.optim.Optimizer)
        self._handlers = {}
        super().__init__(**{"model": model, "optimizer": optimizer, **kwargs})

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_names", ()):
            self._handle(name, value)
        super().__setattr__(name, value)

    def _handle(self, name: str, value: Any) -> None:
        handler = self._handlers.get(name)
        if handler is not None and handler.value is value:
            return
        if handler is not None and isinstance(value, type(handler.value)):
            handler.set_value(value)
            return
        self._handlers.pop(name, None)
        if (made := handler_of(value)) is not None:
            self._handlers[name] = made

    def _now(self) -> dict[str, Any]:
        return {n: v for n, v in super()._now().items() if n not in self._handlers}

    def save(self) -> None:
        """Keeps a copy of all of it; where something cannot be copied the former one stays."""
        handlers = list(self._handlers.values())
        ours = [each for each in handlers if isinstance(each, DictHandler)]
        for each in ours:
            each.write()
        values = self._copied()
        for other in handlers:
            if not isinstance(other, DictHandler):
                other.save()
        for each in ours:
            each.keep()
        self._saved_state = values

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        # If one rank handled a value and another pickled it, their collectives would not match.
        kinds = [f"{n}: {type(h).__name__}" for n, h in sorted(self._handlers.items())]
        agree("TorchState", kinds, advice="give every rank's state the same names")
        for _, handler in sorted(self._handlers.items()):
            handler.sync()
        super().sync()

    def reset(self) -> None:
        for handler in self._handlers.values():
            reset = getattr(handler.value, "reset", None)
            if handler.needs_sync and callable(reset):
                reset()

    @property
    def needs_sync(self) -> bool:
        return any(handler.needs_sync for handler in self._handlers.values())


def _check(name: str, value: Any, kind: type) -> None:
    if value is not None and not isinstance(value, kind):
        raise InvalidArgument(f"TorchState(): {name} is {type_of(value)}; it is a {kind.__name__}")
