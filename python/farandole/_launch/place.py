"""Where ranks run: on this host (here.py), or on another one behind its agent (agents/remote.py).

The supervisor decides what happens to a job; a place does it to its ranks and tells what became of
them. Nothing here waits: a loop polls the place's descriptors and gives it turns.
"""

from __future__ import annotations

import signal
import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from farandole._launch.agents.address import is_ours, of_interfaces
from farandole._launch.ranks import Rendezvous, describe_exit, new_run_id
from farandole._launch.words import Word
from farandole._live.pages import Status


class Rank:
    """One started rank, wherever it runs."""

    kind = "rank"  # in an elastic job: a worker, whose ranks in its worlds are others

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
        return f"{self.kind} {self.number} (pid {self.process}) {describe_exit(code)}"


class NotStarted(NamedTuple):
    """A rank that could not be started; a remark says why."""

    number: int


Pipes = tuple[int, int]  # a rank's stdout and stderr, to read


class Threads(NamedTuple):
    """The threads of each rank of a place, where the user has not set them."""

    cores: int
    each: int


class Place(ABC):
    """One host's ranks. All methods return at once."""

    is_here = False  # on the launcher's own host, as its descendants

    def __init__(self, counts: Sequence[int], index: int, host: str) -> None:
        """`counts`: the ranks of each host; `index`: of this host among them."""
        self.host = host  # empty where the job has one alone
        self.count = counts[index]
        self.first = sum(counts[:index])  # its lowest rank
        self.ranks: list[Rank] = []  # that have started
        self.threads: Threads | None = None
        self.address = ""  # by which other hosts reach it; empty: it is the launcher's own host
        self.launchers_address = ""  # as this host sees the launcher's, if it does
        self.port = 0  # that was free there
        self.ready = False  # to start ranks
        self.prepared = False  # in an elastic job: it was told of the job
        self.started = False
        self.finished = False  # nothing runs there any more that ranks left behind
        self.dry = False  # no more output will come into the pipes
        self.trouble = ""  # why the place, or its start, has failed
        self.exit_code = 1  # of the job, when the start has failed
        self._started: list[tuple[Rank, Pipes]] = []
        self._news: list[Word | Rank | NotStarted] = []
        self._remarks: list[str] = []

    def new_ranks(self) -> list[tuple[Rank, Pipes]]:
        """The ranks that have started since the last call. The caller closes their pipes."""
        new, self._started = self._started, []
        return new

    def _take_up(self, rank: Rank, pipes: Pipes) -> None:
        self.ranks.append(rank)
        self._started.append((rank, pipes))

    def news(self) -> list[Word | Rank | NotStarted]:
        """Messages, ends and failed starts of ranks since the last call."""
        news, self._news = self._news, []
        return news

    def remarks(self) -> list[str]:
        """Remarks about this place for the user, since the last call."""
        remarks, self._remarks = self._remarks, []
        return remarks

    @property
    @abstractmethod
    def out_of_memory(self) -> bool:
        """Whether the kernel has killed a process there for want of memory."""

    @abstractmethod
    def statuses(self) -> Sequence[Status]:
        """The counters of its ranks, as far as they show any."""

    @abstractmethod
    def open(self, timeout: float) -> None:
        """Begins to get ready, for which it has `timeout` seconds."""

    @abstractmethod
    def start(self, rendezvous: Rendezvous) -> None:
        """Starts the ranks."""

    @abstractmethod
    def prepare(self, run_id: str) -> None:
        """Like start(), but without ranks: those of an elastic job come one by one."""

    @abstractmethod
    def add(self, number: int, own: Mapping[str, str]) -> None:
        """Starts one more, with these variables of its own."""

    @abstractmethod
    def kill(self, number: int) -> None:
        """Kills one rank, and what runs in its process group."""

    @abstractmethod
    def say(self, pid: int, words: str) -> None:
        """Sends a message to a worker of an elastic job."""

    @abstractmethod
    def descriptors(self) -> list[tuple[int, int]]:
        """The descriptors to poll, each with its events."""

    @abstractmethod
    def due(self) -> float | None:
        """When it wants a turn at the latest."""

    @abstractmethod
    def turn(self, ready: set[int], now: float) -> None:
        """Does what can be done now. `ready`: the descriptors that are ready."""

    @abstractmethod
    def child_ended(self) -> None:
        """SIGCHLD came."""

    @abstractmethod
    def has_orphans(self) -> bool:
        """Whether ranks that have ended may have left something running."""

    @abstractmethod
    def pass_on(self, number: signal.Signals) -> None:
        """Signals the ranks alone: their workers may have no handler and would die of it."""

    @abstractmethod
    def signal_groups(self, number: signal.Signals) -> None:
        """Signals the ranks and what runs in their process groups."""

    @abstractmethod
    def tell_death(self, dead: Rank) -> None:
        """Notifies the ranks here of a death, maybe elsewhere: peers see only that it is gone."""

    @abstractmethod
    def end(self, number: signal.Signals) -> None:
        """Ends the ranks, stopped ones too. SIGKILL goes to all descendants; SIGTERM and its like
        only to processes that no handler of a rank answers for."""

    @abstractmethod
    def finish(self, at_once: bool) -> None:
        """All ranks are dead: end what they left behind, after a moment if not at once."""

    @abstractmethod
    def hurry(self) -> None:
        """Kill what is left now."""

    @abstractmethod
    def leave(self) -> None:
        """Nothing will be asked of it any more."""

    @abstractmethod
    def close(self, deadline: float) -> None:
        """The last call, which may wait until then for processes of ours to end."""


def where_to_meet(places: Sequence[Place], interface: str) -> Rendezvous:
    """Where the ranks of a job meet: at an address of the first host, by which the others reach it.
    `interface`: where this host's address is to be, if that is asked for.

    A place whose address is not known is on this host; what the others see of it is surest.
    """
    first = places[0]
    seen = (place.launchers_address for place in places)
    address = (
        first.address
        or next((one for one in seen if one and is_ours(one)), "")
        or of_interfaces(interface)
        or socket.gethostname()
    )
    return Rendezvous(address, first.port, new_run_id())
