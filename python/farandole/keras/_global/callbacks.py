"""Callbacks of a job: files are written once, and all ranks decide alike.

Decisions at the end of an epoch (EarlyStopping, ReduceLROnPlateau) are made on every rank, from
logs that are the same in every bit. A callback that looks at batches sees this rank's own
numbers, and asks the others.
"""

# ruff: noqa: ARG002 - the signatures are Keras'

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from farandole import _world
from farandole._arguments import type_of
from farandole._core import InvalidArgument
from farandole.common._objects import allgather_object, broadcast_object
from farandole.data._same import compares_after
from farandole.keras import _host
from farandole.keras._bases import Callback, TerminateOnNaN

# Callbacks that write files or to a terminal: rank 0 alone has them.
_ONCE = (
    "BackupAndRestore", "CSVLogger", "ModelCheckpoint", "OrbaxCheckpoint", "ProgbarLogger",
    "RemoteMonitor", "TensorBoard",
)  # fmt: skip


def of_this_rank(callbacks: Any) -> list[Any]:
    """This rank's callbacks, of those that the program passes on every rank."""
    mine = on_this_rank([_agreeing(each) for each in listed(callbacks)])
    if _world.rank() == 0:
        return mine
    for each in mine:
        if type(each).__module__.startswith("keras.") and getattr(each, "verbose", False):
            each.verbose = 0
    return mine


def listed(callbacks: Any) -> list[Any]:
    """The program's callbacks as a list. Raises InvalidArgument for an object that is none."""
    given: Any = [] if callbacks is None else callbacks
    if isinstance(given, keras.callbacks.CallbackList):
        given = given.callbacks
    found = list(given) if isinstance(given, list | tuple) else [given]
    for each in found:
        if not hasattr(each, "set_model"):
            raise InvalidArgument(f"callbacks has {type_of(each)}; it takes callbacks of Keras")
    return found


def on_this_rank(callbacks: list[Any]) -> list[Any]:
    """The callbacks without those that only rank 0 has."""
    if _world.rank() == 0:
        return callbacks
    once = tuple(getattr(keras.callbacks, name) for name in _ONCE if hasattr(keras.callbacks, name))
    return [each for each in callbacks if not isinstance(each, once)]


def rows_of(callbacks: Any) -> list[str]:
    """The number of callbacks that ask other ranks, as a line to compare."""
    nans = sum(isinstance(each, TerminateOnNaN) for each in of_this_rank(callbacks))
    return [f"{nans} TerminateOnNaN"]


def restores(callbacks: Any) -> bool:
    kind: Any = getattr(keras.callbacks, "BackupAndRestore", ())
    return any(isinstance(each, kind) for each in callbacks)


def _agreeing(callback: Any) -> Any:
    if type(callback) is not keras.callbacks.TerminateOnNaN:
        return callback
    agreeing = _AgreeOnNaN()
    agreeing.__dict__.update(vars(callback))
    return agreeing


class _AgreeOnNaN(TerminateOnNaN):
    """Ends training on all ranks with this batch if one rank's loss is not finite."""

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        loss = (logs or {}).get("loss")
        bad = loss is not None and not np.isfinite(float(keras.ops.convert_to_numpy(loss)))
        found = _host.all_reduce(np.array(float(bad)), "max", "loss is no number")
        if found > 0:
            super().on_batch_end(batch, {"loss": float("nan")})


class AgreeInFit(Callback):
    """Comes after the user's callbacks: if one of them stops training on a rank, all ranks stop.

    Args:
        restored: called as fit begins, with the epoch at which it goes on, since rank 0's callbacks
            may have loaded weights.
        compare: checks that ranks read the same batches.
    """

    def __init__(
        self, *, restored: Callable[[int], None] | None, compare: Callable[[], None]
    ) -> None:
        super().__init__()
        self._restored, self._compare = restored, compare
        self._batches = 0

    def on_train_begin(self, logs: Any = None) -> None:
        if self._restored is not None:
            epoch = broadcast_object(self.model._initial_epoch, 0, "initial epoch")
            self.model._initial_epoch = epoch
            self._restored(epoch or 0)

    # Not at the end of the first batch: Keras then waits for the results of every one.
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._batches += 1
        if compares_after(self._batches):
            self._compare()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.stop_training = any(
            allgather_object(bool(self.model.stop_training), "stop_training")
        )
