"""Runs a job: one loop over its places, its output, signals and the watchdog; no thread.

A job ends in phases. While it *runs*, the first failure or a stopping signal makes an escalation: a
list of (time, signal) that ends with SIGKILL. When the last rank is dead, what ranks left behind (a
daemon, a worker) gets a moment to leave by itself, then its own short escalation. Then the output
that is left is shown, and last the verdict.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence

from farandole._launch.causes import Absences, Causes
from farandole._launch.display import Display
from farandole._launch.job import Job, LaunchError
from farandole._launch.leftovers import LEAVE_KILL
from farandole._launch.live import Live
from farandole._launch.place import NotStarted, Place, Rank, where_to_meet
from farandole._launch.polling import READ, earliest, wait
from farandole._launch.ranks import Rendezvous
from farandole._launch.signals import STOPPING, Escalation, SignalPipe
from farandole._launch.watchdog import WatchdogLost
from farandole._launch.words import Word
from farandole._tables import listed

# At the end: until the agents of other hosts have gone.
_GOING = 5.0


class Supervisor:
    """Watches the ranks of one job from start to end."""

    def __init__(
        self, job: Job, places: Sequence[Place], lifeline: int, signals: SignalPipe
    ) -> None:
        self._job = job
        self._places = places
        self._lifeline = lifeline
        self._signals = signals
        self._display = Display(job)
        self._causes = Causes(places)
        self._absences = Absences()
        self._plan = Escalation()
        self._live = Live(places, job.slow, job.metrics)
        self._watchdog = os.getppid()
        self._stops = 0  # how many stopping signals we got

    def run(self) -> int:
        """The whole job; returns its exit code."""
        try:
            self._start()
            while self._is_on() and not self._causes.given_up:
                self._turn(self._next_deadline())
                self._look_after()
                self._escalate()
            self._end_what_is_left()
            self._show_the_rest()
            verdict = self._causes.verdict()
            for line in verdict.lines:
                self._say(line)
            self._drain_screens()
        finally:
            self._live.close()
            self._leave_places()
        return verdict.code

    def _is_on(self) -> bool:
        """Whether there is anything to wait for."""
        return bool(self._living())

    def _living(self) -> list[Rank]:
        return [rank for place in self._places for rank in place.ranks if rank.alive]

    def _say(self, line: str) -> None:
        self._display.say(line)

    # -- start --------------------------------------------------------------------------------

    def _start(self) -> None:
        """All places are ready before the first rank starts."""
        for place in self._places:
            place.open(self._job.start_timeout)
        self._wait_for(lambda place: place.ready, or_a_signal=True)
        if self._causes.stopped_by is not None:
            return
        self._tell_threads(self._places)
        self._start_ranks()
        if self._causes.stopped_by is not None:  # when there was nobody yet to pass it on to
            self._stop_ranks(self._causes.stopped_by)

    def _start_ranks(self) -> None:
        rendezvous = self._where_to_meet(self._places)
        for place in self._places:
            place.start(rendezvous)
        self._wait_for(lambda place: place.started)
        self._take_new_ranks()

    def _where_to_meet(self, places: Sequence[Place]) -> Rendezvous:
        asked = {**os.environ, **self._job.environment}
        return where_to_meet(places, asked.get("FARANDOLE_IFACE", ""))

    def _take_new_ranks(self) -> None:
        for place in self._places:
            for rank, pipes in place.new_ranks():
                self._display.add(rank, pipes)

    def _wait_for(self, state: Callable[[Place], bool], *, or_a_signal: bool = False) -> None:
        """Waits until `state` holds for all places. Each of them has its own deadline."""
        while not all(state(place) for place in self._places):
            if or_a_signal and self._causes.stopped_by is not None:
                return
            self._turn(self._next_deadline())
            for place in self._places:
                if place.trouble:
                    raise LaunchError(place.trouble, place.exit_code)

    def _tell_threads(self, places: Sequence[Place]) -> None:
        shares = [
            f"{place.threads.each}{f' on {place.host}' if place.host else ''} "
            f"({place.threads.cores} usable cores, {place.count} ranks)"
            for place in places
            if place.threads is not None
        ]
        if shares:
            self._say(f"OMP_NUM_THREADS is not set; each rank gets {', '.join(shares)}")

    # -- one turn -----------------------------------------------------------------------------

    def _turn(self, deadline: float | None) -> None:
        """Waits for anything to happen, at most until `deadline`, and does it."""
        own = [(self._signals.fd, READ), (self._lifeline, READ)]
        theirs = [pair for place in self._places for pair in place.descriptors()]
        shown, others = self._display.descriptors(), self._other_descriptors()
        ready = wait([*own, *theirs, *shown, *others, *self._live.descriptors()], deadline)

        # Deaths and signals come before output: their order is told to the user.
        if self._signals.fd in ready:
            for number in self._signals.take():
                self._handle(number)
        if self._lifeline in ready:
            raise WatchdogLost
        now = time.monotonic()
        limit = self._time_limit()
        if limit is not None and now >= limit:
            self._causes.is_overdue = True
            self._stop(signal.SIGTERM)
        for place in self._places:
            place.turn(ready, now)
        self._take_news()
        self._other_turns(ready, now)
        for line in self._live.turn(ready, now):
            self._say(line)
        self._display.turn(ready, now)

    def _time_limit(self) -> float | None:
        """The point in time at which the job is ended, where it goes on as it should."""
        return self._job.ends_at if self._is_on() and not self._causes.any else None

    def _other_descriptors(self) -> list[tuple[int, int]]:
        return []

    def _other_turns(self, ready: set[int], now: float) -> None:
        """Gives turns to anything else that a subclass watches."""

    def _next_deadline(self) -> float | None:
        places = [place.due() for place in self._places]
        own = [self._display.due(), self._plan.due(), self._live.due(), self._time_limit()]
        return earliest([*own, *self._absences.dues(), *places])

    def _handle(self, number: signal.Signals) -> None:
        if number == signal.SIGCHLD:
            for place in self._places:
                place.child_ended()
            self._take_news()
        elif number in STOPPING:
            self._stop(number)
        elif number in (signal.SIGTSTP, signal.SIGCONT):
            if number == signal.SIGTSTP:
                # Shows the shell that its job is stopped. Done before ranks stop: a user who sees
                # that may send SIGCONT, and a watchdog that stopped later would stay so.
                os.kill(self._watchdog, signal.SIGSTOP)
            # A rank leads an orphaned process group, for which the kernel ignores SIGTSTP.
            passed = signal.SIGSTOP if number == signal.SIGTSTP else number
            for place in self._places:
                place.signal_groups(passed)
        else:
            for place in self._places:
                place.pass_on(number)

    def _take_news(self) -> None:
        self._take_new_ranks()
        for place in list(self._places):
            for item in place.news():
                self._take(item)
            for line in place.remarks():
                self._say(line)
            # A start that fails ends the job at once, in one line: see _wait_for.
            if place.started and place.trouble and not self._causes.is_noted(place):
                self._take_loss(place)

    def _take(self, item: Word | Rank | NotStarted) -> None:
        if isinstance(item, Word):
            self._absences.hear(item)
            self._causes.hear(item)
        elif isinstance(item, Rank):
            self._take_death(item)

    def _take_death(self, rank: Rank) -> None:
        for place in self._places:
            if place.started:
                place.tell_death(rank)
        if rank.exit_code and not self._causes.any and self._causes.is_dispensable(rank):
            self._say(f"{rank.describe_end()}; the others go on without it")
            return
        if rank.exit_code and not self._causes.any:
            self._end_after_a_failure()
        self._causes.note_death(rank)

    def _take_loss(self, place: Place) -> None:
        """The place's agent is gone, and with it all that is known of its ranks."""
        if self._causes.any:
            self._say(place.trouble)
        else:
            self._end_after_a_failure()
        self._causes.note_loss(place)

    def _end_after_a_failure(self) -> None:
        term = time.monotonic() + self._job.grace
        kill = term + self._job.patience
        self._plan.plan((term, signal.SIGTERM), (kill, signal.SIGKILL))

    def _look_after(self) -> None:
        """A rank that has ended will not come to a meeting any more: then the job ends."""
        if self._causes.any:
            self._absences.forget()
            return
        now = time.monotonic()
        self._causes.missed = self._absences.look(self._places, now)
        if self._causes.missed is not None:
            kill = now + self._job.patience
            self._plan.plan((now, signal.SIGTERM), (kill, signal.SIGKILL))

    # -- bringing ranks down ------------------------------------------------------------------

    def _stop(self, number: signal.Signals) -> None:
        """The user, or the process that runs us, wants the job to end."""
        again = number == signal.SIGINT and self._causes.stopped_by == signal.SIGINT
        self._stops += 1
        self._causes.stopped_by = self._causes.stopped_by or number
        if not self._living():
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
            living = self._living()
            late = [rank.number for rank in living]
            who = listed(living[0].kind, late) if living else ""
            if number is None:
                pids = ", ".join(rank.process for rank in living)
                self._say(f"could not end {who} (pid {pids})")
                self._causes.given_up = True
                return
            if number == signal.SIGKILL:
                if sent := self._causes.signals_sent(late):
                    names = " and ".join(step.name for step in sent)
                    self._say(f"{who} did not end on {names}: SIGKILL")
                self._plan.plan((time.monotonic() + LEAVE_KILL, None))
            self._end_ranks(number)

    def _end_ranks(self, number: signal.Signals) -> None:
        for rank in self._living():
            self._causes.note_end(rank, number)
        for place in self._places:
            place.end(number)

    def _end_what_is_left(self) -> None:
        """All ranks are dead; ends what they left behind."""
        for place in self._places:
            place.finish(at_once=self._causes.any)
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
        for number in self._causes.failed_by_themselves():
            self._display.show_hidden_bars(number)

    def _drain_screens(self) -> None:
        """Waits for the reader of our output, maybe a person with a pager; a signal ends that."""
        stops = self._stops
        limit = time.monotonic() + self._job.patience if stops else None
        while self._display.pending:
            self._turn(limit)
            if self._stops != stops or (limit is not None and time.monotonic() > limit):
                self._display.drop()

    def _leave_places(self) -> None:
        """Leaves all places at once, then waits until each has gone."""
        for place in self._places:
            place.leave()
        deadline = time.monotonic() + _GOING
        for place in self._places:
            place.close(deadline)
