"""The chief's side of a ClusterCoordinator: it gives closures to workers, and logs its program's
calls.

All ranks run the same program. The chief records the result of every call in a log; workers replay
it at the same calls. A worker asks, and gets a closure that its program knows of, or the new
entries of the log.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from farandole._core import EarlyExit, Error
from farandole.common._pickles import sealed
from farandole.parameter_server._wire import Message, Pair
from farandole.strategy._closures import Closure, Outcome, cancelled, value_of

# A worker's messages: it asks; a closure succeeded, or failed; it has taken all values; it leaves.
ASK, DONE, FAILED, TAKEN, LEAVE = range(5)
# The chief's messages: run a closure; new entries of the log.
RUN, NEWS = range(2)
LOG = "the log of a coordinator"

_PAUSE = 0.01  # seconds

# An entry of the log: the kind, what was called, and with what result.
SCHEDULED, JOINED, ASKED, FETCHED, RAISED, ENDED = (
    "scheduled", "joined", "asked", "fetched", "raised", "ended",
)  # fmt: skip
Entry = tuple[str, str, Any]


class Chief:
    """The chief's program calls the public methods; each worker has a thread here.

    Args:
        pairs: by the workers' ranks.
    """

    leads = True

    def __init__(self, pairs: Mapping[int, Pair]) -> None:
        self._pairs = pairs
        self._changed = threading.Condition()  # guards all that follows
        self._log: list[Entry] = []
        self._cut = 0  # entries that all workers have
        self._passed = dict.fromkeys(pairs, 0)  # entries that each has; of those that live
        self._taken = dict.fromkeys(pairs, 0)  # the entry after which each last took all values
        self._waiting: deque[Closure] = deque()
        self._running: dict[int, Closure] = {}  # by rank
        self._next = 0
        self._failure: Outcome | None = None
        self._lost: BaseException | None = None  # why there are no workers
        self._left: list[int] = []  # ranks whose program has ended, not reported yet
        self._ended = False
        self._threads = [
            threading.Thread(target=self._attend, args=(rank,), name=f"worker {rank}", daemon=True)
            for rank in pairs
        ]
        for thread in self._threads:
            thread.start()

    # ---- the program ----

    def raise_failure(self, label: str) -> None:
        """Raises what a closure has raised, once; by then none is running."""
        with self._changed:
            if self._failure is None:
                return
            self._wait(lambda: not self._running)
            failed, self._failure = self._failure, None
            self._say(RAISED, label, failed)
        value_of(failed)

    def submit(self, closure: Closure, label: str, prepare: Callable[[], str]) -> None:
        """`prepare`: returns what ranks are to have in common."""
        new = prepare()
        with self._changed:
            if not self._passed:
                raise self._no_worker()
            for rank in self._left:
                self._tell(f"the program of rank {rank} has ended before that of rank 0")
            self._left.clear()
            self._next = closure.number + 1
            self._waiting.append(closure)
            self._say(SCHEDULED, label, new)
            closure.known_from = self._cut + len(self._log)

    def finish_all(self) -> None:
        """Returns when no closure is left, or one has failed."""
        with self._changed:
            self._wait(lambda: self._failure is not None or self._is_idle())

    def join(self, label: str) -> None:
        """Returns when all workers have taken the values that there are now."""
        with self._changed:
            self._say(JOINED, label, None)
            end = self._cut + len(self._log)
            self._wait(lambda: all(self._taken[rank] >= end for rank in self._passed))

    def is_done(self, label: str) -> bool:
        with self._changed:
            if not self._passed and not self._is_idle():
                raise self._no_worker()
            # A program that asks without a pause would fill the log.
            self._changed.wait_for(lambda: self._failure or self._is_idle(), _PAUSE)
            self.raise_failure(label)
            done = self._is_idle()
            self._say(ASKED, label, done)
        return done

    def outcome(self, closure: Closure, label: str) -> Outcome:
        with self._changed:
            self._wait(lambda: closure.outcome is not None)
            assert closure.outcome is not None
            self._say(FETCHED, label, closure.outcome)
            return closure.outcome

    def end(self, error: BaseException | None) -> None:
        """The chief's program has ended, and workers' programs follow it up to there. If it has
        failed, they fail with its error."""
        with self._changed:
            self._ended = True
            if error is None:
                self._say(ENDED, "ends", None)
            self._changed.notify_all()
        if error is not None:  # a thread that is left would be killed in the middle of the engine
            what = f"{type(error).__name__}: {error}".partition("\n")[0]
            for pair in self._pairs.values():
                pair.group.abort(f"the chief's program has failed: {what}")
        for thread in self._threads:
            thread.join()

    def _is_idle(self) -> bool:
        return not self._waiting and not self._running

    def _wait(self, ready: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: ready() or not self._passed)
        if not ready():
            raise self._no_worker()

    def _no_worker(self) -> BaseException:
        assert self._lost is not None
        return self._lost

    def _say(self, kind: str, label: str, result: Any) -> None:
        self._log.append((kind, label, result))
        self._changed.notify_all()

    # ---- the thread of a worker ----

    def _attend(self, rank: int) -> None:
        pair = self._pairs[rank]
        try:
            while (message := pair.receive(timeout=0)).kind != LEAVE:
                self._handle(rank, pair, message)
            self._go(rank, None)
        except BaseException as error:
            self._go(rank, error)

    def _handle(self, rank: int, pair: Pair, message: Message) -> None:
        position, *_ = message.numbers
        if message.kind == TAKEN:
            with self._changed:
                self._taken[rank] = position
                self._changed.notify_all()
        elif message.kind == ASK:
            kind, numbers, data = self._answer(rank, position)
            pair.send(kind, numbers, data=data)
        else:
            self._close(rank, message.kind == DONE, message.data.tobytes())

    def _answer(self, rank: int, position: int) -> tuple[int, list[int], np.ndarray | None]:
        with self._changed:
            self._passed[rank] = position
            self._cut_log()
            self._changed.wait_for(lambda: self._news(position) or self._waiting or self._ended)
            first = min((c.number for c in self._unfinished()), default=self._next)
            if self._waiting and self._waiting[0].known_from <= position:
                closure = self._running[rank] = self._waiting.popleft()
                return RUN, [closure.number, first], None
            if news := self._news(position):
                data = sealed(news, f"{LOG} from {position}")
                return NEWS, [0, first], np.frombuffer(data, np.uint8)
            raise EarlyExit("the chief's program has failed")

    def _news(self, position: int) -> list[Entry]:
        return self._log[position - self._cut :]

    def _cut_log(self) -> None:
        known = min(self._passed.values())
        del self._log[: known - self._cut]
        self._cut = known

    def _unfinished(self) -> list[Closure]:
        return [*self._waiting, *self._running.values()]

    def _close(self, rank: int, good: bool, data: bytes) -> None:
        with self._changed:
            closure = self._running.pop(rank)
            closure.outcome = outcome = Outcome(closure.number, good, data)
            if not good and self._failure is None:
                self._failure = outcome
            if self._failure is not None:
                for closure in self._waiting:
                    closure.outcome = cancelled(closure, self._failure)
                self._waiting.clear()
            self._changed.notify_all()

    def _go(self, rank: int, error: BaseException | None) -> None:
        """A worker is gone: another one gets the closure that it was running."""
        with self._changed:
            del self._passed[rank]
            held = self._running.pop(rank, None)
            if held is not None and self._failure is not None:
                held.outcome = cancelled(held, self._failure)
            elif held is not None:
                self._waiting.appendleft(held)
            if not self._passed:
                self._lost = error or EarlyExit("all workers have ended, and closures are left")
            self._changed.notify_all()
            if error is None:
                self._left.append(rank)
            elif not self._ended:
                what = error.verdict if isinstance(error, Error) else repr(error)
                again = held is not None and held in self._waiting and self._passed
                self._tell(what, f"; {held.label} is run again" if held and again else "")

    def _tell(self, what: str, then: str = "") -> None:
        left = f"{len(self._passed)} of {len(self._pairs)} workers go on"
        sys.stderr.write(f"coordinator: {what}; {left}{then}\n")  # in one piece, of any thread
        sys.stderr.flush()
