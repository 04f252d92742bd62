"""Variables whose values ranks compare, eagerly and in graphs.

When a step runs, ranks first compare their models, a line a variable. An operation that waited
before that would wait for ever where models differ, so values are compared after it. Eagerly that
is a gather by name. In a graph the barrier that begins a step says whether weights are compared in
it, and a branch behind it has the op that does: the core counts steps and looks at values, so that
a graph calls no Python, and can be saved.

Graphs of TensorFlow 1 have no values outside of a session; theirs are not compared.
"""

from __future__ import annotations

import itertools
import secrets
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from farandole import _core
from farandole._core import Mismatch
from farandole.common._process_set import ProcessSet, global_process_set
from farandole.common._weights import looked_at, patient_weights, period
from farandole.tensorflow._calls import DTYPES, Request, run
from farandole.tensorflow._graph import check_place

BROADCAST = "hvd.broadcast_variables(model.variables, root_rank=0)"


class Different(Mismatch, tf.errors.FailedPreconditionError):  # type: ignore[misc]
    """A Mismatch without an op, as an op would raise it: farandole's class and TensorFlow's."""

    def __init__(self, error: Mismatch) -> None:
        tf.errors.FailedPreconditionError.__init__(self, None, None, str(error))
        self.__dict__.update(vars(error))


Named = Sequence[tuple[str, Any]]


class Compared:
    """Compares a model's weights as its steps begin.

    Args:
        names: of the variables.
        variables: the sources; those that are no variables are not compared.
        line: of a program, that makes weights equal.
        state: of an optimizer, of which a part of each variable is looked at.
    """

    def __init__(
        self,
        label: str,
        process_set: ProcessSet | None,
        variables: Sequence[Any],
        names: Sequence[str],
        line: str = BROADCAST,
        state: Named = (),
    ) -> None:
        check_place()
        ranks = process_set or global_process_set
        plain = [(name, raw(v)) for name, v in zip(names, variables, strict=True)]
        rows = [(n, v, False) for n, v in plain] + [(n, raw(v), True) for n, v in state]
        rows = [row for row in rows if hasattr(row[1], "assign") and row[1].dtype in DTYPES]
        self._names, self._held = [n for n, *_ in rows], [v for _, v, _ in rows]
        self._is_state = [is_state for *_, is_state in rows]
        self._label, self._ranks, self._line = label, ranks, line
        self._period = period()
        if not rows or not ranks.included() or _for_a_session():
            self._period = None

    @contextmanager
    def after_step(self) -> Iterator[None]:
        """A context around the eager reduction of a step's gradients, which compares models.

        Raises:
            Different: weights are not.
        """
        yield
        if self._period is None:
            return
        weights = patient_weights(self._label, self._names, self._line, self._ranks, self._held)
        if weights.waits:
            try:
                weights.begin_step(self._checksums)
            except Mismatch as error:
                raise Different(error) from None

    def add_to(self, opener: Request) -> None:
        """Makes the request begin a step of a graph, if weights are compared."""
        if self._period is not None:
            opener.kind, opener.prescale = "step", self._period
            opener.root = _number_of(self._held)

    def in_graph(self, opener: Request, begun: Any) -> Any:
        """The tensor that a step waits for once it has begun: the comparison, where it is due. Its
        error has the text of the Mismatch."""
        if self._period is None:
            return begun
        lines = [opener.called, self._line, *(name.replace("\n", " ") for name in self._names)]
        name = f"weights of {self._label}"

        def compare() -> Any:
            note, root = "\n".join(lines), opener.root
            request = Request("weights", self._values(), name, opener.set, root=root, note=note)
            with tf.control_dependencies(run(request)):
                return tf.constant(1)

        return tf.cond(tf.equal(begun, 1), compare, lambda: tf.constant(0))

    def _values(self) -> list[Any]:
        rows = zip(map(tf.convert_to_tensor, self._held), self._is_state, strict=True)
        return [_beginning_of(value) if is_state else value for value, is_state in rows]

    def _checksums(self) -> list[int]:
        return _core.checksums(
            [np.ascontiguousarray(v.numpy()).reshape(-1).view(np.uint8) for v in self._values()]
        )


def _beginning_of(value: Any) -> Any:
    count = value.shape.num_elements()
    return value if count is None else tf.reshape(value, [-1])[: looked_at(count)]


_numbers: dict[tuple[int, ...], tuple[int, list[weakref.ref[Any]]]] = {}
# From a random start, which graphs from files, with numbers of other processes, hardly have.
_next_number = itertools.count(secrets.randbits(30))


def _number_of(variables: Sequence[Any]) -> int:
    """The number of a model in this process: the same in all graphs that are made of it, in all
    worlds."""
    key = tuple(map(id, variables))
    number, refs = _numbers.get(key, (0, []))
    if not refs or any(ref() is None for ref in refs):
        for old in [k for k, (_, them) in _numbers.items() if any(r() is None for r in them)]:
            del _numbers[old]
        number = next(_next_number)
        _numbers[key] = number, [weakref.ref(variable) for variable in variables]
    return number


def _for_a_session() -> bool:
    """Whether this is a graph of TensorFlow 1, or a branch in one."""
    with tf.init_scope():
        return not tf.executing_eagerly()


def raw(variable: Any) -> Any:
    """The variable in which one of Keras holds its value; other variables as they are."""
    value = getattr(variable, "_value", None)  # None, too, before it is initialized
    return variable if value is None else value
