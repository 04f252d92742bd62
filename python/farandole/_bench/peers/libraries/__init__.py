"""How each library is joined and called. A file offers ``join() -> Member``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol


class Unable(Exception):
    """This library has no such collective or element type."""


class Case(Protocol):
    """One collective on buffers of one size, on this rank."""

    call: Callable[[], Any]
    bytes: int

    def prepare(self, turn: int) -> None: ...

    def clear(self) -> None: ...

    def count_wrong(self, turn: int) -> int: ...


class Member(NamedTuple):
    """This rank of its world."""

    rank: int
    ranks: int
    version: str
    make: Callable[[dict[str, Any]], Case]  # of a question; Unable says why not
    path: Callable[[], str] = lambda: ""  # what ran last
