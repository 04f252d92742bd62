"""tf.distribute.coordinator for farandole.strategy: ``ClusterCoordinator`` and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from farandole._arguments import shown
from farandole._core import InvalidArgument
from farandole.strategy._closures import Closure, value_of
from farandole.strategy._parameter_server import ParameterServerStrategy
from farandole.strategy._scheduling import Own, Scheduling

__all__ = [
    "ClusterCoordinator",
    "PerWorkerValue",
    "PerWorkerValues",
    "RemoteValue",
    "experimental_get_current_worker_index",
]


class RemoteValue(tf.distribute.coordinator.RemoteValue):  # type: ignore[misc]  # no types
    """A closure's result, once it has run: ``ClusterCoordinator.schedule`` returns one."""

    def __init__(self, scheduling: Scheduling, closure: Closure) -> None:
        self._scheduling, self._closure = scheduling, closure

    def fetch(self) -> Any:
        """Waits for the closure, and returns what it returned, with numpy arrays for tensors; on
        every rank the same.

        Raises:
            Exception: what the closure raised; ``tf.errors.CancelledError`` if it was not run, as
                another one had failed.
            PeerLost: there is no worker left to run it.
        """
        return value_of(self._scheduling.outcome(self._closure))

    def get(self) -> Any:
        """The same with tensors."""

        def as_tensor(value: Any) -> Any:
            is_array = isinstance(value, np.ndarray | np.generic)
            return tf.convert_to_tensor(value) if is_array else value

        return tf.nest.map_structure(as_tensor, self.fetch())

    def __repr__(self) -> str:
        return f"<RemoteValue of {self._closure.label}>"


class PerWorkerValues(Own):
    """A value that each worker has of its own: an argument of ``ClusterCoordinator.schedule``, for
    which the closure gets that of the worker on which it runs."""

    def __iter__(self) -> Any:
        """Each worker's iterator of its dataset."""
        return self if isinstance(self, _Iterator) else _Iterator(iter(self.value))

    def __next__(self) -> NoReturn:
        raise InvalidArgument(
            "a per-worker value is read in closures only: pass the iterator to a function, "
            "coordinator.schedule(step_fn, args=(iterator,))"
        )

    @property
    def element_spec(self) -> Any:
        """The structure of the dataset's elements, as ``tf.data.Dataset.element_spec``."""
        return self.value.element_spec


class _Iterator(PerWorkerValues):
    pass


PerWorkerValue = PerWorkerValues  # as tf.distribute.coordinator calls it


def experimental_get_current_worker_index() -> Any:
    """The number of this worker, from 0 on, as a tensor: in a function of
    ``ClusterCoordinator.schedule``, or of ``create_per_worker_dataset``, say for
    ``dataset.shard``. The chief, which makes a dataset that nobody reads, gets 0.

    Raises:
        InvalidArgument: it is called elsewhere (a RuntimeError, as TensorFlow's).
    """
    coordinator = getattr(tf.distribute.get_strategy().extended, "coordinator", None)
    index = None if coordinator is None else coordinator._scheduling.current_index
    if index is None:
        raise InvalidArgument(
            "experimental_get_current_worker_index(): no function of a worker runs here\n"
            "  advice: call it in functions of schedule() and create_per_worker_dataset()"
        )
    return tf.constant(index, tf.int64)


class ClusterCoordinator:
    """Runs functions on workers, as ``tf.distribute.coordinator.ClusterCoordinator``.

    All ranks run the same program and make the same calls. The chief, rank 0, decides: functions go
    to whichever worker is free, in any order. A worker's program goes as far as the chief's, and
    where it waits for it, in these calls, it runs functions. What these calls return or raise is
    the same on all ranks.

    There is one of each strategy.

    Args:
        strategy: a :class:`~farandole.strategy.ParameterServerStrategy`.

    Raises:
        InvalidArgument: it is none.
    """

    def __new__(cls, strategy: Any) -> ClusterCoordinator:
        if not isinstance(strategy, ParameterServerStrategy):
            raise InvalidArgument(
                f"ClusterCoordinator: the strategy is {shown(strategy)}; it is a "
                "farandole.strategy.ParameterServerStrategy"
            )
        extended = strategy.extended
        if extended.coordinator is None:
            extended.coordinator = super().__new__(cls)
        found: ClusterCoordinator = extended.coordinator
        return found

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._scheduling: Scheduling = strategy.extended.scheduling

    @property
    def strategy(self) -> Any:
        """The strategy with which the coordinator was made."""
        return self._strategy

    def schedule(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> RemoteValue:
        """Has a worker run ``fn(*args, **kwargs)``, at some time; the chief does not wait for it.

        It runs at least once: if its worker dies, another one runs it again. It gets the variables
        as they are then, and what it changed goes to the servers when it has ended.

        Args:
            fn: a ``tf.function``, which is traced on all ranks when it comes the first time; then
                it may make variables. Another function runs eagerly, and makes none.
            args: of it; a :class:`PerWorkerValues` stands for the worker's own.

        Raises:
            Exception: what a closure before has raised, with its rank and traceback as the cause.
                By then none is running, and those that had not begun are cancelled.
            InvalidArgument: wrong arguments.
            Mismatch: this rank's program is not that of the chief.
            PeerLost: there is no worker left.
            ServerLost: a server is gone.
        """
        if not callable(fn):
            raise InvalidArgument(f"schedule: fn is {shown(fn)}; it is a function")
        if not isinstance(args, list | tuple | None) or not isinstance(kwargs, Mapping | None):
            raise InvalidArgument(
                f"schedule: args is {shown(args)} and kwargs {shown(kwargs)}; they are a tuple, as "
                "in args=(iterator,), and a dictionary"
            )
        for each in tf.nest.flatten((args, kwargs)):
            if isinstance(each, RemoteValue):
                raise InvalidArgument(
                    f"schedule: {each!r} is an argument; pass its value, as fetch() returns it"
                )
        return RemoteValue(
            self._scheduling, self._scheduling.schedule(fn, args or (), kwargs or {})
        )

    def join(self) -> None:
        """Waits until everything that was scheduled has run. All workers meet here, and take the
        variables as they then are.

        Raises:
            Exception: what a closure has raised, as in :meth:`schedule`.
            Mismatch, PeerLost, ServerLost: as there.
        """
        self._scheduling.join()

    def done(self) -> bool:
        """Whether everything that was scheduled has run.

        Raises:
            Exception: what a closure has raised, as in :meth:`schedule`.
            Mismatch, PeerLost: as there.
        """
        return self._scheduling.is_done()

    def fetch(self, val: Any) -> Any:
        """The same structure with what closures returned: see :meth:`RemoteValue.fetch`."""
        return tf.nest.map_structure(
            lambda each: each.fetch() if isinstance(each, RemoteValue) else each, val
        )

    def create_per_worker_dataset(self, dataset_fn: Any) -> PerWorkerValues:
        """A dataset that each worker makes by itself. ``iter()`` of it is an argument of closures.

        All workers have the same data then, in the same order where it is not random: give them
        different seeds, or parts, by ``farandole.rank()``.

        Args:
            dataset_fn: a function without arguments that returns a ``tf.data.Dataset``; or that.

        Raises:
            InvalidArgument: it is, or returns, something else.
        """
        made = dataset_fn
        if not isinstance(dataset_fn, tf.data.Dataset) and callable(dataset_fn):
            # A graph is not needed here.
            with self._strategy.scope(), self._scheduling.as_worker():
                made = getattr(dataset_fn, "python_function", dataset_fn)()
        if not isinstance(made, tf.data.Dataset):
            raise InvalidArgument(
                f"create_per_worker_dataset: {shown(made)}; it is a tf.data.Dataset, or a function "
                "that returns one"
            )
        return PerWorkerValues(made)
