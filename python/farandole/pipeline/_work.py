"""The base of every framework's Work (pipeline/_runner.py)."""

from __future__ import annotations

from typing import Any


class ForwardWork:
    """The work of a step that only goes forward: there is nothing to reduce."""

    def __init__(self) -> None:
        self._loss = 0.0  # this rank's share
        self._bytes = 0  # of activations
        self.outputs: dict[int, Any] = {}  # of the last stage, by micro-batch

    def end(self, *, failed: bool) -> None:
        """There is nothing to do."""

    def loss(self) -> float:
        return self._loss

    def activations(self) -> int:
        return self._bytes

    def has_gradient(self) -> bool:
        return False

    def is_finite(self) -> bool:
        return True

    def forget(self) -> None:
        self.outputs.clear()
