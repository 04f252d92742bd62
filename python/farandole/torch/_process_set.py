"""Sets of ranks. There is one so far: all of them."""

from __future__ import annotations

from typing import Any

from farandole import _world
from farandole._core import InvalidArgument


class ProcessSet:
    """Some of the ranks; only ``global_process_set`` (all) is supported yet."""

    process_set_id = 0

    def __init__(self, ranks_or_comm: Any) -> None:
        raise InvalidArgument(
            f"ProcessSet({ranks_or_comm!r}): a set of some of the ranks is not supported yet; "
            "farandole.split() makes groups for arrays"
        )

    @property
    def ranks(self) -> list[int]:
        return list(range(_world.size()))

    def size(self) -> int:
        return _world.size()

    def rank(self) -> int:
        return _world.rank()

    def included(self) -> bool:
        return True

    def __repr__(self) -> str:
        return "global_process_set"


global_process_set = ProcessSet.__new__(ProcessSet)


def check_process_set(process_set: object) -> None:
    if process_set is not global_process_set:
        raise InvalidArgument(
            f"process_set={process_set!r} is not supported yet; leave it at global_process_set"
        )
