"""Runs an elastic job: a lost rank ends a world, and not the job.

Workers are started in free slots, and ask for a place in a world. A world is formed when all living
members of the one before have asked, and there are enough workers. Ranks that train are notified of
new workers, and leave their world together at their next commit.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Mapping

from farandole._launch.elastic import worlds
from farandole._launch.elastic.fleet import Fleet
from farandole._launch.elastic.roster import Roster, Worker
from farandole._launch.elastic.slots import Cooldown, Slots
from farandole._launch.elastic.timing import Timing
from farandole._launch.job import Elastic, Job, LaunchError
from farandole._launch.place import NotStarted, Place, Rank
from farandole._launch.polling import earliest
from farandole._launch.ranks import new_run_id, shell_code
from farandole._launch.signals import SignalPipe
from farandole._launch.supervisor import Supervisor
from farandole._launch.words import Word
from farandole._tables import counted, listed

_TOO_FEW = 75  # the exit code then (EX_TEMPFAIL: it may be tried again)


class ElasticSupervisor(Supervisor):
    """Keeps a world of ranks going, of the workers that there are."""

    def __init__(
        self, job: Job, terms: Elastic, fleet: Fleet, lifeline: int, signals: SignalPipe
    ) -> None:
        super().__init__(job, fleet.places, lifeline, signals)
        self._terms, self._fleet = terms, fleet
        self._roster = Roster(job.ranks, terms.least)
        self._slots = Slots(Cooldown(*terms.cooldown))
        self._started = 0  # workers so far: the next one's number
        self._run_id = new_run_id()
        self._starting = set[int]()  # workers that places were asked for, and have not started yet
        self._inherited = {**os.environ, **job.environment}
        self._looked = time.monotonic()
        self._timing = Timing(self._roster, terms, self._looked)
        self._said: dict[int, str] = {}  # to each worker of the present world, of its place
        self._starts_more = True
        self._last_loss: Rank | None = None
        self._failed_later: Rank | None = None  # the first, when its training had come to its end

    def _is_on(self) -> bool:
        return bool(self._living() or self._starting) or not (self._started or self._causes.any)

    # -- start --------------------------------------------------------------------------------

    def _start(self) -> None:
        """Hosts come one by one, and so do workers: all of that is of the loop."""
        if self._inherited.get("FARANDOLE_TRACE") and (self._job.hosts or self._terms.discovery):
            self._say("FARANDOLE_TRACE: of an elastic job, each host keeps the parts of its ranks")
        self._other_turns(set(), time.monotonic())
        self._look_after()

    def _take_up_places(self, now: float) -> None:
        for place in list(self._places):
            if place.trouble and not place.started:
                self._take_refusal(place, now)
            elif place.ready and not place.prepared:
                self._tell_threads([place])
                place.prepared = True
                place.prepare(self._run_id)
        for place in self._fleet.unwanted():
            if not any(rank.alive for rank in place.ranks):
                self._fleet.retire(place)

    def _take_refusal(self, place: Place, now: float) -> None:
        """A place that was never of use is an error if the user has named its host."""
        if self._fleet.discovery is None and self._roster.world == 0:
            raise LaunchError(place.trouble, place.exit_code)
        self._say(place.trouble)
        self._fleet.lose(place, now)

    def _start_workers(self, now: float) -> None:
        slots = self._fleet.slots()
        if not self._started and not self._are_all_there(slots):
            return
        self._slots.set(slots)
        for host in self._slots.free(now):
            if len(self._roster) >= self._terms.most:
                return
            place = self._fleet.place_on(host)
            assert place is not None
            number = self._started
            self._started += 1
            self._slots.take(host, number, now)
            self._roster.add(number, host)
            self._starting.add(number)
            try:
                place.add(number, worlds.of_worker(number))
            except LaunchError as error:
                if self._roster.world == 0:
                    raise
                self._say(str(error))
                self._take_failed_start(number)
        self._take_new_ranks()

    def _are_all_there(self, slots: Mapping[str, int]) -> bool:
        """Whether the first workers can be numbered: in the order of hosts, not as these answer."""
        return all(p.started for p in self._places) and sum(slots.values()) >= self._job.ranks

    def _take_new_ranks(self) -> None:
        for place in self._places:
            for rank, pipes in place.new_ranks():
                rank.kind = "worker"
                self._starting.discard(rank.number)
                self._display.add(rank, pipes)

    # -- turns --------------------------------------------------------------------------------

    def _other_descriptors(self) -> list[tuple[int, int]]:
        return self._fleet.descriptors()

    def _other_turns(self, ready: set[int], now: float) -> None:
        if not self._causes.any:
            for line in self._fleet.turn(ready, now):
                self._say(line)

    def _next_deadline(self) -> float | None:
        if self._causes.any:
            return super()._next_deadline()
        then = self._looked
        own = [self._timing.due(then), self._slots.due(then), self._fleet.due()]
        return earliest([super()._next_deadline(), *own])

    def _look_after(self) -> None:
        if self._causes.any:
            return
        now = self._looked = time.monotonic()
        self._take_up_places(now)
        self._roster.leave_hosts(place.host for place in self._fleet.unwanted())
        if self._roster.ended_well:
            self._dismiss(self._roster.newcomers, "the job has come to its end")
            self._end_latecomers(now)
        if self._starts_more and not self._roster.finished:
            self._start_workers(now)
        elif not self._starts_more and self._roster.seeking and self._are_too_few:
            self._give_up(f"fewer than {counted(self._terms.least, 'worker')}", _TOO_FEW)
            return
        if self._roster.may_form(self._terms.most):
            if (due := self._timing.first_world()) is None or due <= now:
                self._form_world()
        elif (due := self._timing.end_of_wait()) is not None and due <= now:
            self._end_the_wait(now)
        self._tell_of_changes(now)

    @property
    def _are_too_few(self) -> bool:
        return len(self._roster) < self._roster.least

    def _end_latecomers(self, now: float) -> None:
        """Where only workers are left that have never had a place: they may be long in coming."""
        if self._roster.is_of_newcomers and self._plan.due() is None:
            patience = self._job.patience
            self._plan.plan((now + patience, signal.SIGTERM), (now + 2 * patience, signal.SIGKILL))

    # -- news ---------------------------------------------------------------------------------

    def _take(self, item: Word | Rank | NotStarted) -> None:
        if isinstance(item, NotStarted):
            self._take_failed_start(item.number)
        elif isinstance(item, Rank):
            self._take_death(item)
        elif item.parts[0] == "seek":
            self._hear_seeker(item)
        elif item.parts[0] in ("training", "done", "failed"):
            if (worker := self._roster.get(item.rank)) is not None:
                worker.is_done, worker.has_failed = (item.parts[0] == w for w in ("done", "failed"))
        else:
            self._causes.hear(item)

    def _take_failed_start(self, number: int) -> None:
        self._starting.discard(number)
        if (worker := self._roster.get(number)) is not None:
            self._roster.remove(worker)
        self._slots.lose(number, time.monotonic())

    def _hear_seeker(self, word: Word) -> None:
        worker = self._roster.get(word.rank)
        match word.parts:
            case ["seek", world, has_state] if worker is not None and world.isdecimal():
                now = time.monotonic()
                fresh = self._roster.seek(worker, word.pid, int(world), has_state == "1", now)
                if not fresh and worker.number in self._said:
                    self._tell([worker], self._said[worker.number])

    def _take_death(self, rank: Rank) -> None:
        worker = self._worker_of(rank)
        if self._causes.any or worker is None:
            super()._take_death(rank)
            return
        self._tell_places_of_death(worker, rank)
        self._remove(worker, rank.describe_end())
        if rank.exit_code == 0 and (worker.world or worker.dismissed):
            self._slots.leave(rank.number)
            self._roster.ended_well |= not worker.dismissed
        elif rank.exit_code == 0:
            self._take_end_without_place(rank)
        else:
            self._lose(rank)
            if worker.is_done:
                self._failed_later = self._failed_later or rank
            self._tell_prospect(rank.describe_end())
        if not len(self._roster):
            self._end_with(rank)

    def _take_end_without_place(self, rank: Rank) -> None:
        """Others that do the same would be started for ever."""
        self._slots.lose(rank.number, time.monotonic())
        if self._roster.world == 0:
            self._starts_more = False
            self._roster.settle_for_fewer()
            self._say(f"{rank.describe_end()} before it had a place: no other one is started")

    def _end_with(self, last: Rank) -> None:
        """No worker is left. A failure in training is forgiven if other ranks have come to its end;
        a later failure is not."""
        failed = self._failed_later or (None if self._roster.ended_well else last)
        if failed is not None and failed.exit_code:
            self._end_after_a_failure()
            self._causes.note_death(failed)

    def _take_loss(self, place: Place) -> None:
        if self._causes.any:
            super()._take_loss(place)
            return
        lost = [(w, rank) for rank in place.ranks if rank.lost and (w := self._worker_of(rank))]
        for worker, rank in lost:
            self._remove(worker, f"host {place.host} was lost")
            self._lose(rank)
        self._starting -= {worker.number for worker in self._roster.on(place.host)}
        for worker in self._roster.on(place.host):
            self._roster.remove(worker)
        if not len(self._roster) and not self._roster.ended_well:
            self._end_after_a_failure()
            self._causes.note_loss(place)
            return
        self._say(place.trouble)
        if lost:
            numbers = listed("worker", [worker.number for worker, _ in lost])
            self._tell_prospect(f"{numbers} {'was' if len(lost) == 1 else 'were'} lost with it")
        self._fleet.lose(place, time.monotonic())

    def _worker_of(self, rank: Rank) -> Worker | None:
        return self._roster.get(rank.number)

    def _lose(self, rank: Rank) -> None:
        self._slots.lose(rank.number, time.monotonic())
        self._last_loss = rank

    def _tell_prospect(self, what: str) -> None:
        living, least = len(self._roster), self._roster.least
        if self._roster.ended_well:
            self._say(f"{what}; the job has come to its end without it")
        elif not living:
            return  # the last words will be of that
        elif living >= least:
            self._say(f"{what}; the job goes on with {counted(living, 'worker')}")
        else:
            self._say(f"{what}; the others wait until there are {least} again")

    def _remove(self, worker: Worker, how: str) -> None:
        """Removes a worker. Members that still wait for it in init() are notified."""
        if self._roster.remove(worker):
            self._tell(self._roster.members, worlds.broken(worker.world, how))

    # -- worlds -------------------------------------------------------------------------------

    def _form_world(self) -> None:
        if self._terms.worlds is not None and self._roster.world > self._terms.worlds:
            self._give_up(f"{counted(self._terms.worlds, 'world')} after the first one ended early")
            return
        if done := [worker.number for worker in self._roster.members if worker.is_done]:
            self._say(f"{listed('worker', done)} came to the end of training before the others")
        chosen = self._roster.form(self._terms.most)
        hosts = dict.fromkeys(worker.host for worker in chosen)
        places = [place for host in hosts if (place := self._fleet.place_on(host)) is not None]
        words = worlds.places(
            chosen,
            self._roster.world,
            self._where_to_meet(places),
            self._inherited,
            pretended=self._is_pretended,
        )
        self._said = {worker.number: said for worker, said in words}
        for worker in chosen:
            self._tell([worker], self._said[worker.number])
        self._display.take_bars_of(chosen[0].number)
        if self._roster.had_state and not chosen[0].has_state:
            self._say("nobody is left who has the job's state: training begins anew")
            self._roster.had_state = False
        left = [worker for worker in self._roster.newcomers if worker.leaves]
        self._dismiss(left, "its host is none of the job's any more")
        numbers = listed("worker", [worker.number for worker in chosen])
        self._say(f"world {self._roster.world}: {numbers}")

    def _tell_of_changes(self, now: float) -> None:
        """Notifies the ranks of a running world of new workers, and of hosts that leave."""
        change = self._timing.change(now)
        if change is not None:
            only_fewer = change.newcomers == 0
            words = worlds.wanted(self._roster.world, only_fewer=only_fewer)
            self._tell(self._roster.members, words)

    # -- waiting ------------------------------------------------------------------------------

    def _end_the_wait(self, now: float) -> None:
        """Time is up: goes on without the late workers, or gives up."""
        roster = self._roster
        late = roster.awaited
        if roster.is_world_over and late:
            self._say(
                f"{listed('worker', [worker.number for worker in late])} did not leave world "
                f"{roster.world} within {self._terms.timeout:g} s (--elastic-timeout): SIGKILL"
            )
            for worker in late:
                worker.since = now
                self._kill(worker)
            roster.wait_again(now)
        elif roster.world == 0 and len(roster.seeking) >= self._terms.least:
            roster.settle_for_fewer()
        else:
            self._give_up(
                f"fewer than {counted(self._terms.least, 'worker')} for "
                f"{self._terms.timeout:g} s (--elastic-timeout)",
                _TOO_FEW,
            )

    def _give_up(self, why: str, code: int = 0) -> None:
        last = self._last_loss
        if last is not None:
            how = last.describe_end() if not last.lost else f"worker {last.number} was lost"
            why = f"{why}; last, {how}"
            code = code or shell_code(last.exit_code or 1)
        self._causes.give_up(code or 1, f"the job is given up: {why}")
        self._end_after_a_failure()

    # -- telling ------------------------------------------------------------------------------

    def _tell(self, workers: Iterable[Worker], words: str) -> None:
        for worker in workers:
            place = self._fleet.place_on(worker.host)
            if place is not None and worker.pid:
                place.say(worker.pid, words)

    def _dismiss(self, workers: Iterable[Worker], why: str) -> None:
        for worker in workers:
            if worker.seeks:
                worker.seeks, worker.dismissed = False, True
                self._tell([worker], worlds.dismissed(why))

    def _kill(self, worker: Worker) -> None:
        place = self._fleet.place_on(worker.host)
        if place is not None:
            place.kill(worker.number)

    def _tell_places_of_death(self, worker: Worker, rank: Rank) -> None:
        """Reports a death by the rank in the present world, as peers know it."""
        if worker.world != self._roster.world:
            return
        dead = Rank(worker.rank, rank.pid, rank.host)
        dead.exit_code = rank.exit_code
        for place in self._places:
            if place.started:
                place.tell_death(dead)

    @property
    def _is_pretended(self) -> bool:
        """Whether hosts are parts of one machine."""
        return self._job.reach is not None and self._job.reach.launcher == "local"

    # -- the end ------------------------------------------------------------------------------

    def _leave_places(self) -> None:
        super()._leave_places()
        self._fleet.close()
