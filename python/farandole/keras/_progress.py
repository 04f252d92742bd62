"""Where `fit` is, in its user's words, for warnings and verdicts.

Keras tells its list of callbacks, which is taught to remember it: another thread must not read the
locals of a frame that goes on meanwhile. (Making its dictionary anew drops the values of the last
one, which may let the other thread run, and in CPython 3.11 and 3.12 its frame is gone then.)
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import keras

from farandole import _watch


@dataclass
class _Place:
    epoch: int
    step: int | None = None  # the last batch that was begun or ended


_places: dict[int, _Place] = {}  # of the newest fit, by thread


def describe(frames: Sequence[FrameType]) -> str:
    """Such as "is in batch 17 of epoch 1" or "ended epoch 1 after 16 batches"; outside of `fit`
    nothing. The frames are those of the main thread."""
    for i, frame in enumerate(frames):
        if _is_trainers(frame, "fit"):
            place = _places.get(threading.main_thread().ident or 0)
            return _describe_fit(place, {f.f_code.co_name for f in frames[:i]})
    return ""


def _is_trainers(frame: FrameType, name: str) -> bool:
    path = Path(frame.f_code.co_filename)
    return frame.f_code.co_name == name and path.name == "trainer.py" and "keras" in path.parts


def _describe_fit(place: _Place | None, inside: set[str]) -> str:
    if place is None or "on_train_begin" in inside:
        return "begins fit()"
    epoch, step = place.epoch + 1, place.step
    if "on_epoch_begin" in inside or step is None:
        return f"begins epoch {epoch}"
    batches = f"{step + 1} batch{'es' if step else ''}"
    if "on_train_end" in inside:
        return f"ended fit() with {batches} in its last epoch"
    if "on_epoch_end" in inside:
        return f"ended epoch {epoch} after {batches}"
    if "evaluate" in inside:
        return f"evaluates after {batches} of epoch {epoch}"
    if keras.backend.backend() == "jax":  # steps run behind the program
        return f"has begun {batches} of epoch {epoch}"
    return f"is in batch {step + 1} of epoch {epoch}"


def _forget(_: object = None) -> None:
    _places.pop(threading.get_ident(), None)


def _enter_epoch(epoch: int) -> None:
    _places[threading.get_ident()] = _Place(epoch)


def _note_step(step: int) -> None:
    if place := _places.get(threading.get_ident()):
        place.step = step


_NOTES: dict[str, Callable[[Any], None]] = {
    "on_train_begin": _forget,
    "on_epoch_begin": _enter_epoch,
    "on_train_batch_begin": _note_step,
    "on_train_batch_end": _note_step,
}


@functools.cache
def watch() -> None:
    """Once: warnings and verdicts say how far `fit` has come on each rank."""
    _watch.libraries.add("keras")
    kind = keras.callbacks.CallbackList
    for name, note in _NOTES.items():
        setattr(kind, name, _noted(getattr(kind, name), note))
    _watch.steps.append(describe)


def _noted(own: Callable[..., Any], note: Callable[[Any], None]) -> Callable[..., Any]:
    @functools.wraps(own)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        note(next(iter((*args, *kwargs.values())), None))
        return own(self, *args, **kwargs)

    return call
