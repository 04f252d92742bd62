"""Why a job ends: the ranks that failed, in which order, and the job's last lines."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from farandole._launch.place import Place, Rank
from farandole._launch.ranks import describe_exit, shell_code
from farandole._launch.words import Blame, Guilt, Meetings, Word
from farandole._tables import listed

# How long ranks may wait in init() for one that has ended well.
_PATIENCE = 3.0
_OVERDUE = 124  # an exit code, as of coreutils' timeout


class Missed(NamedTuple):
    rank: Rank
    waiting: list[int]


class Absences:
    """Ranks that have ended well, and since when others wait for each in init(): for ever, if
    nobody looked."""

    def __init__(self) -> None:
        self._meetings = Meetings()
        self._since: dict[int, float] = {}

    def hear(self, word: Word) -> None:
        self._meetings.hear(word)

    def forget(self) -> None:
        self._since.clear()

    def dues(self) -> list[float]:
        return [since + _PATIENCE for since in self._since.values()]

    def look(self, places: Sequence[Place], now: float) -> Missed | None:
        """The first that will not come any more."""
        for place in places:
            for rank in place.ranks:
                waiting = [] if rank.alive else self._meetings.waiting_for(rank.number)
                if not waiting:
                    self._since.pop(rank.number, None)
                elif now < self._since.setdefault(rank.number, now) + _PATIENCE:
                    continue
                elif place.has_orphans():  # one may be the rank's program
                    self._since[rank.number] = now
                else:
                    return Missed(rank, waiting)
        return None


class Verdict:
    """The last lines, and the job's exit code."""

    def __init__(self, code: int, *lines: str) -> None:
        self.code = code
        self.lines = [line for line in lines if line]


class Causes:
    """Takes notes of deaths, losses and signals while the job runs."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = places
        self._blame = Blame(self._host_of)
        self._failed: list[Rank] = []  # in the order of their deaths
        self._lost: list[Place] = []
        self._first_loss: Place | None = None  # where all began with it
        self._ended_by: dict[int, signal.Signals] = {}  # by us: rank -> last signal sent
        self.missed: Missed | None = None
        self.stopped_by: signal.Signals | None = None  # the first stopping signal we got
        self.is_overdue = False  # --timeout is over, and we end the job
        self.given_up = False  # a rank could not be ended
        self._why_not: Verdict | None = None  # an elastic job cannot go on
        self._dispensable: set[int] = set()  # ranks that said that others go on without them

    @property
    def any(self) -> bool:
        failed = self._failed or self._first_loss or self.missed or self._why_not
        return bool(failed or self.stopped_by)

    # -- notes --------------------------------------------------------------------------------

    def hear(self, word: Word) -> None:
        if word.parts == ["dispensable"]:
            self._dispensable.add(word.rank)
        elif word.parts == ["needed"]:
            self._dispensable.discard(word.rank)
        elif word.rank not in self._ended_by:  # else it is we who end it
            self._blame.hear(word)

    def is_dispensable(self, rank: Rank) -> bool:
        """Whether the job goes on if `rank` dies by itself: a worker of a parameter server."""
        return rank.number in self._dispensable and rank.number not in self._ended_by

    def note_death(self, rank: Rank) -> None:
        if rank.exit_code:
            self._blame.note_death(rank.number)
            self._failed.append(rank)

    def note_loss(self, place: Place) -> None:
        if not self.any:
            self._first_loss = place
        self._lost.append(place)

    def give_up(self, code: int, why: str) -> None:
        """An elastic job ends, whatever its workers do."""
        self._why_not = Verdict(code, why)

    def is_noted(self, place: Place) -> bool:
        return place in self._lost

    def note_end(self, rank: Rank, number: signal.Signals) -> None:
        """We are about to end it."""
        self._ended_by[rank.number] = number

    def signals_sent(self, ranks: Sequence[int]) -> list[signal.Signals]:
        return sorted({self._ended_by[rank] for rank in ranks if rank in self._ended_by})

    # -- the verdict --------------------------------------------------------------------------

    def failed_by_themselves(self) -> dict[int, Rank]:
        """The ranks that failed without being ended by us, by number."""
        return {
            rank.number: rank
            for rank in self._failed
            if rank.number not in self._ended_by or self._blame.end_of(rank.number)
        }

    def verdict(self) -> Verdict:
        if self._why_not is not None:
            return self._why_not
        if self.missed is not None:
            rank, waiting = self.missed
            what = f"{listed('rank', waiting)} waited for it in init()"
            return Verdict(1, f"{rank.describe_end()}, and {what}")
        if self._first_loss is not None:
            return Verdict(1, self._others_than([]), self._first_loss.trouble)
        if own := self.failed_by_themselves():
            return self._blaming(self._blame.guilt(own))
        if self.is_overdue:
            return Verdict(_OVERDUE, "the job was ended, as the time of --timeout is over")
        if self.stopped_by is not None and self._has_ended_early():
            return Verdict(128 + self.stopped_by, f"the job was ended by {self.stopped_by.name}")
        return Verdict(0)

    def _blaming(self, guilt: Guilt) -> Verdict:
        by_number = {rank.number: rank for rank in self._ranks()}
        first, quoted = by_number[guilt.ranks[0]], by_number[guilt.quoted]
        code, how = self._end_of(quoted)
        said = self._blame.end_of(quoted.number)
        if said and len(guilt.ranks) > 1:
            how = f"{listed(first.kind, guilt.ranks)} ended with {said.cause}"
        elif said and first is not quoted:
            code = first.exit_code or code if first.number not in self._ended_by else code
            how = self._standing(first)
            if code >= 0:  # else the signal says it all
                how += f"; {quoted.kind} {quoted.number} ended with {said.cause}"
        place = self._places[self._host_of(first.number)]
        if code == -signal.SIGKILL and place.out_of_memory:
            how += " (out of memory: oom_kill rose)"
        return Verdict(shell_code(code), self._others_than([*guilt.ranks, quoted.number]), how)

    def _standing(self, rank: Rank) -> str:
        """Describes the end of a rank that did not fail by itself."""
        if rank.number not in self._ended_by:
            return rank.describe_end()
        return f"{rank.kind} {rank.number} (pid {rank.process}) did not go on"

    def _has_ended_early(self) -> bool:
        started = any(self._ranks()) and all(place.started for place in self._places)
        return bool(self._failed or self._lost or self.given_up or not started)

    def _end_of(self, rank: Rank) -> tuple[int, str]:
        """Its exit code, or the one it was about to have when we ended it; and what happened."""
        code = rank.exit_code or 0
        said = self._blame.end_of(rank.number)
        if said is None:
            return code, rank.describe_end()
        if rank.number in self._ended_by:
            code = said.code
        cause = f": {said.cause}" if said.cause and code == said.code else ""
        return code, rank.describe_end(code) + cause

    def _others_than(self, named: Sequence[int]) -> str:
        """One line for all other ranks that failed, grouped by how. Ranks of former worlds of an
        elastic job were reported when they failed."""
        groups: dict[str, list[int]] = {}
        kind = "rank"
        for rank in self._ranks():
            kind = rank.kind
            if rank.number not in named and rank in self._failed and rank.exit_code:
                how = describe_exit(rank.exit_code)
                if (sent := self._ended_by.get(rank.number)) and rank.exit_code == -sent:
                    how = f"ended with {sent.name}"
                groups.setdefault(how, []).append(rank.number)
        parts = [f"{listed(kind, who)} {how}" for how, who in groups.items()]
        return f"{'; '.join(parts)}; but first:" if parts else ""

    def _ranks(self) -> Iterator[Rank]:
        for place in self._places:
            yield from place.ranks

    def _host_of(self, number: int) -> int:
        """The index of the rank's host; -1 if there is no such rank."""
        for i, place in enumerate(self._places):
            if any(rank.number == number for rank in place.ranks):
                return i
        return -1
