"""Where ranks run: on this host (`Here`), or on another one behind its agent (`Remote`).

The supervisor decides what happens to a job; a place does it to its ranks and tells what became of
them. Nothing here waits: a loop polls the place's descriptors and gives it turns.
"""

from __future__ import annotations

import signal
from typing import NamedTuple, Protocol

from farandole._launch.ranks import Rendezvous, describe_exit
from farandole._launch.words import Word


class Rank:
    """One started rank, wherever it runs."""

    def __init__(self, number: int, pid: int, host: str = "") -> None:
        self.number = number
        self.pid = pid
        self.host = host  # empty where the job has one alone
        self.exit_code: int | None = None  # negative: minus the signal
        self.lost = False  # with its host: nobody knows how it ended

    @property
    def alive(self) -> bool:
        return self.exit_code is None and not self.lost

    @property
    def process(self) -> str:
        """'812', or '812 on b'."""
        return f"{self.pid} on {self.host}" if self.host else str(self.pid)

    def describe_end(self, exit_code: int | None = None) -> str:
        """'rank 2 (pid 812) was killed by SIGKILL'."""
        code = self.exit_code or 0 if exit_code is None else exit_code
        return f"rank {self.number} (pid {self.process}) {describe_exit(code)}"


class Threads(NamedTuple):
    """What each rank of a place gets, where the user has not said."""

    cores: int
    each: int


class Place(Protocol):
    """One host's ranks. All methods return at once."""

    host: str
    count: int  # of its ranks, also before they have started
    ranks: list[Rank]  # once they have started
    pipes: list[tuple[int, int]]  # their stdout and stderr, to be read, each closed by its reader
    threads: Threads | None
    address: str  # by which the other hosts reach it
    port: int  # that was free there
    ready: bool  # to start ranks
    started: bool
    finished: bool  # nothing runs there any more that ranks left behind
    dry: bool  # no more output will come into the pipes
    out_of_memory: bool  # the kernel killed there for want of it
    trouble: str  # why the place, or its start, has failed
    exit_code: int  # of the job, when the start has failed

    def open(self, deadline: float) -> None:
        """Begins to get ready, for which there is time until then."""

    def start(self, rendezvous: Rendezvous) -> None: ...

    def descriptors(self) -> list[tuple[int, int]]:
        """What to poll, and for what."""

    def due(self) -> float | None:
        """When it wants a turn at the latest."""

    def turn(self, ready: set[int], now: float) -> None: ...

    def child_ended(self) -> None:
        """SIGCHLD came."""

    def news(self) -> list[Word | Rank]:
        """What ranks have said, and which of them have ended, since the last call."""

    def remarks(self) -> list[str]:
        """What the user should know of this place, since the last call."""

    def has_orphans(self) -> bool:
        """Whether ranks that have ended may have left something running."""

    def pass_on(self, number: signal.Signals) -> None:
        """To the ranks alone: their workers may have no handler and would die of it."""

    def signal_groups(self, number: signal.Signals) -> None:
        """To the ranks and what runs in their process groups."""

    def end(self, number: signal.Signals) -> None:
        """The same, to end them: also to those that are stopped; SIGKILL to all that descends."""

    def finish(self, at_once: bool) -> None:
        """All ranks are dead: end what they left behind, after a moment if not at once."""

    def hurry(self) -> None:
        """Kill what is left now."""

    def close(self) -> None:
        """The last call; waits for processes of ours that are about to end, not for long."""
