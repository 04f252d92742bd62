"""What happens to a job: one loop over its places, its output, signals and the watchdog; no thread.

A job ends in phases. While it *runs*, the first failure or a stopping signal makes an escalation: a
list of (time, signal) that ends with SIGKILL. When the last rank is dead, what ranks left behind (a
daemon, a worker) gets a moment to leave by itself, then its own short escalation. Then the output
that is left is shown, and last the verdict.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence

from farandole._launch.display import Display
from farandole._launch.job import Job, LaunchError
from farandole._launch.leftovers import LEAVE_KILL
from farandole._launch.place import Place, Rank
from farandole._launch.polling import READ, earliest, wait
from farandole._launch.ranks import Rendezvous, describe_exit, new_run_id, shell_code
from farandole._launch.signals import STOPPING, Escalation, SignalPipe
from farandole._launch.watchdog import WatchdogLost
from farandole._launch.words import Blame, Meetings, Word
from farandole._tables import listed

# How long ranks may wait in init() for one that has ended well.
_ABSENCE = 3.0


class Supervisor:
    """Watches the ranks of one job from start to end."""

    def __init__(
        self, job: Job, places: Sequence[Place], lifeline: int, signals: SignalPipe
    ) -> None:
        self._job = job
        self._places = places
        self._lifeline = lifeline
        self._display = Display(job)
        self._failed: list[Rank] = []  # in the order of their deaths
        self._lost: list[Place] = []  # in the order of their losses
        self._loss: Place | None = None  # with which all began
        self._plan = Escalation()
        self._given_up = False
        self._stopped_by: signal.Signals | None = None  # the first stopping signal we got
        self._stops = 0  # how many we got
        self._ended_by: dict[int, signal.Signals] = {}  # by us: rank -> last signal sent
        self._blame = Blame(self._host_of)
        self._meetings = Meetings()
        self._absent: dict[int, float] = {}  # ranks that ended, and are waited for: since when
        self._missed: tuple[Rank, list[int]] | None = None  # who ended, and who waits: for ever
        self._signals = signals

    def run(self) -> int:
        """The whole job; returns its exit code."""
        try:
            self._start()
            while any(rank.alive for rank in self._ranks()) and not self._given_up:
                self._turn(self._next_deadline())
                self._look_for_absent()
                self._escalate()
            self._end_what_is_left()
            self._show_the_rest()
            code = self._verdict()
            self._drain_screens()
        finally:
            for place in self._places:
                place.close()
        return code

    def _ranks(self) -> Iterator[Rank]:
        for place in self._places:
            yield from place.ranks

    def _host_of(self, rank: int) -> int:
        for i, place in enumerate(self._places):
            rank -= place.count
            if rank < 0:
                return i
        return -1

    # -- start --------------------------------------------------------------------------------

    def _start(self) -> None:
        """All places are ready before the first rank starts."""
        deadline = time.monotonic() + self._job.start_timeout
        for place in self._places:
            place.open(deadline)
        self._wait_until_all_are("ready")
        if self._stopped_by is not None:
            return
        self._tell_threads()
        first = self._places[0]
        rendezvous = Rendezvous(first.address, first.port, new_run_id())
        for place in self._places:
            place.start(rendezvous)
        self._wait_until_all_are("started")
        for place in self._places:
            for rank, pipes in zip(place.ranks, place.pipes, strict=True):
                self._display.add(rank.number, pipes)
        if self._stopped_by is not None:  # when there was nobody yet to pass it on to
            self._stop_ranks(self._stopped_by)

    def _wait_until_all_are(self, state: str) -> None:
        """A place has its own deadline. A signal ends the wait for those that get ready."""
        while not all(getattr(place, state) for place in self._places):
            if state == "ready" and self._stopped_by is not None:
                return
            self._turn(earliest(place.due() for place in self._places))
            for place in self._places:
                if place.trouble:
                    raise LaunchError(place.trouble, place.exit_code)

    def _tell_threads(self) -> None:
        unset = [place for place in self._places if place.threads is not None]
        told = [(place.host, place.threads, place.count) for place in unset]
        shares = [
            f"{threads.each}{f' on {host}' if host else ''} "
            f"({threads.cores} usable cores, {count} ranks)"
            for host, threads, count in told
            if threads is not None
        ]
        if shares:
            self._say(f"OMP_NUM_THREADS is not set; each rank gets {', '.join(shares)}")

    # -- one turn -----------------------------------------------------------------------------

    def _turn(self, deadline: float | None) -> None:
        """Waits for anything to happen, at most until `deadline`, and does it."""
        own = [(self._signals.fd, READ), (self._lifeline, READ)]
        theirs = [pair for place in self._places for pair in place.descriptors()]
        ready = wait([*own, *theirs, *self._display.descriptors()], deadline)

        # Deaths and signals come before output: their order is told to the user.
        if self._signals.fd in ready:
            for number in self._signals.take():
                self._handle(number)
        if self._lifeline in ready:
            raise WatchdogLost
        now = time.monotonic()
        for place in self._places:
            place.turn(ready, now)
        self._take_news()
        self._display.turn(ready, now)

    def _next_deadline(self) -> float | None:
        absences = [since + _ABSENCE for since in self._absent.values()]
        places = [place.due() for place in self._places]
        return earliest([self._display.due(), self._plan.due(), *absences, *places])

    def _handle(self, number: signal.Signals) -> None:
        if number == signal.SIGCHLD:
            for place in self._places:
                place.child_ended()
            self._take_news()
        elif number in STOPPING:
            self._stop(number)
        elif number in (signal.SIGTSTP, signal.SIGCONT):
            # A rank leads an orphaned process group, for which the kernel ignores SIGTSTP.
            passed = signal.SIGSTOP if number == signal.SIGTSTP else number
            for place in self._places:
                place.signal_groups(passed)
        else:
            for place in self._places:
                place.pass_on(number)

    def _take_news(self) -> None:
        for place in self._places:
            for item in place.news():
                if isinstance(item, Word):
                    self._hear(item)
                else:
                    self._take_death(item)
            for line in place.remarks():
                self._say(line)
            if place.trouble and place not in self._lost:
                self._take_loss(place)

    def _hear(self, word: Word) -> None:
        self._meetings.hear(word)
        if word.rank not in self._ended_by:  # else it is we who end it
            self._blame.hear(word)

    def _take_death(self, rank: Rank) -> None:
        if rank.exit_code == 0:
            return
        self._blame.note_death(rank.number)
        if not self._has_cause():
            self._end_after_a_failure()
        self._failed.append(rank)

    def _take_loss(self, place: Place) -> None:
        """Its agent is gone, and with it all that is known of its ranks."""
        self._lost.append(place)
        if self._has_cause():
            self._say(place.trouble)
        else:
            self._loss = place
            self._end_after_a_failure()

    def _has_cause(self) -> bool:
        return bool(self._failed or self._missed or self._stopped_by or self._loss)

    def _end_after_a_failure(self) -> None:
        term = time.monotonic() + self._job.grace
        kill = term + self._job.patience
        self._plan.plan((term, signal.SIGTERM), (kill, signal.SIGKILL))

    def _look_for_absent(self) -> None:
        """A rank that has ended will not come to a meeting any more: then the job ends."""
        if self._has_cause():
            self._absent.clear()
            return
        now = time.monotonic()
        for place in self._places:
            for rank in place.ranks:
                waiting = [] if rank.alive else self._meetings.waiting_for(rank.number)
                if not waiting:
                    self._absent.pop(rank.number, None)
                elif now < self._absent.setdefault(rank.number, now) + _ABSENCE:
                    continue
                elif place.has_orphans():  # one may be the rank's program
                    self._absent[rank.number] = now
                else:
                    self._missed = (rank, waiting)
                    kill = now + self._job.patience
                    self._plan.plan((now, signal.SIGTERM), (kill, signal.SIGKILL))
                    return

    # -- bringing ranks down ------------------------------------------------------------------

    def _stop(self, number: signal.Signals) -> None:
        """The user, or who runs us, wants the job to end."""
        again = number == signal.SIGINT and self._stopped_by == signal.SIGINT
        self._stops += 1
        self._stopped_by = self._stopped_by or number
        if not any(rank.alive for rank in self._ranks()):
            return
        if again:
            self._say("SIGINT again: killing all ranks")
            self._plan.plan((time.monotonic(), signal.SIGKILL))
        else:
            self._stop_ranks(number)

    def _stop_ranks(self, number: signal.Signals) -> None:
        now = time.monotonic()
        patience = self._job.patience
        self._plan.hasten(
            *((now + patience * turn, step) for turn, step in enumerate(STOPPING[number], 1))
        )
        more = "; again to kill them now" if number == signal.SIGINT else ""
        self._say(f"{number.name} passed on to the ranks{more}")
        self._end_ranks(number)

    def _escalate(self) -> None:
        """Takes the steps of the plan that are due."""
        for number in self._plan.take(time.monotonic()):
            living = [rank for rank in self._ranks() if rank.alive]
            late = [rank.number for rank in living]
            if number is None:
                pids = ", ".join(rank.process for rank in living)
                self._say(f"could not end {listed('rank', late)} (pid {pids})")
                self._given_up = True
                return
            if number == signal.SIGKILL:
                if sent := {self._ended_by[rank] for rank in late if rank in self._ended_by}:
                    names = " and ".join(step.name for step in sorted(sent))
                    self._say(f"{listed('rank', late)} did not end on {names}: SIGKILL")
                self._plan.plan((time.monotonic() + LEAVE_KILL, None))
            self._end_ranks(number)

    def _end_ranks(self, number: signal.Signals) -> None:
        for rank in self._ranks():
            if rank.alive:
                self._ended_by[rank.number] = number
        for place in self._places:
            place.end(number)

    def _end_what_is_left(self) -> None:
        """All ranks are dead; ends what they left behind."""
        for place in self._places:
            place.finish(at_once=self._has_cause())
        while not all(place.finished for place in self._places):
            stops = self._stops
            self._turn(earliest(place.due() for place in self._places))
            if self._stops != stops:
                for place in self._places:
                    place.hurry()

    # -- the end ------------------------------------------------------------------------------

    def _show_the_rest(self) -> None:
        stops = self._stops
        while not all(place.dry for place in self._places) and self._stops == stops:
            self._turn(self._next_deadline())
        self._display.show_the_rest(self._drain_screens)
        for number in self._failed_by_themselves():
            self._display.show_hidden_bars(number)

    def _drain_screens(self) -> None:
        """Waits for who reads our output, who may be a person with a pager; a signal ends that."""
        stops = self._stops
        limit = time.monotonic() + self._job.patience if stops else None
        while self._display.pending:
            self._turn(limit)
            if self._stops != stops or (limit is not None and time.monotonic() > limit):
                self._display.drop()

    def _verdict(self) -> int:
        """Says, last of all, which rank failed first and how; returns the job's exit code."""
        if self._missed is not None:
            rank, waiting = self._missed
            what = f"{listed('rank', waiting)} waited for it in init()"
            self._say(f"{rank.describe_end()}, and {what}")
            return 1
        if self._loss is not None:
            self._tell_the_others(None)
            self._say(self._loss.trouble)
            return 1
        if own := self._failed_by_themselves():
            first = own[self._blame.first(own)]
            self._tell_the_others(first)
            code, how = self._end_of(first)
            memory = code == -signal.SIGKILL and self._place_of(first).out_of_memory
            self._say(how + (" (out of memory: oom_kill rose)" if memory else ""))
            return shell_code(code)
        if self._stopped_by is not None and self._was_ended():
            self._say(f"the job was ended by {self._stopped_by.name}")
            return 128 + self._stopped_by
        return 0

    def _was_ended(self) -> bool:
        started = all(place.started for place in self._places)
        return bool(self._failed or self._lost or self._given_up or not started)

    def _place_of(self, rank: Rank) -> Place:
        return self._places[self._host_of(rank.number)]

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
        return code, rank.describe_end(code) + cause

    def _tell_the_others(self, first: Rank | None) -> None:
        """One line for all that failed after it, grouped by how."""
        groups: dict[str, list[int]] = {}
        for rank in self._ranks():
            if rank is not first and rank.exit_code:
                how = describe_exit(rank.exit_code)
                if (sent := self._ended_by.get(rank.number)) and rank.exit_code == -sent:
                    how = f"ended with {sent.name}"
                groups.setdefault(how, []).append(rank.number)
        if groups:
            parts = [f"{listed('rank', who)} {how}" for how, who in groups.items()]
            self._say(f"{'; '.join(parts)}; but first:")

    def _say(self, line: str) -> None:
        self._display.say(line)
