"""Keras' models in a scope: their methods are taught, once, to share what they do.

A model made anywhere else is as before. Without Keras, or on another backend, there is nothing to
teach.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from farandole import _world
from farandole._core import InvalidArgument
from farandole.strategy._variables import is_ours, on_servers

_COMPUTE = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
_KEEP = ("save", "save_weights", "load_weights", "set_weights")
_SHARED = "_farandole_shared"  # of a Keras model
_ALONE = "_farandole_alone"  # of one that was warned of


def imported() -> Any:
    """Keras, as soon as the program has imported it; None on another backend."""
    keras: Any = sys.modules.get("keras")
    there = keras is not None and hasattr(keras, "Model") and hasattr(keras, "optimizers")
    return keras if there and keras.backend.backend() == "tensorflow" else None


@functools.cache
def teach(model: Any) -> None:
    for name in _COMPUTE:
        setattr(model, name, _computed(name, getattr(model, name)))
    for name in _KEEP:
        setattr(model, name, _kept(name, getattr(model, name)))
    # Where it is defined: Keras looks whether a class has one of its own.
    owner: Any = next(each for each in model.__mro__ if "compile" in vars(each))
    owner.compile = _compiled(owner.compile)


def _shared(model: Any) -> Any:
    """The SharedModel of a Keras model that was made in a scope of ours; None of others."""
    shared = vars(model).get(_SHARED)
    if shared is not None:
        return shared
    strategy = model._distribute_strategy
    if strategy is None or not is_ours(strategy):
        return None
    from farandole.strategy._model import SharedModel

    vars(model)[_SHARED] = shared = SharedModel(model, strategy)
    return shared


def _computed(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        shared = _shared(self)
        data = args[0] if args else kwargs.get("x")
        inner = kwargs.get("_use_cached_eval_dataset") or _is_marked(data)
        if shared is None:
            _refuse_in_scope(self)
            if not _prepare_served(self, name) and name == "fit":
                _warn_alone(self)
        if shared is None or inner or shared.is_reading(data):
            return own(self, *args, **kwargs)
        return getattr(shared, name)(*args, **kwargs)

    return method


def _refuse_in_scope(model: Any) -> None:
    """Raises InvalidArgument for a model of no scope that computes in one of ours."""
    current = tf.distribute.get_strategy()
    if model._distribute_strategy is None and is_ours(current):
        raise InvalidArgument(
            f"model '{model.name}' was not made in the scope of this {type(current).__name__}\n"
            "  advice: make it inside `with strategy.scope():`"
        )


def _warn_alone(model: Any) -> None:
    """Warns once of a model of no scope that trains where a strategy has joined ranks, if nothing
    of ours sums its gradients. Another strategy's scope is the user's choice."""
    from farandole.keras._wrapped import distributed_in

    if _world.size() == 1 or model._distribute_strategy is not None or _ALONE in vars(model):
        return
    if distributed_in(model) is not None:
        return
    vars(model)[_ALONE] = True
    warnings.warn(
        f"model '{model.name}' was made in no strategy's scope: each rank trains it alone, and "
        "weights differ from rank to rank\n  advice: make and compile it inside `with "
        "strategy.scope():`",
        stacklevel=3,
    )


def _prepare_served(model: Any, name: str) -> bool:
    """Whether servers have the variables; if so, this process takes their present values.

    Raises:
        InvalidArgument: for a method that trains.
    """
    strategy = model._distribute_strategy
    if not on_servers(strategy):
        return False
    if name in ("fit", "train_on_batch"):
        raise InvalidArgument(
            f"{name} of a model in the scope of a {type(strategy).__name__}, whose steps a "
            "ClusterCoordinator schedules\n  advice: farandole.keras.ParameterServer(servers=…).fit"
            "(model, …) trains a model that was made in no scope"
        )
    strategy.extended.store.refresh()
    return True


def share_in(arguments: Any) -> Any:
    """The share in the arguments of a shared model's step; None for other arguments."""
    if "farandole.keras.model" not in sys.modules or not isinstance(arguments, list | tuple):
        return None
    from farandole.keras._global.marks import unmarked

    return unmarked(arguments[0])[1] if arguments else None


def are_shared(dataset: Any) -> bool:
    """Whether the elements of a dataset carry such a share."""
    return share_in((getattr(dataset, "element_spec", None),)) is not None


def _is_marked(data: Any) -> bool:
    return share_in(([data],)) is not None


def _kept(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        shared = _shared(self)
        if _prepare_served(self, name) and name.startswith("save") and _world.rank() != 0:
            return None
        if shared is None or shared.plainly:
            return own(self, *args, **kwargs)
        if not shared.in_loop:
            return getattr(shared, name)(*args, **kwargs)
        # A callback calls it. Rank 0 alone has some of those that write.
        if name.startswith("save") and _world.rank() != 0:
            return None
        with shared.strategy.extended.by_itself():
            return own(self, *args, **kwargs)

    return method


def _compiled(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def compile(self: Any, *args: Any, **kwargs: Any) -> None:
        strategy = self._distribute_strategy
        if strategy is None or not is_ours(strategy):
            own(self, *args, **kwargs)
            return
        with strategy.scope():
            own(self, *args, **kwargs)
        _require_own_optimizer(self, strategy)
        shared = vars(self).get(_SHARED)
        if shared is not None:
            shared.adopt()

    return compile


def _require_own_optimizer(model: Any, strategy: Any) -> None:
    """Raises InvalidArgument for an optimizer of no such scope, and the model is not compiled."""
    optimizer = model.optimizer
    inner = getattr(optimizer, "inner_optimizer", optimizer)  # of one that scales losses
    if getattr(inner, "_distribution_strategy", strategy) is strategy:
        return
    model.compiled = False
    raise InvalidArgument(
        f"compile(): optimizer '{inner.name}' was not created in the scope of this "
        f"{type(strategy).__name__}, so replicas do not share its variables\n"
        "  advice: create it inside `with strategy.scope():`, or pass its name"
    )
