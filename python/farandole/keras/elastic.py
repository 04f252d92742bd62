"""Elastic training of Keras models: what goes from one world into the next, and callbacks for it.

The callbacks work with any object of yours, too.
"""

# ruff: noqa: ARG002 - the signatures are Keras' and Horovod's

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import keras
import numpy as np

from farandole import _world
from farandole._arguments import checked, type_of
from farandole._core import Error, InvalidArgument
from farandole.common._variables_state import ModelState
from farandole.common._worlds import Framework
from farandole.common.elastic import run_fn
from farandole.keras._accumulated import share_all
from farandole.keras._bases import Callback
from farandole.keras._constants import compute_again
from farandole.keras.values import broadcast_variables

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]

_R = TypeVar("_R")


def _cause_of(error: Exception) -> BaseException:
    """The world's error, if a program of the backend has failed by it; else the given one."""
    if not isinstance(error, Error):
        if keras.backend.backend() == "tensorflow":
            from farandole.tensorflow._verdicts import cause_of

            return cause_of(error)
        if keras.backend.backend() == "jax":
            from farandole.jax.elastic import cause_of as cause_on_jax

            return cause_on_jax(error)
    return error


def run(func: Callable[..., _R]) -> Callable[..., _R]:
    """Decorates the function that trains, whose first argument is the state: in an elastic job it
    is called again, with the state of the last commit, where ranks were lost or have come.

    Examples:
        >>> import farandole.keras as hvd, keras
        >>> hvd.init()
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        >>> @hvd.elastic.run
        ... def train(state):
        ...     commit = hvd.elastic.CommitStateCallback(state)
        ...     epoch = hvd.elastic.UpdateEpochStateCallback(state)
        ...     model.fit(x, y, epochs=3 - state.epoch, callbacks=[epoch, commit], verbose=0)
        >>> x, y = keras.ops.ones((64, 2)), keras.ops.ones((64, 1))
        >>> state = hvd.elastic.KerasState(model, epoch=0)
        >>> train(state)
        >>> state.epoch
        3
    """
    return run_fn(func, Framework(init=lambda: _world.init(), cause_of=_cause_of))


class KerasState(ModelState):
    """A model's weights, its optimizer's variables, and objects, which are attributes.

    What ``sync()`` gives to all ranks are rank 0's; the seeds of random layers stay each rank's.

    Args:
        model: a Keras 3 model that is built.
        optimizer: default: the one that the model was compiled with, if it was.
        kwargs: the objects' names and first values, such as ``epoch=0, batch=0``.

    Raises:
        InvalidArgument: the model is none, or not built; or a name is one of the state's own.
        Mismatch: from ``sync()``: the ranks' models differ; says which variable.

    Examples:
        >>> import farandole.keras as hvd, keras
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> state = hvd.elastic.KerasState(model, epoch=0)
        >>> model.layers[0].bias.assign([7.0]) is None
        False
        >>> state.restore()
        >>> model.layers[0].bias.numpy().tolist()
        [0.0]
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if not isinstance(model, keras.Model):
            raise InvalidArgument(f"model is {type_of(model)}, not a Keras 3 model")
        super().__init__(model, optimizer, **kwargs)

    def _read(self, variables: Sequence[Any]) -> list[Any]:
        return [_copied(variable) for variable in variables]

    def _share(self, variables: Sequence[Any]) -> None:
        optimizers = [] if self.optimizer is None else [self.optimizer]
        share_all(variables, optimizers, lambda ours: broadcast_variables(ours, root_rank=0))
        compute_again(self.model)


def _copied(variable: Any) -> Any:
    return np.array(keras.ops.convert_to_numpy(variable), order="C")


class CommitStateCallback(Callback):
    """Calls ``state.commit()`` after every ``batches_per_commit`` batches of training, counted from
    the beginning of `fit`, and at the end of every epoch.

    Args:
        state: an object with a method ``commit()``. Callbacks that write to it come before this.
        batches_per_commit: 0: at the ends of epochs alone.

    Raises:
        InvalidArgument: the state cannot be committed, or the number is negative.

    Examples:
        >>> import farandole.keras as hvd
        >>> class State:
        ...     def commit(self):
        ...         model.save_weights("last.weights.h5")
        >>> callback = hvd.callbacks.CommitStateCallback(State(), batches_per_commit=100)
    """

    @checked
    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        if not callable(getattr(state, "commit", None)):
            raise InvalidArgument(f"state is {type_of(state)}, which has no commit()")
        if batches_per_commit < 0:
            raise InvalidArgument(f"batches_per_commit is {batches_per_commit}")
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining: int = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        self.batches_remaining = self.batches_per_commit  # alike on all ranks, as new ones join

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.commit()
            self.batches_remaining = self.batches_per_commit

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.commit()

    def commit(self) -> None:
        """Saves the state now."""
        # Within an epoch on JAX, who asks for the model gives it its weights back.
        _ = self.model
        self.state.commit()


class UpdateBatchStateCallback(Callback):
    """``state.batch`` is the number of the last batch, and 0 after an epoch.

    Args:
        state: an object whose attribute is written.
    """

    # Horovod's also shortens `params["steps"]` by it. Keras 3 does not train by that number.

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.batch = 0


class UpdateEpochStateCallback(Callback):
    """``state.epoch`` is how many epochs are done: those of this `fit`, and what it was before.

    Args:
        state: an object with that attribute.
    """

    @checked(state=("an object with the attribute epoch", lambda v: hasattr(v, "epoch")))
    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.initial_epoch: Any = state.epoch
        self._first: int | None = None  # of this `fit`, which has an initial_epoch of its own

    def on_train_begin(self, logs: Any = None) -> None:
        self.initial_epoch, self._first = self.state.epoch, None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._first is None:
            self._first = epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.epoch = self.initial_epoch + epoch - (self._first or 0) + 1
