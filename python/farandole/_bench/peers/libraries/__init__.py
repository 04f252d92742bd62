"""How each library is joined and called. A file offers ``join() -> Member``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from farandole._bench.layouts import Buffers


class Unable(Exception):
    """This library has no such collective or element type."""


class Member(NamedTuple):
    """This rank of its world."""

    rank: int
    ranks: int
    version: str
    make: Callable[[dict[str, Any]], Buffers]  # of a question; Unable says why not
    path: Callable[[], str] = lambda: ""  # what ran last
