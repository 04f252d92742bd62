"""A worker's side of a ClusterCoordinator: its program goes as far as the chief's, and wherever it
waits for that, it runs closures."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from farandole import _world
from farandole._core import Mismatch
from farandole.common._pickles import unsealed
from farandole.parameter_server._wire import Pair
from farandole.strategy import _chief as chief
from farandole.strategy._closures import Closure, Outcome, value_of


class Follower:
    """See `Chief`, which has the same methods.

    Args:
        pair: with the chief.
        run: runs a closure.
    """

    leads = False

    def __init__(self, pair: Pair, run: Callable[[Closure], Outcome]) -> None:
        self._pair, self._run = pair, run
        self._closures: dict[int, Closure] = {}  # those that may be asked for
        self._news: deque[chief.Entry] = deque()
        self._position = 0  # entries of the log that are known

    def raise_failure(self, label: str) -> None:
        """With the next entry."""

    def submit(self, closure: Closure, label: str, prepare: Callable[[], str]) -> None:
        theirs = self._next(chief.SCHEDULED, label)
        if theirs != (new := prepare()):
            raise Mismatch(
                f"the programs of ranks 0 and {_world.rank()} have made different variables before "
                f"{closure.label}: rank 0 [{theirs}], and rank {_world.rank()} [{new}]\n"
                "  advice: make models, optimizers and metrics alike on all ranks"
            )
        self._closures[closure.number] = closure

    def finish_all(self) -> None:
        """With the next entry."""

    def join(self, label: str) -> None:
        self._next(chief.JOINED, label)

    def tell_taken(self) -> None:
        self._pair.send(chief.TAKEN, [self._position - len(self._news)])

    def is_done(self, label: str) -> bool:
        return bool(self._next(chief.ASKED, label))

    def outcome(self, closure: Closure, label: str) -> Outcome:
        del closure
        found: Outcome = self._next(chief.FETCHED, label)
        return found

    def end(self, error: BaseException | None) -> None:
        if error is None:  # else the chief learns why
            self._pair.send(chief.LEAVE)

    def _next(self, kind: str, label: str) -> Any:
        """The result that the chief's program got at this program's present call."""
        while not self._news:
            self._ask()
        said, at, result = self._news.popleft()
        if said == chief.ENDED:
            raise SystemExit(0)  # the chief has left its program before
        if at != label or said not in (kind, chief.RAISED):
            raise Mismatch(
                f"the programs of ranks 0 and {_world.rank()} call the coordinator differently: "
                f"rank 0 {at}, and rank {_world.rank()} {label}\n  advice: all ranks run the same "
                "program; what it does may depend on what fetch(), done() and join() say, and on "
                "variables after join()"
            )
        if said == chief.RAISED:
            value_of(result)
        return result

    def _ask(self) -> None:
        self._pair.send(chief.ASK, [self._position])
        message = self._pair.receive(timeout=0)
        number, first, *_ = message.numbers
        for done in [each for each in self._closures if each < first]:
            del self._closures[done]
        if message.kind == chief.NEWS:
            entries = unsealed(message.data.tobytes(), f"{chief.LOG} from {self._position}")
            self._position += len(entries)
            self._news.extend(entries)
            return
        outcome = self._run(self._closures[number])
        kind = chief.DONE if outcome.good else chief.FAILED
        self._pair.send(kind, data=np.frombuffer(outcome.data, np.uint8))
