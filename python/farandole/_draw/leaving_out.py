"""Selects the turns and ranks of a large schedule that are drawn, so that its idea is seen.

Only regular parts are left out: turns that go on as those before them do, and ranks that do what
their neighbours do in all turns that are drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from farandole._draw.turns import Course

MOST = 16  # turns or ranks that are drawn one by one, whatever they do
FIRST_TURNS, LAST_TURNS = 3, 1  # of turns that are alike
FIRST_RANKS, LAST_RANKS = 4, 4
LEAST = 3  # fewer are not worth a gap

Run: TypeAlias = tuple[int, int]  # the first and the last of them
Sent: TypeAlias = tuple[int, int, bool]  # from, to, folded there
Done: TypeAlias = tuple[int, bool]  # the rank; is it finished?
Turn: TypeAlias = tuple[frozenset[Sent], frozenset[Done]]
Shift: TypeAlias = tuple[int, int]  # how much further senders and receivers are in the next turn

SHIFTS: list[Shift] = sorted(
    ((s, r) for s in (0, 1, -1) for r in (0, 1, -1)), key=lambda s: abs(s[0]) + abs(s[1])
)


@dataclass(frozen=True)
class Shown:
    """The turns and ranks that are drawn, and the gaps that are left out."""

    turns: list[int]
    ranks: list[int]
    no_turns: list[Run]
    no_ranks: list[Run]
    moving: bool  # in the turns left out peers change from turn to turn
    alternating: bool  # of the ranks left out every other one does the same

    def words(self) -> list[str]:
        """Explanations of the gaps for the reader, a line for each kind."""
        lines = []
        if self.no_turns:
            how = ", each time between other ranks" if self.moving else ""
            lines.append(
                f"turns {_listed(self.no_turns)} left out: messages as in those beside them{how}"
            )
        if self.no_ranks:
            how = "in these turns they send and receive as those beside them"
            how += ", by turns" * self.alternating
            lines.append(f"ranks {_listed(self.no_ranks)} left out: {how}")
        return lines


def what_to_show(course: Course, size: int) -> Shown:
    """All of a small schedule; of a large one the parts that differ from those beside them."""
    runs = _runs_of_turns(course, size) if course.turns > MOST else []
    no_turns = [gap for run, _ in runs for gap in _gap(run, FIRST_TURNS, LAST_TURNS)]
    moving = any(shift != (0, 0) and _gap(run, FIRST_TURNS, LAST_TURNS) for run, shift in runs)
    turns = _without(range(1, course.turns + 1), no_turns)
    no_ranks, period = _ranks_alike(course, size, turns) if size > MOST else ([], 1)
    ranks = _without(range(size), no_ranks)
    return Shown(turns, ranks, no_turns, no_ranks, moving, period > 1)


def _gap(run: Run, first: int, last: int) -> list[Run]:
    """The gap in a run, if it is long enough to be worth it."""
    gap = run[0] + first, run[1] - last
    return [gap] if gap[1] - gap[0] + 1 >= LEAST else []


def _without(all_of_them: Iterable[int], gaps: Sequence[Run]) -> list[int]:
    return [i for i in all_of_them if not any(first <= i <= last for first, last in gaps)]


def _listed(gaps: Sequence[Run]) -> str:
    *others, last = [f"{first}–{last}" for first, last in gaps]  # noqa: RUF001
    return f"{', '.join(others)} and {last}" if others else last


# --- turns


def _runs_of_turns(course: Course, size: int) -> list[tuple[Run, Shift]]:
    """The turns cut into runs: from turn to turn of one, all move on by the same shift."""
    turns, runs, begin = _turns(course), [], 1
    while begin <= course.turns:
        ends = {shift: _end_of_run(turns, begin, shift, size) for shift in SHIFTS}
        shift = max(SHIFTS, key=lambda shift: ends[shift])
        runs.append(((begin, ends[shift]), shift))
        begin = ends[shift] + 1
    return runs


def _turns(course: Course) -> list[Turn]:
    """The turns by number. Events before the first turn are in none."""
    sent: list[set[Sent]] = [set() for _ in range(course.turns + 1)]
    done: list[set[Done]] = [set() for _ in range(course.turns + 1)]
    for m in course.messages:
        sent[m.turn].add((m.sender, m.receiver, m.folded))
    for e in course.events:
        done[e.turn].add((e.rank, e.finish))
    return [(frozenset(s), frozenset(d)) for s, d in zip(sent, done, strict=True)]


def _end_of_run(turns: Sequence[Turn], begin: int, shift: Shift, size: int) -> int:
    end = begin
    while end + 1 < len(turns) and turns[end + 1] == _moved(turns[end], shift, size):
        end += 1
    return end


def _moved(turn: Turn, shift: Shift, size: int) -> Turn:
    senders, receivers = shift
    return (
        frozenset(((s + senders) % size, (r + receivers) % size, f) for s, r, f in turn[0]),
        frozenset(((rank + receivers) % size, finish) for rank, finish in turn[1]),
    )


# --- ranks


def _ranks_alike(course: Course, size: int, turns: Sequence[int]) -> tuple[list[Run], int]:
    """The gaps, and how many ranks further one does the same.

    Takes the way to name a peer from a rank, and the period, that leave out most.
    """
    ways: list[Callable[[int, int], int]] = [
        lambda rank, peer: (peer - rank) % size,  # rings, and others that count from a rank itself
        lambda rank, peer: peer ^ rank,  # halves, which swap with their mirror images
    ]
    habits = [_habits(course, size, turns, way) for way in ways]
    found = [(_gaps_of_ranks(mine, period), period) for period in (1, 2) for mine in habits]
    return max(found, key=lambda gaps: sum(last - first for first, last in gaps[0]))


def _habits(
    course: Course, size: int, turns: Sequence[int], way: Callable[[int, int], int]
) -> list[Hashable]:
    """The actions of every rank in the turns, with peers named from where it stands."""
    habits: list[set[Hashable]] = [set() for _ in range(size)]
    for m in course.messages:
        if m.turn in turns:
            to, back = way(m.sender, m.receiver), way(m.receiver, m.sender)
            habits[m.sender].add((m.turn, "sends", to, m.folded))
            habits[m.receiver].add((m.turn, "receives", back, m.folded))
    for e in course.events:
        if e.turn in turns or e.turn == 0:
            habits[e.rank].add((e.turn, "finishes" if e.finish else "folds"))
    return [frozenset(mine) for mine in habits]


def _gaps_of_ranks(habits: Sequence[Hashable], period: int) -> list[Run]:
    gaps, begin = [], 0
    for rank in range(period, len(habits) + 1):
        if rank == len(habits) or habits[rank] != habits[rank - period]:
            gaps += _gap((begin, rank - 1), FIRST_RANKS, LAST_RANKS)
            begin = rank - period + 1
    return gaps
