"""Schedules as data, and their proofs."""

from collections.abc import Sequence
from typing import Any

def choose(
    collective: str,
    size: int,
    count: int,
    itemsize: int = 4,
    level: str = "canonical",
    lanes: int = 1,
    segments: int = 2,
    counts: Sequence[int] = [],
    leaves: Sequence[int] = [],
    host_of: Sequence[int] = [],
) -> str: ...
def goes_in_place(collective: str) -> bool: ...
def plan(
    collective: str,
    name: str,
    rank: int,
    size: int,
    count: int,
    lanes: int = 1,
    segments: int = 2,
    root: int = 0,
    counts: Sequence[int] = [],
    leaves: Sequence[int] = [],
    host_of: Sequence[int] = [],
) -> list[Any]: ...
def planners(
    size: int = 8,
    count: int = 1048576,
    lanes: int = 1,
    segments: int = 2,
    itemsize: int = 4,
    root: int = 0,
    collective: str | None = None,
    counts: Sequence[int] = [],
    leaves: Sequence[int] = [],
    host_of: Sequence[int] = [],
) -> list[Any]: ...
def prove(
    collective: str,
    name: str,
    size: int,
    count: int,
    lanes: int = 1,
    segments: int = 2,
    root: int = 0,
    in_place: bool = False,
    counts: Sequence[int] = [],
    leaves: Sequence[int] = [],
    host_of: Sequence[int] = [],
) -> tuple[str, str]: ...
def require(
    collective: str,
    name: str,
    size: int,
    count: int,
    level: str = "canonical",
    counts: Sequence[int] = [],
    leaves: Sequence[int] = [],
    host_of: Sequence[int] = [],
) -> str: ...
