"""The stage and the replica of each rank, and how ranks agree on a pipeline.

Rank r has stage ``r % stages`` of replica ``r // stages``: neighbours in a pipeline are neighbours
as ranks, which launchers put on one host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from farandole import _world
from farandole._arguments import is_whole, shown
from farandole._core import Group, InvalidArgument
from farandole.common._objects import agree_prepared, attempt
from farandole.common._process_set import (
    ProcessSet,
    add_process_set,
    global_process_set,
    registered_sets,
)

_T = TypeVar("_T")

ADVICE = "make the same Pipeline on every rank"


class Place(NamedTuple):
    """The position of one rank in the pipeline."""

    stages: int
    replicas: int
    stage: int
    replica: int

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    def rank_of(self, stage: int, replica: int) -> int:
        return replica * self.stages + stage

    def of_rank(self, rank: int) -> Place:
        return self._replace(stage=rank % self.stages, replica=rank // self.stages)

    def stage_ranks(self, stage: int) -> list[int]:
        """All replicas of a stage."""
        return [self.rank_of(stage, replica) for replica in range(self.replicas)]

    def failed(self, rank: int, why: str) -> str:
        """In an error: another rank could not do something."""
        return f"rank {rank} ({self.of_rank(rank)}): {why}"

    def __str__(self) -> str:
        return f"stage {self.stage} of {self.stages}" + (
            f", replica {self.replica}" if self.replicas > 1 else ""
        )


class Placed:
    """The properties of this rank's place that every pipeline has."""

    _place: Place

    @property
    def stages(self) -> int:
        """The number of stages."""
        return self._place.stages

    @property
    def stage(self) -> int:
        """This rank's stage."""
        return self._place.stage

    @property
    def replicas(self) -> int:
        """The number of copies of the whole model."""
        return self._place.replicas

    @property
    def replica(self) -> int:
        """This rank's replica."""
        return self._place.replica


def place_of(stages: Any) -> Place:
    """This rank's place. Raises InvalidArgument, NotInitialized."""
    size, rank = _world.size(), _world.rank()
    stages = size if stages is None else stages
    check_count("stages", stages)
    if size % stages:
        raise InvalidArgument(
            f"stages={stages} in a world of {size} ranks, which is no multiple of it\n"
            f"  advice: farandole run -np {stages}, or {2 * stages} for two replicas"
        )
    return Place(stages, size // stages, 0, 0).of_rank(rank)


def check_count(name: str, value: Any) -> None:
    if not is_whole(value) or isinstance(value, bool) or value < 1:
        raise InvalidArgument(f"{name} is {shown(value)}; it is a whole number of at least 1")


def check_root(root: Any) -> None:
    if root is not None and not (is_whole(root) and 0 <= root < _world.size()):
        raise InvalidArgument(
            f"root_rank is {shown(root)}; it is a rank, from 0 to {_world.size() - 1}, or None"
        )


def norms_of_stages(mine: float, group: Group, place: Place) -> np.ndarray[Any, Any]:
    """Collective: what each stage of this replica has of a norm."""
    theirs = np.empty(group.size)
    group.run("all_gather", np.array([mine]), theirs, name="norms of the stages")
    begin = place.rank_of(0, place.replica)
    return theirs[begin : begin + place.stages]


def prepared(prepare: Callable[[], _T], rows_of: Callable[[_T], Sequence[str]]) -> _T:
    """Collective: what every rank prepares, if all ranks can, and in the same way.

    Args:
        rows_of: what ranks compare, in words.

    Raises:
        InvalidArgument: a rank could not; on every rank, naming it.
        Mismatch: the rows differ; on every rank.
    """

    def with_rows() -> tuple[_T, list[str]]:
        made = prepare()
        return made, list(rows_of(made))

    made, error = attempt(with_rows)
    rows = [] if made is None else made[1]
    agree_prepared("a Pipeline", "the Pipeline", rows, error, ADVICE, None)
    assert made is not None
    return made[0]


class Groups(NamedTuple):
    """The groups in which this rank communicates."""

    everyone: Group  # of this pipeline alone, so that its messages meet no others
    replicas: ProcessSet | None  # ranks with the same stage; None: this one alone


def groups_of(place: Place) -> Groups:
    """Collective."""
    everyone = _world.split(0)
    assert everyone is not None
    if place.replicas == 1:
        return Groups(everyone, None)
    sets = [_set_of(place.stage_ranks(stage)) for stage in range(place.stages)]
    return Groups(everyone, sets[place.stage])


def _set_of(ranks: list[int]) -> ProcessSet:
    """The set of these ranks: a registered one, also by the program, or else a new one."""
    if ranks == list(range(_world.size())):
        return global_process_set
    known = (each for each in registered_sets() if each.ranks == ranks)
    return next(known, None) or add_process_set(ranks)
