"""The workers of an elastic job, and when those that seek a place form its next world."""

from __future__ import annotations

from collections.abc import Iterable


class Worker:
    """One process, from its start to its end."""

    def __init__(self, number: int, host: str) -> None:
        self.number = number
        self.host = host
        self.world = 0  # the last one in which it was given a place; 0: none so far
        self.has_state = False  # that of the job, by its own word
        self.rank = 0  # in it
        self.leaves = False  # its host is none of the job's any more
        self.seeks = False
        self.dismissed = False
        self.is_done = False  # its training has come to its end
        self.has_failed = False  # it seeks no place any more, and may take its time to end
        self.pid = 0  # of who seeks: a program that the command has started, perhaps
        self.since = 0.0  # when it began to seek


class Roster:
    """The living workers. Methods take the time, and nothing here waits."""

    def __init__(self, first: int, least: int) -> None:
        """`first`: workers that the first world waits for; `least`: that every other one needs."""
        self.world = 0  # the number of the present one
        self.had_state = False  # some worker, of those that live or not
        self.ended_well = False  # a worker has: those that are left will, too
        self._first, self._least = first, least
        self._workers: dict[int, Worker] = {}
        self._members: set[int] = set()  # of the present world, alive

    def __len__(self) -> int:
        return len(self._workers)

    def add(self, number: int, host: str) -> None:
        self._workers[number] = Worker(number, host)

    def get(self, number: int) -> Worker | None:
        return self._workers.get(number)

    @property
    def finished(self) -> bool:
        """Training has come to its end on some rank, and will on those that are left."""
        return self.ended_well or any(worker.is_done for worker in self._workers.values())

    @property
    def is_of_newcomers(self) -> bool:
        """Whether there are newcomers, and no other workers."""
        return bool(self._workers) and not any(w.world for w in self._workers.values())

    @property
    def members(self) -> list[Worker]:
        """The living members of the present world."""
        return [self._workers[number] for number in sorted(self._members)]

    @property
    def newcomers(self) -> list[Worker]:
        """Workers that seek a place and are not in the present world."""
        workers = self._workers.values()
        return [each for each in workers if each.seeks and each.number not in self._members]

    @property
    def seeking(self) -> list[Worker]:
        return [each for each in self._workers.values() if each.seeks]

    @property
    def is_world_over(self) -> bool:
        """A member has left the present world, so that the others will, too."""
        return any(worker.seeks for worker in self.members)

    @property
    def is_anybody_on_the_way(self) -> bool:
        """Whether some worker has been started, and does not seek a place yet."""
        return any(not each.seeks and not each.world for each in self._workers.values())

    @property
    def awaited(self) -> list[Worker]:
        """Members that have not left the present world, and have not done with it."""
        return [w for w in self.members if not (w.seeks or w.is_done or w.has_failed)]

    @property
    def least(self) -> int:
        """How many workers the next world has at least."""
        if self.finished:
            return 1
        return self._least if self.world else self._first

    def settle_for_fewer(self) -> None:
        """The first world waits no longer for all."""
        self._first = self._least

    def seek(self, worker: Worker, pid: int, world: int, has_state: bool, now: float) -> bool:
        """Notes that a worker asks for a place after `world`. False if it has one already, and does
        not know yet."""
        if not world and worker.pid not in (0, pid):
            self._begin_again(worker)
        worker.pid, worker.has_state = pid, has_state
        self.had_state |= has_state
        if worker.world > world:
            return False
        if not worker.seeks:
            worker.seeks, worker.since = True, now
        return True

    def _begin_again(self, worker: Worker) -> None:
        """The worker's command has started the program once more: a newcomer."""
        self._members.discard(worker.number)
        worker.world, worker.is_done, worker.has_failed = 0, False, False

    def wait_again(self, now: float) -> None:
        """Restarts the waiting time of all workers that seek a place."""
        for worker in self.seeking:
            worker.since = now

    def on(self, host: str) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.host == host]

    def remove(self, worker: Worker) -> bool:
        """Removes a worker that has ended; returns whether it was in the present world."""
        self._workers.pop(worker.number, None)
        was_member = worker.number in self._members
        self._members.discard(worker.number)
        return was_member

    def leave_hosts(self, hosts: Iterable[str]) -> None:
        """Marks the workers on hosts that the job leaves."""
        left = set(hosts)
        for worker in self._workers.values():
            worker.leaves = worker.host in left

    @property
    def leaving(self) -> list[Worker]:
        """Members on hosts that the job leaves, if the others are enough."""
        found = [worker for worker in self.members if worker.leaves]
        staying = len(self.members) - len(found) + len([w for w in self.newcomers if not w.leaves])
        return found if staying >= self.least else []

    def may_form(self, most: int) -> bool:
        """Whether the next world can be formed now, of at most so many."""
        return not self.awaited and bool(self._able(most))

    def form(self, most: int) -> list[Worker]:
        """The next world, in the order of its ranks: those of one host together, and first a worker
        that has the job's state, where there is one."""
        chosen = self._able(most)
        hosts = list(dict.fromkeys(worker.host for worker in chosen))
        chosen.sort(key=lambda worker: (hosts.index(worker.host), _seniority(worker)))
        self.world += 1
        for rank, worker in enumerate(chosen):
            worker.seeks, worker.world, worker.rank = False, self.world, rank
        self._members = {worker.number for worker in chosen}
        return chosen

    def _able(self, most: int) -> list[Worker]:
        """Omits workers on hosts that are left, unless the rest lacks the state or is too small."""
        everyone = sorted(self.seeking, key=_seniority)
        if self.finished and not any(w.has_state or w.number in self._members for w in everyone):
            return []  # newcomers alone would train anew what others have trained
        staying = [worker for worker in everyone if not worker.leaves]
        have_state = [any(worker.has_state for worker in some) for some in (everyone, staying)]
        for some in (staying, everyone) if have_state[0] == have_state[1] else (everyone,):
            if len(some) >= max(1, self.least):
                return some[:most]
        return []


def _seniority(worker: Worker) -> tuple[bool, int]:
    """Workers that have the state come first, then those that came first."""
    return not worker.has_state, worker.number
