"""Elastic training with PyTorch: a job that goes on where ranks are lost, and takes in new ones.

@hvd.elastic.run
def train(state):
    while state.epoch < 10:
        for batch in loader:
            ...
        state.epoch += 1
        state.commit()

train(hvd.elastic.TorchState(model, optimizer, epoch=0))

Started by ``farandole run -np 4 --min-np 2 -- python train.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from farandole.common import _basics
from farandole.common._worlds import Framework
from farandole.common.elastic import run_fn
from farandole.torch._entries import public
from farandole.torch._training import worlds
from farandole.torch.elastic.handlers import (
    ModelStateHandler,
    OptimizerStateHandler,
    SamplerStateHandler,
    StateHandler,
    get_handler_registry,
    set_handler_registry,
)
from farandole.torch.elastic.sampler import ElasticSampler
from farandole.torch.elastic.state import TorchState

__all__ = [
    "ElasticSampler",
    "ModelStateHandler",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "run",
    "set_handler_registry",
]

_R = TypeVar("_R")


@public
def run(func: Callable[..., _R]) -> Callable[..., _R]:
    """Decorates a function whose first argument is a state, so that it goes on where ranks are lost
    and where new ones come.

    The state is shared, then the function is called, and what it returns is returned. Where ranks
    are lost every other one goes back to the last ``state.commit()``, joins the others in a new
    world, and calls it again; where ranks are to come or to go, likewise, without going back.

    A ``DistributedOptimizer`` and a ``GlobalBatch`` are made before, and reduce inside. Between
    ``hvd.init()`` and the call nothing is collective: ranks that come later run that part alone.

    Errors of the program are raised. So is the loss of a rank where the job is not elastic: only
    ``farandole run --min-np`` forms another world.

    Args:
        func: as ``train(state, …)``.

    Raises:
        InvalidArgument: what comes first is no state.

    Examples:
        >>> import torch, farandole.torch as hvd
        >>> hvd.init()
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        >>> @hvd.elastic.run
        ... def train(state):
        ...     while state.batch < 3:
        ...         optimizer.zero_grad()
        ...         model(torch.ones(1, 2)).sum().backward()
        ...         optimizer.step()
        ...         state.batch += 1
        ...         state.commit()
        >>> train(hvd.elastic.TorchState(model, optimizer, batch=0))
    """
    return run_fn(func, _framework)


_framework = Framework(init=_basics.init, leave=worlds.leave, enter=worlds.enter, end=worlds.end)
