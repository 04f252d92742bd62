"""Callbacks of a job: files are written once, and all ranks decide alike.

Decisions at the end of an epoch (EarlyStopping, ReduceLROnPlateau) are made on every rank, from
logs that are the same in every bit. So are those of callbacks that look at batches: they get the
results of all ranks. What they leave different is found at the end of the epoch (alike.py).
"""

# ruff: noqa: ARG002 - the signatures are Keras'

from __future__ import annotations

import dis
import inspect
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np

from farandole import _world
from farandole._arguments import type_of
from farandole._core import InvalidArgument
from farandole.common._objects import broadcast_object
from farandole.data._same import compares_after
from farandole.keras import _host
from farandole.keras._bases import Callback, TerminateOnNaN

# Callbacks that write files or to a terminal: rank 0 alone has them, and what derives from them.
_ONCE = (
    "BackupAndRestore", "CSVLogger", "ModelCheckpoint", "OrbaxCheckpoint", "ProgbarLogger",
    "RemoteMonitor", "TensorBoard",
)  # fmt: skip
_OF_LOGS = 2  # a batch, logs
_WRITE = ("save", "save_weights", "export")  # methods of a model


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
    return [each for each in callbacks if not _is(each, *_ONCE)]


def listening(
    callbacks: list[Any], model: Any, *, epochs: int, steps: int | None, verbose: Any
) -> Any:
    """A CallbackList of those that this rank has, and of what Keras' fit adds."""
    return keras.callbacks.CallbackList(
        on_this_rank(callbacks),
        add_history=True,
        add_progbar=verbose != 0,
        verbose=1 if verbose == "auto" else verbose,
        epochs=epochs,
        steps=steps,
        model=model,
    )


def _is(callback: Any, *names: str) -> bool:
    """Whether it is, or derives from, one of these classes of Keras."""
    kinds = (getattr(keras.callbacks, name, None) for name in names)
    return isinstance(callback, tuple(kind for kind in kinds if kind is not None))


@contextmanager
def writing_once(model: Any) -> Iterator[None]:
    """In it callbacks of the user's own, which every rank has, do not all write one file: what
    ranks but the first save is nothing, or weights in a folder of their own, from which they load
    them again."""
    if _world.rank() == 0:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="farandole-weights-") as folder:
        own = vars(model)
        replaced = {name: own.get(name) for name in (*_WRITE, "load_weights")}
        own.update(_of_this_rank_alone(model, Path(folder)))
        try:
            yield
        finally:
            for name, before in replaced.items():
                if before is None:
                    del own[name]
                else:
                    own[name] = before


def _of_this_rank_alone(model: Any, folder: Path) -> dict[str, Callable[..., Any]]:
    save, load = model.save_weights, model.load_weights
    kept: dict[str, Path] = {}  # copies, by the names that the program gives

    def save_weights(filepath: Any, *args: Any, **kwargs: Any) -> None:
        copy = kept.setdefault(str(filepath), folder / f"{len(kept)}.weights.h5")
        save(copy, *args, **kwargs)

    def load_weights(filepath: Any, *args: Any, **kwargs: Any) -> None:
        copy = kept.get(str(filepath))
        load(copy if copy is not None and copy.exists() else filepath, *args, **kwargs)

    def nothing(*_: Any, **__: Any) -> None:
        pass

    return {"save_weights": save_weights, "load_weights": load_weights} | {
        name: nothing for name in _WRITE if name != "save_weights"
    }


def looking_at_batches(callbacks: Any) -> tuple[bool, bool]:
    """Whether any of the callbacks looks at the logs of batches, in training and in evaluation."""
    found = [each for each in listed(callbacks) if _looks(each)]
    train, test = ("on_train_batch_end", "on_batch_end"), ("on_test_batch_end",)
    return (
        any(_has_own(each, name) for each in found for name in train),
        any(_has_own(each, name) for each in found for name in test),
    )


def _looks(callback: Any) -> bool:
    if _is(callback, "ModelCheckpoint"):
        return bool(callback.save_freq != "epoch")
    if _is(callback, "TensorBoard"):
        return bool(callback.update_freq != "epoch")
    own = not type(callback).__module__.startswith(("keras.", "farandole."))
    return own or _is(callback, "LambdaCallback")


def _has_own(callback: Any, name: str) -> bool:
    """Whether it has a method other than that of all callbacks, which reads its logs."""
    method = getattr(callback, name, None)
    if method is None or getattr(method, "_is_default", False):  # as Keras marks it
        return False
    code = getattr(inspect.unwrap(method), "__code__", None)
    if code is None or code.co_argcount < _OF_LOGS or code.co_flags & inspect.CO_VARARGS:
        return True
    logs = code.co_varnames[code.co_argcount - 1]
    return any(
        each.argval == logs or logs in str(each.argval) for each in dis.get_instructions(code)
    )


def rows_of(callbacks: Any) -> list[str]:
    """The number of callbacks that ask other ranks, as a line to compare."""
    nans = sum(isinstance(each, TerminateOnNaN) for each in of_this_rank(callbacks))
    return [f"{nans} TerminateOnNaN"]


def restores(callbacks: Any) -> bool:
    return any(_is(each, "BackupAndRestore") for each in callbacks)


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


class WholeLogs(Callback):
    """Comes before the user's callbacks: what they see after a batch is of all ranks.

    Args:
        of_all: makes logs of all ranks of this rank's.
        train: whether any rank's callbacks look at batches of training.
        test: the same, of evaluation.
    """

    def __init__(self, of_all: Callable[[Any], Any], *, train: bool, test: bool) -> None:
        super().__init__()
        self._of_all, self._train, self._test = of_all, train, test

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._train:
            logs.update(self._of_all(logs))

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._test:
            logs.update(self._of_all(logs))


class AgreeInFit(Callback):
    """Comes after the user's callbacks: if one of them stops training on a rank, all ranks stop.

    Args:
        restored: called as fit begins, with the epoch at which it goes on, since rank 0's callbacks
            may have loaded weights.
        compare: checks that ranks read the same batches.
        agree: whether any rank is to stop; checks that ranks are alike.
    """

    def __init__(
        self,
        *,
        restored: Callable[[int], None] | None,
        compare: Callable[[], None],
        agree: Callable[[str, bool], bool],
    ) -> None:
        super().__init__()
        self._restored, self._compare, self._agree = restored, compare, agree
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
        stop = bool(self.model.stop_training)
        self.model.stop_training = self._agree(f"after epoch {epoch + 1}", stop)
