"""Callbacks for ``fit``: equal beginnings, averaged metrics, learning rates, checkpoints.

What they send goes by name, apart from the gradients (`farandole.keras._host`). Every rank has the
same callbacks in the same order.
"""

# ruff: noqa: ARG002 - the signatures are Keras' and Horovod's

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from typing import Any

import keras

from farandole import _world
from farandole._arguments import checked, encodable
from farandole._core import InvalidArgument
from farandole.common._objects import allgather_object, compare
from farandole.keras._accumulated import accumulated_for, besides, share_all
from farandole.keras._bases import Callback, ModelCheckpoint
from farandole.keras._constants import compute_again
from farandole.keras._exchange import rows_of
from farandole.keras._learning_rate import set_learning_rate
from farandole.keras._trainers import say_without_xla
from farandole.keras.elastic import (
    CommitStateCallback,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
)
from farandole.keras.values import broadcast_variables
from farandole.learning_rate import ramp

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "CommitStateCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
]


class _Callback(Callback):
    """Common to all of our callbacks."""

    def set_model(self, model: Any) -> None:
        # Before fit() makes its training function, which may have collectives of its own.
        super().set_model(model)
        if keras.backend.backend() == "tensorflow" and model.jit_compile:
            model.jit_compile = False
            say_without_xla()


class BroadcastGlobalVariablesCallback(_Callback):
    """All ranks begin with the root's weights and optimizer state, as `fit` begins; those that the
    first batch makes follow after it.

    Args:
        root_rank: whose.
        device: Horovod's; does nothing.
        local_variables: variables that each rank keeps its own of.

    Raises:
        Mismatch: in `fit`, on every rank: the models differ; says which variable.
    """

    @checked
    def __init__(
        self, root_rank: int, device: str | None = "", local_variables: Iterable[Any] | None = None
    ) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.local_variables: list[Any] = list(local_variables or ())
        self._pending = False
        self._begun = False  # a batch, on every rank alike

    def on_train_begin(self, logs: Any = None) -> None:
        self._begun = False
        mine = bool(self.model.built), rows_of(self._shared(self.model.weights))
        theirs = allgather_object(mine, "built models")
        self._pending = not all(built for built, _ in theirs)
        # A class of the user's own is not built before its first batch, but its layers may be.
        if not self._pending:
            self._broadcast()
        elif all(rows == theirs[0][1] for _, rows in theirs):
            broadcast_variables(self._shared(self.model.weights), self.root_rank)

    # Not at the end of the first batch: Keras then waits for the results of every one.
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._pending and self._begun:
            self._broadcast()
        self._begun = True

    def on_train_end(self, logs: Any = None) -> None:
        if self._pending:
            self._broadcast()

    def _broadcast(self) -> None:
        self._pending = False
        model, optimizer = self.model, self.model.optimizer
        if optimizer is not None and not optimizer.built:
            optimizer.build(model.trainable_variables)  # TensorFlow leaves it to the first batch
        optimizers = [] if optimizer is None else [optimizer]
        variables = [*model.weights, *(v for each in optimizers for v in each.variables)]
        local = [g for each in optimizers for g in accumulated_for(each, self.local_variables)]
        share_all(
            self._shared(variables, local),
            optimizers,
            lambda ours: broadcast_variables(ours, self.root_rank),
        )
        compute_again(model)

    def _shared(self, variables: list[Any], local: Iterable[Any] = ()) -> list[Any]:
        return besides(variables, [*self.local_variables, *local])


class MetricAverageCallback(_Callback):
    """Metrics at the end of an epoch become their mean over the ranks, for the callbacks after it
    and the history. Put it before what looks at metrics (``ReduceLROnPlateau``, loggers).

    Args:
        device: Horovod's; does nothing.

    Raises:
        Mismatch: in `fit`, on every rank: one has a metric that another has not.
    """

    @checked
    def __init__(self, device: str | None = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if not logs:
            logs = {}
        names = sorted(k for k, v in logs.items() if _is_number(v))
        theirs = allgather_object([(name, float(logs[name])) for name in names], "metrics")
        compare("metrics", {r: [f"'{n}'" for n, _ in each] for r, each in enumerate(theirs)})
        for i, name in enumerate(names):
            logs[name] = math.fsum(each[i][1] for each in theirs) / len(theirs)


def _is_number(value: Any) -> bool:
    """Also a scalar of numpy or of a framework."""
    return isinstance(value, (int, float)) or (
        getattr(value, "shape", None) == () and hasattr(value, "__float__")
    )


def _is_rate(value: Any) -> bool:
    """Also an array or a tensor of one number."""
    return hasattr(value, "__float__")


_A_RATE = ("a number", _is_rate)


class LearningRateScheduleCallback(_Callback):
    """The learning rate is ``initial_lr * multiplier(epoch)`` within ``[start_epoch, end_epoch)``.

    Args:
        initial_lr: what is multiplied.
        multiplier: a function of the epoch; or a number, whose power by the epoch is taken.
        start_epoch: before it, nothing is done.
        end_epoch: from it on, nothing is done; None: no end.
        staircase: change it once an epoch; else at every batch, with a fractional epoch.
        momentum_correction: scale the velocities of a momentum method with the learning rate
            (Goyal et al., 2017): they contain it.
        steps_per_epoch: batches of an epoch; default: as `fit` knows.
    """

    @checked(
        initial_lr=_A_RATE,
        multiplier=("a number or a function", lambda v: callable(v) or _is_rate(v)),
    )
    def __init__(
        self,
        initial_lr: float,
        multiplier: Callable[[float], float] | float,
        start_epoch: float = 0,
        end_epoch: float | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: float | None = None,
    ) -> None:
        super().__init__()
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase: bool = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch: float | None = steps_per_epoch
        self.multiplier: Callable[[float], float]
        if callable(multiplier):
            self.multiplier = multiplier
        else:
            self.staircase = True
            factor = float(multiplier)
            self.multiplier = lambda epoch: factor ** (epoch - start_epoch)
        self._epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        if self.staircase or self.steps_per_epoch:
            return
        self.steps_per_epoch = self.params.get("steps")
        if not self.steps_per_epoch:
            raise InvalidArgument(
                f"{type(self).__name__} cannot tell how many batches an epoch has; pass "
                "steps_per_epoch"
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._epoch < self.start_epoch:
            return
        if self.end_epoch is not None and self._epoch >= self.end_epoch:
            return
        if not self.staircase:
            assert self.steps_per_epoch is not None
            self._adjust(self._epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._adjust(self._epoch)

    def _adjust(self, epoch: float) -> None:
        rate = self.initial_lr * self.multiplier(epoch)
        set_learning_rate(self.model.optimizer, rate, correct=self.momentum_correction)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """The learning rate grows from ``initial_lr / size`` to ``initial_lr`` in the first epochs.

    Args:
        initial_lr: the rate of all ranks together: that of one rank times ``size()``.
        warmup_epochs: how long.
        momentum_correction: as in ``LearningRateScheduleCallback``.
        steps_per_epoch: likewise.
        verbose: 1 says when it is over.
    """

    @checked(initial_lr=_A_RATE)
    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: float | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch is not None
            # At the end of an epoch, so that a curve over epochs shows round numbers.
            done = epoch + 1 / self.steps_per_epoch
            size = _world.size()
            return float(ramp(done / warmup_epochs, 1 / size, 1.0))

        super().__init__(
            initial_lr,
            multiplier,
            start_epoch=0,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.end_epoch is not None and epoch == self.end_epoch - 1 and self.verbose > 0:
            rate = float(self.model.optimizer.learning_rate)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")


class BestModelCheckpoint(ModelCheckpoint):
    """Rank 0 saves the model whenever ``monitor`` is best. Put ``MetricAverageCallback`` before it,
    or rank 0's own metric decides.

    Args:
        monitor: as in Keras' ``ModelCheckpoint``.
        verbose: likewise.
        save_weights_only: likewise.
        mode: likewise.
        save_freq: likewise.
        filepath: where; or set the attribute before `fit`.
    """

    @checked
    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: int | str = "epoch",
        filepath: str | os.PathLike[str] | None = None,
    ) -> None:
        ending = ".weights.h5" if save_weights_only else ".keras"
        try:
            super().__init__(
                filepath=filepath if filepath is not None else f"best{ending}",
                monitor=monitor,
                verbose=verbose,
                save_best_only=True,
                save_weights_only=save_weights_only,
                mode=mode,
                save_freq=save_freq,
            )
        except ValueError as error:
            raise InvalidArgument(f"BestModelCheckpoint(): {encodable(error)}") from error
        if filepath is None:
            self.filepath: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        if self.filepath is None:
            raise InvalidArgument(
                "BestModelCheckpoint does not know where to save; pass filepath, or set the "
                "attribute of that name"
            )
        super().on_train_begin(logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if _world.rank() == 0:
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if _world.rank() == 0:
            super().on_epoch_end(epoch, logs)
