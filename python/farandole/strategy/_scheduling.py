"""A ClusterCoordinator's work on the chief and on workers, whose programs are the same."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from farandole import _world
from farandole.parameter_server import Worker
from farandole.parameter_server._wire import Pair
from farandole.strategy import _closures
from farandole.strategy._chief import Chief
from farandole.strategy._closures import Closure, Outcome
from farandole.strategy._follower import Follower
from farandole.strategy._served import Store


class Own:
    """A value that each worker has of its own, in the arguments of closures."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Scheduling:
    """The scheduling of closures of one strategy.

    Args:
        strategy: in whose scope closures run.
        worker: the connection to the servers.
        pairs: of the chief with all workers, by rank; of a worker with the chief.
    """

    def __init__(
        self, strategy: Any, store: Store, worker: Worker, pairs: Mapping[int, Pair]
    ) -> None:
        self._strategy, self._store, self._worker = strategy, store, worker
        # Of this worker. The chief traces what the first one runs.
        self._index = max(worker.index - 1, 0)
        self.current_index: int | None = None  # while a worker's functions run or are traced
        self.side: Chief | Follower
        self.side = Chief(pairs) if worker.index == 0 else Follower(pairs[0], self._run)
        self._number = 0
        self._traced: dict[int, Any] = {}  # functions, by identity
        self._left = False
        _world.before_leaving(self._leave)

    # ---- the program ----

    def schedule(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Closure:
        closure = Closure(self._number, function, tuple(args), dict(kwargs))
        label = f"schedules {closure.label}"
        if id(function) not in self._traced:
            # Variables are made now, by all ranks in the same order.
            self._store.require(closure.label, getattr(self._concrete(closure), "variables", ()))
            self._traced[id(function)] = function
        self.side.raise_failure(label)
        self.side.submit(closure, label, self._prepare)
        self._number += 1
        return closure

    def _prepare(self) -> str:
        """Prepares variables for a closure; returns a line that ranks compare."""
        new = self._store.tell_new()
        self._store.unsettle()
        return new

    def join(self) -> None:
        label = f"joins after {self._number} closures"
        self.side.finish_all()
        self.side.raise_failure(label)
        if isinstance(self.side, Chief):
            self._store.settle()
            self.side.join(label)
        else:
            self.side.join(label)
            self._store.settle()
            self.side.tell_taken()

    def is_done(self) -> bool:
        label = f"asks after {self._number} closures whether they are done"
        return self.side.is_done(label)

    def outcome(self, closure: Closure) -> Outcome:
        return self.side.outcome(closure, f"fetches from {closure.label}")

    def _leave(self) -> None:
        """This rank's program has ended, or has left the world."""
        if self._left:
            return
        self._left = True
        handled = sys.exc_info()[1]
        error = handled or getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if isinstance(error, SystemExit):
            error = None
        self.side.end(error)
        if error is None:
            self._worker.close()

    # ---- closures ----

    @contextmanager
    def as_worker(self) -> Iterator[None]:
        """Within it, functions of a worker run or are traced."""
        before, self.current_index = self.current_index, self._index
        try:
            yield
        finally:
            self.current_index = before

    def _concrete(self, closure: Closure) -> Any:
        """The graph that it runs; None of a function that is no tf.function."""
        get = getattr(closure.function, "get_concrete_function", None)
        if get is None:
            is_one = hasattr(closure.function, "captured_inputs")
            return closure.function if is_one else None
        args, kwargs = own_values((closure.args, closure.kwargs))
        with self._strategy.scope(), self.as_worker():
            return get(*args, **kwargs)

    def _run(self, closure: Closure) -> Outcome:
        """Runs a closure on a worker."""
        try:
            concrete = self._concrete(closure)
            used = None if concrete is None else self._store.used_by(concrete.captured_inputs)
            args, kwargs = own_values((closure.args, closure.kwargs))
            graph = None if concrete is None else concrete.graph
            closing = self._store.closure(used, graph)
            with self._strategy.scope(), closing, self.as_worker():
                return _closures.result(closure, closure.function(*args, **kwargs))
        except Exception as error:
            return _closures.failure(closure, error)


def own_values(structure: Any) -> Any:
    """The structure with this worker's own values."""
    return tf.nest.map_structure(
        lambda each: each.value if isinstance(each, Own) else each, structure
    )
