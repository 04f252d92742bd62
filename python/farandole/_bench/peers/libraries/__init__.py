"""How each library is joined and called. A file offers ``join() -> Member``."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from farandole import _place
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


def launched() -> tuple[int, int]:
    """This process's rank and their number, by whatever launcher has started it."""
    place = _place.find(os.environ)
    assert place.rank is not None
    assert place.size is not None
    return place.rank, place.size
