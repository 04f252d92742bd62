"""Optimizers that a training step of the user's own has besides the model's: they reduce, too.

Nobody says where a program keeps them. So Keras' class is taught, once: an optimizer that is
applied in a step of a shared model becomes a DistributedOptimizer then.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import keras

from farandole._core import InvalidArgument
from farandole.keras._global.steps import running
from farandole.keras._wrapped import distributed_in, is_updating


@cache
def learn() -> None:
    owner: Any = next(c for c in keras.optimizers.Optimizer.__mro__ if "apply" in vars(c))
    for kind in (owner, keras.optimizers.LossScaleOptimizer):
        for name in ("apply", "stateless_apply"):
            if name in vars(kind):
                setattr(kind, name, _taught(name, vars(kind)[name]))


def _taught(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(own)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_updating() or distributed_in(self) is not None or not _adopted(self):
            return own(self, *args, **kwargs)
        return getattr(self, name)(*args, **kwargs)

    return method


def _adopted(optimizer: Any) -> bool:
    """Whether it reduces from now on: where it is applied in a shared step."""
    steps = running()
    if steps is None or steps.share is None:
        return False
    if steps.block is not None:
        raise InvalidArgument(
            f"logical_ranks={steps.block.parts}: train_step() applies '{optimizer.name}', which is "
            "not the optimizer that the model was compiled with; the parts of a batch are "
            "computed one by one, and updated once\n  advice: no logical_ranks"
        )
    steps.adopt(optimizer)
    return True
