"""Teaches Keras 3 some habits of Keras 2, which programs for Horovod have.

Horovod's examples were written for the Keras 2 inside TensorFlow. Three of its habits are taught to
Keras 3 in processes that import a Horovod which is farandole, and in no others.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any


@functools.cache
def learn() -> None:
    """Without Keras 3 it does nothing."""
    try:
        import keras
    except ImportError:
        return
    if int(keras.__version__.partition(".")[0]) < 3:
        return
    optimizer, scaling = keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer
    _teach_compile(_owner(keras.Model, "compile"))
    _teach_learning_rate(_owner(optimizer, "variables"))
    for owner in {_owner(optimizer, "variables"), _owner(scaling, "variables")}:
        _teach_variables(owner)


def _owner(cls: type, name: str) -> Any:
    """The base class that defines it, from which all others inherit it."""
    return next(base for base in cls.__mro__ if name in vars(base))


def _teach_compile(model: Any) -> None:
    """compile(experimental_run_tf_function=False): Keras 3 has the one way to train."""
    own = model.compile

    @functools.wraps(own)
    def compile(self: Any, *arguments: Any, **others: Any) -> Any:
        if others.pop("experimental_run_tf_function", None) is not None:
            _say("model.compile() ignores experimental_run_tf_function")
        return own(self, *arguments, **others)

    model.compile = compile


def _teach_learning_rate(optimizer: Any) -> None:
    """SGD(lr=0.1)."""
    own = optimizer.__init__

    @functools.wraps(own)
    def __init__(self: Any, *arguments: Any, **others: Any) -> None:
        if "lr" in others:
            others["learning_rate"] = others.pop("lr")
        own(self, *arguments, **others)

    optimizer.__init__ = __init__


class _Variables(list[Any]):
    """The list, and what a call of it returns."""

    def __call__(self) -> _Variables:
        return self


def _teach_variables(optimizer: Any) -> None:
    """optimizer.variables(): it is a property now."""
    own = vars(optimizer)["variables"].fget
    optimizer.variables = property(lambda self: _Variables(own(self)))


@functools.cache
def _say(what: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"farandole: {what}, which Keras 3 does not have", file=sys.stderr)
