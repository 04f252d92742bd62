"""Where `fit` is, in its user's words, read from its frames: no step pays for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import keras

from farandole import _watch


def describe(frames: Sequence[FrameType]) -> str:
    """Such as "is in batch 17 of epoch 1" or "ended epoch 1 after 16 batches"; outside of `fit`
    nothing."""
    for i, frame in enumerate(frames):
        if _is_trainers(frame, "fit"):
            return _describe_fit(frame, {f.f_code.co_name for f in frames[:i]})
    return ""


def _is_trainers(frame: FrameType, name: str) -> bool:
    path = Path(frame.f_code.co_filename)
    return frame.f_code.co_name == name and path.name == "trainer.py" and "keras" in path.parts


def _describe_fit(frame: FrameType, inside: set[str]) -> str:
    known = frame.f_locals
    epoch, step = known.get("epoch"), known.get("end_step")
    if epoch is None or "on_train_begin" in inside:
        return "begins fit()"
    if "on_epoch_begin" in inside or step is None:
        return f"begins epoch {epoch + 1}"
    batches = f"{step + 1} batch{'es' if step else ''}"
    if "on_train_end" in inside:
        return f"ended fit() with {batches} in its last epoch"
    if "on_epoch_end" in inside:
        return f"ended epoch {epoch + 1} after {batches}"
    if "evaluate" in inside:
        return f"evaluates after {batches} of epoch {epoch + 1}"
    if keras.backend.backend() == "jax":  # steps run behind the program
        return f"has begun {batches} of epoch {epoch + 1}"
    return f"is in batch {step + 1} of epoch {epoch + 1}"


def watch() -> None:
    """Once: warnings and verdicts say how far `fit` has come on each rank."""
    _watch.libraries.add("keras")
    if describe not in _watch.steps:
        _watch.steps.append(describe)
