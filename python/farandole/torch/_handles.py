"""Operations in flight, by number."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

from farandole._core import Error, InvalidArgument


class Handles:
    """What ``poll`` and ``synchronize`` find by number. Any thread may call."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._pending: dict[int, tuple[Any, Callable[[Any], Any]]] = {}
        self._lock = threading.Lock()

    def add(self, handle: Any, finish: Callable[[Any], Any]) -> int:
        """Of the engine's handle, and what makes its result whole."""
        with self._lock:
            number = next(self._numbers)
            self._pending[number] = (handle, finish)
        return number

    def look(self, number: int) -> Any:
        with self._lock:
            if number in self._pending:
                return self._pending[number][0]
        raise InvalidArgument(f"handle {number!r} is unknown, or was synchronized already")

    def wait(self, number: int) -> Any:
        handle = self.look(number)
        try:
            result = handle.wait()
        except Error:
            self._forget(number)
            raise
        return self._forget(number)(result)

    def _forget(self, number: int) -> Callable[[Any], Any]:
        with self._lock:
            return self._pending.pop(number)[1]


handles = Handles()
