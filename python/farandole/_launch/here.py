"""The ranks of this host: processes of our own, watched and signalled directly."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType

from farandole import _datagrams
from farandole._launch.binding import shares
from farandole._launch.leftovers import Leftovers, left_behind
from farandole._launch.place import Place, Rank, Threads
from farandole._launch.polling import READ
from farandole._launch.processes import addressees, descendants, oom_kills, reap, send
from farandole._launch.ranks import (
    Rendezvous,
    free_port,
    rank_environment,
    shared_environment,
    start_rank,
    threads_per_rank,
)
from farandole._launch.words import Ear, tell_death
from farandole._live.pages import Pages, Status

_TRACES = ("_TRACE", "_TIMELINE")  # ends of the variables that ask for one


class Here(Place):
    """Ranks that are children of this process.

    A rank stays unreaped until the job ends, so that its process group's number cannot be taken by
    anybody else while we may still signal it.
    """

    is_here = True

    def __init__(
        self,
        command: Sequence[str],
        counts: Sequence[int],
        inherited: Mapping[str, str],
        *,
        added: Mapping[str, str] = MappingProxyType({}),
        index: int = 0,
        host: str = "",
        address: str = "127.0.0.1",
        binding: str = "none",
    ) -> None:
        """`added`: variables of this job alone; `address`: of this host, for the others; `binding`:
        one of BINDINGS."""
        super().__init__(counts, index, host)
        self.ready = self.dry = True
        self.address, self.port = address, free_port("" if host else address)
        if self.count > 1 and not inherited.get("OMP_NUM_THREADS"):
            each = threads_per_rank(self.count)
            self.threads = Threads(len(os.sched_getaffinity(0)), each)
        self._command = command
        self._counts = counts
        self._cpus = shares(binding, self.count)  # of each local rank
        self._environment = {**shared_environment(self.count, inherited), **added}
        self._counted = False  # ranks of a number that is fixed have started
        self._oom_kills = oom_kills()
        self._ear: Ear | None = None
        self._pages: Pages | None = None
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._leftovers: Leftovers | None = None

    # -- start --------------------------------------------------------------------------------

    def open(self, timeout: float) -> None:
        """There is nothing to get ready."""

    def start(self, rendezvous: Rendezvous) -> None:
        self._counted = True
        self._environment |= rendezvous.environment()
        self.prepare(rendezvous.run_id)
        for number in range(self.first, self.first + self.count):
            self.add(number, rank_environment(number, self._counts))

    def prepare(self, run_id: str) -> None:
        self._environment["FARANDOLE_RUN_ID"] = run_id
        self._ear = _open_ear(run_id)
        # A rank may be a shell's child.
        self._pages = Pages(lambda: [one.pid for one in descendants(os.getpid())], run_id)
        self.started = True

    def add(self, number: int, own: Mapping[str, str]) -> None:
        cpus = self._cpus[number - self.first] if self._cpus else ()
        environment = {**self._environment, **own}
        rank = start_rank(f"rank {number}", self._command, environment, cpus=cpus)
        self._processes[number] = rank.process
        self._take_up(Rank(number, rank.process.pid, self.host), (rank.out, rank.err))

    # -- turns --------------------------------------------------------------------------------

    def descriptors(self) -> list[tuple[int, int]]:
        return [(self._ear.fileno(), READ)] if self._ear else []

    def due(self) -> float | None:
        return self._leftovers.due() if self._leftovers else None

    def turn(self, ready: set[int], now: float) -> None:  # noqa: ARG002 - the ear is cheap to ask
        self._listen()
        if self._leftovers is None or self.finished:
            return
        self._leftovers.turn(now)
        if self._leftovers.over:
            self._remarks += self._leftovers.remarks
            self._put_traces_together()
            self.finished = True

    def statuses(self) -> list[Status]:
        living = sum(rank.alive for rank in self.ranks)
        if self._pages is not None and living:
            with suppress(OSError):  # no descriptor is left for a look at /proc
                return self._pages.read(living)
        return []

    def child_ended(self) -> None:
        died = [rank for rank in self.ranks if rank.alive and self._has_ended(rank)]
        self._listen()  # what they said before
        if not died:
            mine = {rank.pid for rank in self.ranks}
            reap(process for process in descendants(os.getpid()) if process.pid not in mine)
        # Among deaths seen together, a killed rank is more likely the cause than one that exited.
        died.sort(key=lambda rank: rank.exit_code or 0)
        self._news += died

    def has_orphans(self) -> bool:
        """Whether ranks that have ended have left something running."""
        of_living = {p.pid for rank in self.ranks if rank.alive for p in descendants(rank.pid)}
        return any(process.pid not in of_living for process in left_behind(self._pids()))

    @property
    def out_of_memory(self) -> bool:
        return oom_kills() > self._oom_kills

    def _listen(self) -> None:
        if self._ear is not None:
            self._news += self._ear.words()

    def _has_ended(self, rank: Rank) -> bool:
        """Leaves it a zombie."""
        ended = os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return False
        exited = ended.si_code == os.CLD_EXITED
        rank.exit_code = ended.si_status if exited else -ended.si_status
        return True

    def _pids(self) -> set[int]:
        return {rank.pid for rank in self.ranks}

    # -- bringing ranks down ------------------------------------------------------------------

    def pass_on(self, number: signal.Signals) -> None:
        for rank in self.ranks:
            if rank.alive:
                os.kill(rank.pid, number)

    def signal_groups(self, number: signal.Signals) -> None:
        for rank in self.ranks:
            if rank.alive:
                with suppress(ProcessLookupError, PermissionError):  # all ended; setuid
                    os.killpg(rank.pid, number)

    def kill(self, number: int) -> None:
        for rank in self.ranks:
            if rank.number == number and rank.alive:
                os.killpg(rank.pid, signal.SIGKILL)

    def say(self, pid: int, words: str) -> None:
        name = _datagrams.worker_name(self._environment["FARANDOLE_RUN_ID"], pid)
        _datagrams.say(name, words.encode())

    def tell_death(self, dead: Rank) -> None:
        living = [rank.pid for rank in self.ranks if rank.alive]
        tell_death(self._environment["FARANDOLE_RUN_ID"], living, dead)

    def end(self, number: signal.Signals) -> None:
        if number in (signal.SIGKILL, signal.SIGINT):  # a terminal sends the latter to all, too
            self.signal_groups(number)
        else:
            for rank in self.ranks:
                if rank.alive:
                    for process in addressees(rank.pid, number):
                        send(process, number)
        if number == signal.SIGKILL:
            for process in descendants(os.getpid()):
                send(process, signal.SIGKILL)
        else:
            self.signal_groups(signal.SIGCONT)  # a stopped rank could not act on it

    def finish(self, at_once: bool) -> None:
        self._leftovers = Leftovers(self._pids(), self.host, at_once)

    def hurry(self) -> None:
        if self._leftovers is not None:
            self._leftovers.hurry()

    def leave(self) -> None:
        """There is nobody to leave."""

    def close(self, deadline: float) -> None:  # noqa: ARG002 - all of them are dead
        for rank in self.ranks:
            if not rank.alive:
                self._processes[rank.number].wait()

    def parcels(self, since: float) -> Iterator[bytes]:
        """The trace files written `since` (time.time), as frames for the launcher."""
        from farandole._launch.agents import parcels

        if not self._counted:
            return iter(())
        return parcels.packed(self._environment, range(self.first, self.first + self.count), since)

    def _put_traces_together(self) -> None:
        """Merges traces once no rank is left to. Places that share a folder may do it at once."""
        if not any(name.endswith(_TRACES) for name in self._environment):
            return
        from farandole._trace import TraceError, salvage

        try:
            salvage(self._environment, keep_parts=bool(self.host))
        except TraceError as error:
            self._remarks.append(f"the trace is not complete: {error}")


def _open_ear(run_id: str) -> Ear | None:
    """None where another place of this job, on this machine, listens: it hears our ranks, too."""
    try:
        return Ear(run_id)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return None
