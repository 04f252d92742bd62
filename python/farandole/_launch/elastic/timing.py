"""When an elastic job's next world is due, and how long workers wait for others."""

from __future__ import annotations

from typing import NamedTuple

from farandole._launch.elastic.roster import Roster, Worker
from farandole._launch.job import Elastic
from farandole._launch.polling import earliest

_GATHERING = 5.0  # seconds that workers wait for others that are on their way, and not needed


class Change(NamedTuple):
    """Why the ranks of a world that goes on shall leave it."""

    world: int
    leaving: int  # workers, whose hosts are none of the job's any more
    newcomers: int


class Timing:
    """Derives times from the roster, and remembers what ranks were told."""

    def __init__(self, roster: Roster, terms: Elastic, began: float) -> None:
        self._roster, self._terms, self._began = roster, terms, began
        self._told: Change | None = None

    def due(self, then: float) -> float | None:
        """The next time to look. What was due `then` was done, or could not be: without news it
        will not be possible."""
        times = (self.first_world(), self._newcomers(), self.end_of_wait())
        return earliest(time for time in times if time is not None and time > then)

    def first_world(self) -> float | None:
        """When the first world no longer waits for workers that it does not need."""
        roster = self._roster
        if roster.world or not roster.seeking or not roster.is_anybody_on_the_way:
            return None
        return _since(roster.seeking) + _GATHERING

    def end_of_wait(self) -> float | None:
        """The deadline for the workers that the next world needs."""
        roster = self._roster
        if roster.is_world_over or (not roster.members and roster.seeking):
            return _since(roster.seeking) + self._terms.timeout
        return self._began + self._terms.timeout if roster.world == 0 else None

    def change(self, now: float) -> Change | None:
        """The change to report to the present world's ranks now. Newcomers are reported together:
        when nobody else is on the way, or they have waited for long."""
        roster = self._roster
        if roster.is_world_over or roster.finished or not roster.members:
            return None
        due = self._newcomers()
        newcomers = len(roster.newcomers) if due is not None and due <= now else 0
        leaving = len(roster.leaving)
        if len(roster.members) - leaving >= self._terms.most:
            newcomers = 0
        found = Change(roster.world, leaving, newcomers)
        if found == self._told or not leaving + newcomers:
            return None
        self._told = found
        return found

    def _newcomers(self) -> float | None:
        """When ranks are told of newcomers; None if there are none, or ranks know of them."""
        roster, told = self._roster, self._told
        if not roster.newcomers or roster.is_world_over:
            return None
        if told is not None and told.world == roster.world and told.newcomers:
            return None
        since = _since(roster.newcomers)
        return since + _GATHERING if roster.is_anybody_on_the_way else since


def _since(workers: list[Worker]) -> float:
    """When the first of them began to wait."""
    return min(worker.since for worker in workers)
