"""Horovod's callbacks for the state of a job: when it is committed, and where training is.

They work with any object of yours. Elastic training itself is not there yet: every other name of
Horovod's for it says so when it is used.
"""

# ruff: noqa: ARG002 - the signatures are Keras' and Horovod's

from __future__ import annotations

from typing import Any, NoReturn

from farandole._arguments import checked, type_of
from farandole._core import InvalidArgument
from farandole.common._elastic import Absent, refuse
from farandole.keras._bases import Callback

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


class _Absent(Absent):
    checkpoints = "on rank 0 (hvd.callbacks.BestModelCheckpoint)"


def run(func: Any) -> NoReturn:  # noqa: ARG001 - Horovod's signature
    """Raises NotImplementedError."""
    refuse("run", _Absent.checkpoints)


class KerasState(_Absent):
    """Raises NotImplementedError."""


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
        _ = self.model  # within an epoch on JAX, who asks for the model gives it its weights back
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

    def on_train_begin(self, logs: Any = None) -> None:
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.epoch = self.initial_epoch + epoch + 1
