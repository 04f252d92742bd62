"""The launcher's loop: one poll over output, signals and the watchdog's lifeline; no thread.

A job ends in phases. While it *runs*, the first failure or a stopping signal makes an escalation: a
list of (time, signal) that ends with SIGKILL. When the last rank is dead, what ranks left behind (a
daemon, a worker) gets a moment to leave by itself, then its own short escalation. Then the output
that is left is shown, and last the verdict.
"""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import suppress

from farandole._launch.job import Copies, Job, LaunchError
from farandole._launch.output import Stream
from farandole._launch.processes import Process, descendants, describe, oom_kills, reap, send
from farandole._launch.ranks import (
    Rank,
    describe_exit,
    shared_environment,
    shell_code,
    start_rank,
    threads_per_rank,
)
from farandole._launch.screen import open_screens
from farandole._launch.words import Blame, Ear, Meetings
from farandole._tables import listed

# A stopping signal and the harsher ones that follow it, `patience` apart.
STOPPING = {
    signal.SIGINT: (signal.SIGTERM, signal.SIGKILL),
    signal.SIGTERM: (signal.SIGKILL,),
    signal.SIGHUP: (signal.SIGTERM, signal.SIGKILL),
    signal.SIGQUIT: (signal.SIGKILL,),
}
FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)

# What is left when all ranks are dead: time to leave alone, then from SIGTERM to SIGKILL, then
# until we give up. multiprocessing's helpers leave alone within milliseconds.
_LEAVE_ALONE, _LEAVE_TERM, _LEAVE_KILL = 0.5, 1.0, 3.0
_LOOK_AGAIN = 0.02

# How long ranks may wait in init() for one that has ended well.
_ABSENCE = 3.0

# One colour per rank, in turn; red is left to errors.
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92)


class Supervisor:
    """Watches the ranks of one job from start to end."""

    def __init__(self, job: Job, lifeline: int, signals: list[signal.Signals]) -> None:
        self._job = job
        self._lifeline = lifeline
        self._out, self._err = open_screens()
        self._ranks: list[Rank] = []
        self._streams: list[Stream] = []
        self._failed: list[Rank] = []  # in the order of their deaths
        self._plan: list[tuple[float, signal.Signals | None]] = []  # what is left; None: give up
        self._given_up = False
        self._stopped_by: signal.Signals | None = None  # the first stopping signal we got
        self._stops = 0  # how many we got
        self._ended_by: dict[int, signal.Signals] = {}  # by us: rank -> last signal sent
        self._oom_kills = oom_kills()
        self._environment = shared_environment(job.ranks, {**os.environ, **job.environment})
        self._ear = Ear(self._environment["FARANDOLE_RUN_ID"])
        self._blame = Blame()
        self._meetings = Meetings()
        self._absent: dict[int, float] = {}  # ranks that ended, and are waited for: since when
        self._missed: tuple[Rank, list[int]] | None = None  # who ended, and who waits: for ever
        self._signals, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        for number in (*signals, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)  # the wake-up descriptor carries the number

    def run(self) -> int:
        """The whole job; returns its exit code."""
        self._start()
        while any(rank.alive for rank in self._ranks) and not self._given_up:
            self._turn(self._next_deadline())
            self._look_for_absent()
            self._escalate()
        self._end_what_is_left()
        self._show_the_rest()
        self._put_traces_together()
        code = self._verdict()
        self._drain_screens()
        for rank in self._ranks:
            if not rank.alive:
                rank.process.wait()
        return code

    # -- start --------------------------------------------------------------------------------

    def _start(self) -> None:
        job = self._job
        inherited = {**os.environ, **job.environment}
        if job.ranks > 1 and not inherited.get("OMP_NUM_THREADS"):
            cores = len(os.sched_getaffinity(0))
            self._say(
                f"OMP_NUM_THREADS is not set; each rank gets {threads_per_rank(job.ranks)} "
                f"({cores} usable cores, {job.ranks} ranks)"
            )
        copies = self._open_copies()
        for number in range(job.ranks):
            rank, pipes = start_rank(number, job.ranks, job.command, self._environment)
            self._ranks.append(rank)
            for i, screen in enumerate((self._out, self._err)):
                prefix = self._prefix(number, colour=job.colours[i])
                quiet = number > 0 and not job.all_output
                stream = Stream(pipes[i], prefix, screen, copies[number][i], quiet=quiet)
                self._streams.append(stream)

    def _open_copies(self) -> list[tuple[int | None, int | None]]:
        copies = self._job.copies
        if copies is None:
            return [(None, None)] * self._job.ranks
        width = len(str(self._job.ranks - 1))
        try:
            copies.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            return [
                (_open_copy(copies, 0, rank, width), _open_copy(copies, 1, rank, width))
                for rank in range(self._job.ranks)
            ]
        except FileExistsError as error:
            raise LaunchError(f"{copies.option}: {error.filename} is there already") from error
        except OSError as error:
            raise LaunchError(f"{copies.option}: {error.filename}: {error.strerror}") from error

    def _prefix(self, rank: int, *, colour: bool) -> bytes:
        if not self._job.prefix:
            return b""
        text = f"[{rank}]"
        space = " " * (len(str(self._job.ranks - 1)) + 3 - len(text))  # text starts in one column
        if colour:
            text = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m"
        return (text + space).encode()

    # -- one turn -----------------------------------------------------------------------------

    def _turn(self, deadline: float | None) -> None:
        """Waits for anything to happen, at most until `deadline`, and does it."""
        poll = select.poll()
        poll.register(self._signals, select.POLLIN)
        poll.register(self._lifeline, select.POLLIN)
        poll.register(self._ear, select.POLLIN)
        readable = {stream.fd: stream for stream in self._streams if stream.readable}
        for descriptor in readable:
            poll.register(descriptor, select.POLLIN)
        for screen in {self._out, self._err}:
            if screen.pending:
                poll.register(screen.fd, select.POLLOUT)
        ready = {descriptor for descriptor, _ in poll.poll(_milliseconds(deadline))}

        # Deaths and signals come before output: their order is told to the user.
        if self._signals in ready:
            self._take_signals()
        self._listen()
        if self._lifeline in ready:
            raise WatchdogLost
        now = time.monotonic()
        for descriptor, stream in readable.items():
            if descriptor in ready:
                stream.read(now)
            elif (due := stream.due()) is not None and due <= now:
                stream.show_part(now)  # silent: there was nothing to read
            self._look_after(stream)
        for screen in {self._out, self._err}:
            screen.flush()

    def _next_deadline(self) -> float | None:
        times = [due for s in self._streams if s.readable and (due := s.due()) is not None]
        times += [when for when, _ in self._plan[:1]]
        times += [since + _ABSENCE for since in self._absent.values()]
        return min(times, default=None)

    def _look_after(self, stream: Stream) -> None:
        if stream.trouble:
            option = self._job.copies.option if self._job.copies else ""
            self._say(f"{option}: {stream.trouble}; a file ends here")
            stream.trouble = ""
        if stream.unwanted:
            stream.close()

    def _take_signals(self) -> None:
        with suppress(BlockingIOError):
            for number in os.read(self._signals, 4096):
                self._handle(signal.Signals(number))

    def _handle(self, number: signal.Signals) -> None:
        if number == signal.SIGCHLD:
            self._take_deaths()
        elif number in STOPPING:
            self._stop(number)
        elif number == signal.SIGTSTP:
            # A rank leads an orphaned process group, for which the kernel ignores SIGTSTP.
            self._signal_ranks(signal.SIGSTOP)
        elif number == signal.SIGCONT:
            self._signal_ranks(number)
        else:
            # To the ranks alone: their workers have no handler and would die of it.
            for rank in self._ranks:
                if rank.alive:
                    os.kill(rank.pid, number)

    def _take_deaths(self) -> None:
        died = [rank for rank in self._ranks if rank.poll()]
        self._listen()  # what they said before
        if not died:
            mine = {rank.pid for rank in self._ranks}
            reap(process for process in descendants(os.getpid()) if process.pid not in mine)
        # Of deaths seen in one look, a killed rank is more likely the cause than one that exited.
        died.sort(key=lambda rank: rank.exit_code or 0)
        failed = [rank for rank in died if rank.exit_code != 0]
        for rank in failed:
            self._blame.note_death(rank.number)
        if failed and not (self._failed or self._missed or self._stopped_by):
            now = time.monotonic()
            patience = self._job.patience
            term = now + self._job.grace
            self._plan = [(term, signal.SIGTERM), (term + patience, signal.SIGKILL)]
        self._failed += failed

    def _look_for_absent(self) -> None:
        """A rank that has ended will not come to a meeting any more: then the job ends."""
        if self._failed or self._stopped_by or self._missed:
            self._absent.clear()
            return
        now = time.monotonic()
        for rank in self._ranks:
            waiting = [] if rank.alive else self._meetings.waiting_for(rank.number)
            if not waiting:
                self._absent.pop(rank.number, None)
            elif now < self._absent.setdefault(rank.number, now) + _ABSENCE:
                continue
            elif self._orphans():  # one may be the rank's program
                self._absent[rank.number] = now
            else:
                self._missed = (rank, waiting)
                self._plan = [(now, signal.SIGTERM), (now + self._job.patience, signal.SIGKILL)]
                return

    def _orphans(self) -> list[Process]:
        """What ranks that have ended left running."""
        of_living = {p.pid for rank in self._ranks if rank.alive for p in descendants(rank.pid)}
        return [process for process in self._left_behind() if process.pid not in of_living]

    def _listen(self) -> None:
        for word in self._ear.words():
            self._meetings.hear(word)
            if word.rank not in self._ended_by:  # else it is we who end it
                self._blame.hear(word)

    # -- bringing ranks down ------------------------------------------------------------------

    def _stop(self, number: signal.Signals) -> None:
        """The user, or who runs us, wants the job to end."""
        again = number == signal.SIGINT and self._stopped_by == signal.SIGINT
        self._stops += 1
        self._stopped_by = self._stopped_by or number
        if not any(rank.alive for rank in self._ranks):
            return
        now = time.monotonic()
        if again:
            self._say("SIGINT again: killing all ranks")
            self._plan = [(now, signal.SIGKILL)]
            return
        patience = self._job.patience
        plan = [(now + patience * turn, step) for turn, step in enumerate(STOPPING[number], 1)]
        # A further signal never gives the ranks more time than they had.
        if not self._plan or plan[-1][0] < self._plan[-1][0]:
            self._plan = list(plan)
        more = "; again to kill them now" if number == signal.SIGINT else ""
        self._say(f"{number.name} passed on to the ranks{more}")
        self._end_ranks(number)

    def _escalate(self) -> None:
        """Takes the steps of the plan that are due."""
        while self._plan and self._plan[0][0] <= time.monotonic():
            _, number = self._plan.pop(0)
            late = [rank.number for rank in self._ranks if rank.alive]
            if number is None:
                pids = ", ".join(str(rank.pid) for rank in self._ranks if rank.alive)
                self._say(f"could not end {listed('rank', late)} (pid {pids})")
                self._given_up = True
                return
            if number == signal.SIGKILL:
                if sent := {self._ended_by[rank] for rank in late if rank in self._ended_by}:
                    names = " and ".join(step.name for step in sorted(sent))
                    self._say(f"{listed('rank', late)} did not end on {names}: SIGKILL")
                self._plan = [(time.monotonic() + _LEAVE_KILL, None)]
            self._end_ranks(number)

    def _end_ranks(self, number: signal.Signals) -> None:
        for rank in self._ranks:
            if rank.alive:
                self._ended_by[rank.number] = number
        self._signal_ranks(number)
        if number == signal.SIGKILL:
            for process in descendants(os.getpid()):
                send(process, signal.SIGKILL)
        else:
            self._signal_ranks(signal.SIGCONT)  # a stopped rank could not act on it

    def _signal_ranks(self, number: signal.Signals) -> None:
        for rank in self._ranks:
            if rank.alive:
                rank.signal_group(number)

    def _end_what_is_left(self) -> None:
        """All ranks are dead; ends what they left behind."""
        now = time.monotonic()
        term = now if self._failed or self._stopped_by else now + _LEAVE_ALONE
        plan = [(term, signal.SIGTERM), (term + _LEAVE_TERM, signal.SIGKILL)]
        give_up = term + _LEAVE_TERM + _LEAVE_KILL
        told: dict[int, Process] = {}
        while left := self._left_behind():
            now = time.monotonic()
            if now >= give_up:
                self._say(f"could not end {describe(left)}")
                return
            while plan and plan[0][0] <= now:
                _, number = plan.pop(0)
                for process in left:
                    told[process.pid] = process
                    send(process, number)
            stops = self._stops
            self._turn(now + _LOOK_AGAIN)
            if self._stops != stops:
                plan = [(now, signal.SIGKILL)]
        if told:
            self._say(f"ended what ranks left running: {describe(told.values())}")

    def _left_behind(self) -> list[Process]:
        mine = {rank.pid for rank in self._ranks}
        found = [p for p in descendants(os.getpid()) if p.pid not in mine]
        reap(found)
        return [process for process in found if not process.dead]

    # -- the end ------------------------------------------------------------------------------

    def _show_the_rest(self) -> None:
        """No writer is left: reads every pipe to its end, or to where it is dry."""
        for stream in self._streams:
            ready = select.poll()
            if not stream.at_end:
                ready.register(stream.fd, select.POLLIN)
            while not stream.at_end and ready.poll(0):
                stream.read(time.monotonic())
                self._look_after(stream)
                if not stream.readable and not stream.at_end:
                    self._drain_screens()
            stream.close()
        for number in self._failed_by_themselves():
            for stream in self._streams[2 * number : 2 * number + 2]:
                stream.show_hidden_bar()

    def _drain_screens(self) -> None:
        """Waits for who reads our output, who may be a person with a pager; a signal ends that."""
        stops = self._stops
        limit = time.monotonic() + self._job.patience if stops else None
        while self._out.pending or self._err.pending:
            self._turn(limit)
            if self._stops != stops or (limit is not None and time.monotonic() > limit):
                self._out.drop()
                self._err.drop()

    def _put_traces_together(self) -> None:
        """Where no rank is left that could."""
        if not any(name.endswith(("_TRACE", "_TIMELINE")) for name in self._environment):
            return
        from farandole._trace import TraceError, salvage

        try:
            salvage(self._environment)
        except TraceError as error:
            self._say(f"the trace is not complete: {error}")

    def _verdict(self) -> int:
        """Says, last of all, which rank failed first and how; returns the job's exit code."""
        if self._missed is not None:
            rank, waiting = self._missed
            what = f"{listed('rank', waiting)} waited for it in init()"
            self._say(f"{rank.describe_end()}, and {what}")
            return 1
        if own := self._failed_by_themselves():
            first = own[self._blame.first(own)]
            self._tell_the_others(first)
            code, how = self._end_of(first)
            memory = code == -signal.SIGKILL and oom_kills() > self._oom_kills
            self._say(how + (" (out of memory: oom_kill rose)" if memory else ""))
            return shell_code(code)
        if self._stopped_by is not None and (self._failed or self._given_up):
            self._say(f"the job was ended by {self._stopped_by.name}")
            return 128 + self._stopped_by
        return 0

    def _failed_by_themselves(self) -> dict[int, Rank]:
        """Not because we ended them, by their numbers."""
        return {
            rank.number: rank
            for rank in self._failed
            if rank.number not in self._ended_by or self._blame.end_of(rank.number)
        }

    def _end_of(self, rank: Rank) -> tuple[int, str]:
        """Its exit code, or the one it was about to have when we ended it; and what happened."""
        code = rank.exit_code or 0
        said = self._blame.end_of(rank.number)
        if said is None:
            return code, rank.describe_end()
        if rank.number in self._ended_by:
            code = said.code
        cause = f": {said.cause}" if said.cause and code == said.code else ""
        return code, f"rank {rank.number} (pid {rank.pid}) {describe_exit(code)}{cause}"

    def _tell_the_others(self, first: Rank) -> None:
        """One line for all that failed after it, grouped by how."""
        groups: dict[str, list[int]] = {}
        for rank in self._ranks:
            if rank is not first and rank.exit_code:
                how = describe_exit(rank.exit_code)
                if (sent := self._ended_by.get(rank.number)) and rank.exit_code == -sent:
                    how = f"ended with {sent.name}"
                groups.setdefault(how, []).append(rank.number)
        if groups:
            parts = [f"{listed('rank', who)} {how}" for how, who in groups.items()]
            self._say(f"{'; '.join(parts)}; but first:")

    def _say(self, line: str) -> None:
        self._err.say(f"farandole: {line}")


class WatchdogLost(BaseException):
    """Ends the loop from wherever it is; the launcher then kills all that descends from it."""


def _open_copy(copies: Copies, which: int, rank: int, width: int) -> int:
    """Refuses to overwrite unless that was asked for: the last run's logs may be wanted."""
    path = copies.directory / copies.names[which].format(rank=rank, width=width)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    if_there = os.O_TRUNC if copies.overwrite else os.O_EXCL
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | if_there, 0o600)


def _milliseconds(deadline: float | None) -> int | None:
    if deadline is None:
        return None
    return max(0, int((deadline - time.monotonic()) * 1000) + 1)
