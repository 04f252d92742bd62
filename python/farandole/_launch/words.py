"""Messages between ranks and launcher, and the rank to blame by what they say.

A rank reports its end, and the rank that caused it, before its peers can notice (_endings.py). So
the cause is known from the reports, in whatever order processes end. Ranks without farandole report
nothing: among them the first to end is to blame.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from farandole import _datagrams
from farandole._datagrams import PARTS
from farandole._words import printable

if TYPE_CHECKING:
    from farandole._launch.place import Rank

_LARGEST = 4096


class Word(NamedTuple):
    rank: int
    pid: int
    parts: list[str]  # its kind, and what that needs


class Ear:
    """A socket that ranks find by their job's run id (csrc/control/launcher.cpp)."""

    def __init__(self, run_id: str) -> None:
        self._ear = _datagrams.Ear(f"farandole-launcher-{run_id}", _LARGEST)

    def fileno(self) -> int:
        return self._ear.fileno()

    def words(self) -> Iterator[Word]:
        """All that were said until now, by processes of this user."""
        for data in self._ear.words():
            if (word := _parsed(data)) is not None:
                yield word


def _parsed(data: bytes) -> Word | None:
    rank, _, rest = data.decode(errors="backslashreplace").partition(PARTS)
    pid, _, said = rest.partition(PARTS)
    if not (rank.isdecimal() and pid.isdecimal()):
        return None
    parts = said.split(PARTS)
    return Word(int(rank), int(pid), [printable(part) for part in parts])


def tell_death(run_id: str, pids: Iterable[int], dead: Rank) -> None:
    """Reports a death to these processes of this host. Those with peers on other hosts listen."""
    word = PARTS.join(map(str, ("death", dead.number, dead.pid, dead.exit_code)))
    for pid in pids:
        _datagrams.say(f"farandole-rank-{run_id}-{pid}", word.encode())


class Meetings:
    """The ranks that wait in init(), and the ranks that each waits for."""

    def __init__(self) -> None:
        self._awaited: dict[int, set[int]] = {}  # by rank that waits

    def hear(self, word: Word) -> None:
        match word.parts:
            case ["meet", ranks]:
                self._awaited[word.rank] = {int(r) for r in ranks.split(",") if r.isdecimal()}
            case ["met"]:
                self._awaited.pop(word.rank, None)

    def waiting_for(self, rank: int) -> list[int]:
        """The ranks that wait for `rank`. None if it came itself, perhaps by a child process."""
        if rank in self._awaited:
            return []
        return sorted(who for who, awaited in self._awaited.items() if rank in awaited)


class End(NamedTuple):
    """A rank's report of its own end."""

    code: int
    blamed: int  # the process that brought it about; 0: itself, or no single one
    what: str  # 'ValueError: text', or empty
    place: str = ""  # 'file, line 5'

    @property
    def cause(self) -> str:
        return f"{self.what} ({self.place})" if self.place else self.what


class Guilt(NamedTuple):
    """The ranks to blame, and the failed rank to quote: one that blames them if they said nothing.
    It may be one of them."""

    ranks: list[int]
    quoted: int


class Blame:
    """Finds the failed rank that is the cause. `host_of`: the number of a rank's host."""

    def __init__(self, host_of: Callable[[int], int] = lambda _: 0) -> None:
        self._host_of = host_of
        self._ranks: dict[int, list[int]] = {}  # by process, whose number is its host's own
        self._ends: dict[int, End] = {}  # by rank
        self._order: list[int] = []  # of ranks: as they said that they end, or died unsaid

    def hear(self, word: Word) -> None:
        ranks = self._ranks.setdefault(word.pid, [])
        if word.rank not in ranks:
            ranks.append(word.rank)
        match word.parts:
            case ["end", code, blamed, *said] if code.isdecimal() and blamed.isdecimal():
                self._ends.setdefault(word.rank, End(int(code), int(blamed), *said[:2]))
                self.note_death(word.rank)
            case ["meet", *_] if word.rank in self._ends:  # it left a world, and goes on
                del self._ends[word.rank]
                self._order.remove(word.rank)

    def note_death(self, rank: int) -> None:
        if rank not in self._order:
            self._order.append(rank)

    def end_of(self, rank: int) -> End | None:
        return self._ends.get(rank)

    def guilt(self, failed: Container[int]) -> Guilt:
        """The cause among `failed`, which is not empty; or a rank that has not failed, but left too
        early or did not go on. Ranks that failed alike and blame no other share the guilt,
        and so do ranks that blame each other."""
        ranks = [rank for rank in self._order if rank in failed]
        chain = [ranks[0]]
        while (blamed := self._blamed_by(chain[-1])) is not None:
            if blamed in chain:  # hosts that lost sight of each other, say
                circle = chain[chain.index(blamed) :]
                return Guilt(sorted(circle), blamed)
            chain.append(blamed)
        found = chain[-1]
        end = self._ends.get(found)
        if end is None or found not in failed:
            accusers = (rank for rank in ranks if self._blamed_by(rank) == found)
            return Guilt([found], next(accusers, found))
        alike = [r for r in ranks if (said := self._ends.get(r)) and said.what == end.what]
        shared = sorted(r for r in alike if self._blamed_by(r) is None)
        return Guilt(shared if end.what else [found], found)

    def _blamed_by(self, rank: int) -> int | None:
        """The other rank that `rank` said has brought its end about."""
        end = self._ends.get(rank)
        return None if end is None else self._rank_of(end.blamed, rank)

    def _rank_of(self, pid: int, near: int) -> int | None:
        """The rank of process `pid`; if several hosts have that pid, on the host of rank `near`."""
        ranks = self._ranks.get(pid, [])
        there = [rank for rank in ranks if self._host_of(rank) == self._host_of(near)]
        found = there or (ranks if len(ranks) == 1 else [])
        return found[-1] if found else None
