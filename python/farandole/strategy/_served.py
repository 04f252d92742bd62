"""Variables whose values servers have; each process has a copy.

A closure gets fresh copies of the variables that it uses, and what it changed is sent when it ends.
Reading and writing are watched in Python, as TensorFlow has no other place for it: at once for what
runs eagerly, and for a tf.function when it is traced.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops as tf_variables  # private: to derive from

from farandole._arguments import shown
from farandole._core import InvalidArgument
from farandole.parameter_server import Rows, Worker
from farandole.strategy._extended import as_is

_REPLACING = ("assign", "scatter_update", "batch_scatter_update", "scatter_nd_update",
              "_strided_slice_assign", "_restore_from_tensors")  # fmt: skip
_CHANGING = ("assign_add", "assign_sub", "scatter_add", "scatter_sub", "scatter_mul", "scatter_div",
             "scatter_min", "scatter_max", "scatter_nd_add", "scatter_nd_sub", "scatter_nd_min",
             "scatter_nd_max")  # fmt: skip


class Sums:
    """The servers' rule: changes are added."""

    def apply(self, variables: Any, gradients: Any, version: int) -> None:
        del version
        for name, change in gradients.items():
            if isinstance(change, Rows):
                variables[name][change.indices] += change.values
            else:
                variables[name][...] += change

    def state(self) -> dict[str, np.ndarray]:
        return {}

    def restore(self, state: Any) -> None:
        """There is none."""


class ServedVariable(tf_variables.ResourceVariable):  # type: ignore[misc]  # TensorFlow has no types
    """A variable of a ParameterServerStrategy's scope."""

    store: Store | None = None  # from when it is complete
    key = ""  # its name on the servers

    def _read_variable_op(self, *args: Any, **kwargs: Any) -> Any:
        self._before_reading()
        return super()._read_variable_op(*args, **kwargs)

    def sparse_read(self, *args: Any, **kwargs: Any) -> Any:
        self._before_reading()
        return super().sparse_read(*args, **kwargs)

    def gather_nd(self, *args: Any, **kwargs: Any) -> Any:
        self._before_reading()
        return super().gather_nd(*args, **kwargs)

    def _before_reading(self) -> None:
        if self.store is not None:
            self.store.before_reading(self)

    def copy(self) -> np.ndarray:
        """The value that this process has now."""
        return np.asarray(super()._read_variable_op().numpy())

    def take(self, value: np.ndarray) -> None:
        tf_variables.ResourceVariable.assign(self, value, read_value=False)

    def __deepcopy__(self, memo: Any) -> Any:
        raise InvalidArgument(f"variable '{self.name}' has one value on the servers; no copies")


def _watched(name: str, replaces: bool) -> Callable[..., Any]:
    own = getattr(tf_variables.ResourceVariable, name)

    @functools.wraps(own)
    def method(self: ServedVariable, *args: Any, **kwargs: Any) -> Any:
        if self.store is None:
            return own(self, *args, **kwargs)
        with self.store.writing(self, replaces):
            return own(self, *args, **kwargs)

    found: Callable[..., Any] = as_is(method)
    return found


for _name in _REPLACING + _CHANGING:
    setattr(ServedVariable, _name, _watched(_name, _name in _REPLACING))


@dataclass
class Habits:
    """The reads and writes of variables seen in a function, which runs eagerly or is a graph."""

    read: set[str] = field(default_factory=set)
    # Set without having been read before; with the graph that did it, which may be a branch.
    replaced: dict[str, int] = field(default_factory=dict)

    def note_reading(self, key: str, graph: int) -> None:
        if key not in self.replaced or self.replaced[key] != graph:
            self.read.add(key)

    def note_writing(self, key: str, replaces: bool, graph: int) -> None:
        if replaces and key not in self.read:
            self.replaced[key] = graph
        elif self.replaced.get(key) != graph:
            self.replaced.pop(key, None)


class Store:
    """The variables of a strategy, on the chief and on workers.

    Args:
        worker: the connection to the servers. The first worker is the chief's, which leads: its
            program's writes are sent, and those of other programs outside closures are not.
        parts_of: into how many parts the servers cut a variable.
    """

    def __init__(self, worker: Worker, parts_of: Callable[[Any], int]) -> None:
        self._worker, self._parts_of = worker, parts_of
        self._leads = worker.index == 0
        self._listed: list[ServedVariable] = []
        self._known = 0  # to the servers: the first so many
        self._before: dict[str, np.ndarray] = {}  # as the servers had them when they were pulled
        self._settled = True  # no closure has run since
        self._of_graphs: weakref.WeakKeyDictionary[Any, Habits] = weakref.WeakKeyDictionary()
        self._eager: Habits | None = None  # of the closure that runs
        self._fresh: set[str] | None = None  # in a closure: pulled for it

    # ---- the program ----

    def created(self, variable: ServedVariable) -> None:
        variable.key = f"{len(self._listed)} {variable.name}"
        variable.store = self
        self._listed.append(variable)

    def tell_new(self) -> str:
        """Adds new variables to the servers, and pulls their values on workers. Returns a line that
        is to be equal on all ranks."""
        new = self._listed[self._known :]
        if new:
            values = {v.key: v.copy() for v in new}
            self._worker._add(values, [self._parts_of(v) for v in new])
            self._known = len(self._listed)
            self._before |= values
            if not self._leads:  # the chief's values count
                self._pull(new)
        return ", ".join(f"'{v.name}' {v.dtype.name} {v.shape}" for v in new)

    def unsettle(self) -> None:
        """Before a closure: the servers get what the program has written, and from now on they have
        the values."""
        if self._leads and self._settled:
            changed = {v.key: new for v, new, _ in self._changed(self._on_servers())}
            if changed:
                self._worker.assign(changed)
                self._worker.flush()
                self._before |= changed
        self._settled = False

    def settle(self) -> None:
        """No closure runs: this process takes all values."""
        if self._settled:
            return
        if self._leads:  # for writes that bypassed the methods of variables
            self._send(self._on_servers(), set())
        self._pull(self._on_servers())
        self._settled = True

    def refresh(self) -> None:
        """This process takes the values as they are, also while closures run."""
        if self._leads and not self._settled:
            self._pull(self._on_servers())

    def _on_servers(self) -> list[ServedVariable]:
        return self._listed[: self._known]

    # ---- closures ----

    @contextmanager
    def closure(self, used: Collection[ServedVariable] | None, graph: Any) -> Iterator[None]:
        """A context for a closure on a worker. Its changes are sent if it ends without an error.

        Args:
            used: the variables that it uses; None: any.
            graph: its graph; None: it runs eagerly.
        """
        variables = self._on_servers() if used is None else used
        self._fresh, self._eager = set(), Habits()
        try:
            self._pull(variables)
            yield
            names = self._fresh | {v.key for v in variables}
            replaced = set(self._eager.replaced)
            if graph is not None:
                replaced |= self._of_graphs.get(graph, Habits()).replaced.keys()
            self._send([v for v in self._on_servers() if v.key in names], replaced)
        finally:
            self._fresh = self._eager = None

    def used_by(self, captures: Collection[Any]) -> list[ServedVariable]:
        """The variables whose handles a graph has captured."""
        found = {id(each) for each in captures}
        return [v for v in self._on_servers() if id(v.handle) in found]

    def require(self, closure: str, variables: Collection[Any]) -> None:
        """Raises InvalidArgument for variables of other scopes, which no rank would share."""
        for variable in variables:
            if getattr(variable, "store", None) is not self:
                raise InvalidArgument(
                    f"{closure} uses variable '{variable.name}', which was not made in the scope "
                    "of this ParameterServerStrategy, so each worker would have its own\n  advice: "
                    "make models, optimizers and metrics inside `with strategy.scope():`"
                )

    def _noted(self) -> tuple[list[Habits], int]:
        """The habits of the closure or graph at work, and of outer graphs; the graph's id."""
        if tf.executing_eagerly():
            return ([] if self._eager is None else [self._eager]), 0
        habits, inner = [], tf.compat.v1.get_default_graph()
        graph = inner
        while graph is not None:
            habits.append(self._of_graphs.setdefault(graph, Habits()))
            graph = getattr(graph, "outer_graph", None)
        return habits, id(inner)

    # ---- variables ----

    def before_reading(self, variable: ServedVariable) -> None:
        noted, graph = self._noted()
        for habits in noted:
            habits.note_reading(variable.key, graph)
        if not tf.executing_eagerly() or variable.key not in self._before:
            return
        stale = variable.key not in self._fresh if self._fresh is not None else self._outside
        if stale:
            self._pull([variable])

    @property
    def _outside(self) -> bool:
        """The chief's program reads or writes while closures run."""
        return self._leads and not self._settled

    @contextmanager
    def writing(self, variable: ServedVariable, replaces: bool) -> Iterator[None]:
        noted, graph = self._noted()
        for habits in noted:
            habits.note_writing(variable.key, replaces, graph)
        eager = tf.executing_eagerly() and variable.key in self._before
        if not eager or (self._fresh is None and not self._outside):
            yield
            return
        if self._fresh is None or variable.key not in self._fresh:
            self._pull([variable])
        yield
        if self._fresh is None:
            self._send([variable], {variable.key} if replaces else set())

    def _pull(self, variables: Collection[ServedVariable]) -> None:
        if not variables:
            return
        values = self._worker.pull(only=[v.key for v in variables])
        for variable in variables:
            variable.take(values[variable.key])
        self._before |= values
        if self._fresh is not None:
            self._fresh |= values.keys()

    def _changed(
        self, variables: Collection[ServedVariable]
    ) -> Iterator[tuple[ServedVariable, np.ndarray, np.ndarray]]:
        """Variables that have changed, each with its value now and the servers' value before."""
        for variable in variables:
            now, before = variable.copy(), self._before[variable.key]
            if not np.array_equal(now, before):
                yield variable, now, before

    def _send(self, variables: Collection[ServedVariable], replaced: Collection[str]) -> None:
        """Sends changed variables: values if they replace others, and otherwise differences."""
        values: dict[str, np.ndarray] = {}
        changes: dict[str, np.ndarray | Rows] = {}
        for variable, now, before in self._changed(variables):
            difference = None
            if variable.key not in replaced and now.dtype != bool:
                with np.errstate(all="ignore"):
                    difference = np.asarray(now - before)
            if difference is None or not np.isfinite(difference).all():
                values[variable.key] = now
            else:
                changes[variable.key] = Rows.found_in(difference)
            self._before[variable.key] = now
        if values:
            self._worker.assign(values)
        if changes:
            self._worker.push(changes)
        if values or changes:
            self._worker.flush()


def check(variable: Any) -> None:
    """Raises InvalidArgument for one that servers cannot have."""
    if not variable.shape.is_fully_defined():
        raise InvalidArgument(
            f"variable '{variable.name}' has the shape {shown(variable.shape)}; on servers all "
            "dimensions are known"
        )
    if variable.dtype.is_floating and variable.dtype.name == "bfloat16":
        raise InvalidArgument(
            f"variable '{variable.name}' is of bfloat16, which servers do not add\n"
            "  advice: float32, as mixed precision keeps variables"
        )
    if variable.dtype in (tf.string, tf.variant, tf.resource):
        raise InvalidArgument(
            f"variable '{variable.name}' is of {variable.dtype.name}; servers have numbers"
        )
