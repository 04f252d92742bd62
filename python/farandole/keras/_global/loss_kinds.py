"""What a number that a step of the user's own computes does with samples: read off TensorFlow's
graph, from the number back to the operation that is over samples.

A mean over a rank's samples and their sum by a constant look alike in all else, and need other
weights. What is not understood is neither.
"""

from __future__ import annotations

from contextlib import suppress
from enum import Enum
from typing import Any


class Kind(Enum):
    MEAN = "a mean over the samples of its batch"
    SUM = "a sum over the samples of its batch, by a constant"


_THROUGH = {"Identity", "Cast", "Neg", "Reshape", "Squeeze", "CheckNumerics"}
_TERMS = {"AddV2", "Add", "AddN", "Sub"}
_PRODUCTS = {"Mul", "RealDiv", "DivNoNan"}
_COUNTS = {"Shape", "Size", "Rank"}
_WEIGHTS = {"ReadVariableOp", "VarHandleOp"}
_DATA = {"IteratorGetNext", "Placeholder"}


class _Of(Enum):
    """What a tensor follows from."""

    NOTHING = 0  # constants and weights
    COUNT = 1  # how many samples there are
    DATA = 2


def kind_of(number: Any) -> Kind | None:
    """Of a tensor of a graph whose batches have no fixed number of samples; else None."""
    if not hasattr(number, "graph") or number.shape.rank != 0:
        return None
    return _Reading().kind_of(number)


class _Reading:
    def __init__(self) -> None:
        self._known: dict[Any, _Of] = {}  # by operation

    def kind_of(self, tensor: Any) -> Kind | None:
        op = tensor.op
        if op.type in _THROUGH:
            return self.kind_of(op.inputs[0])
        if op.type in _TERMS:
            kinds = {self.kind_of(each) for each in op.inputs if self._is_of_data(each)}
            return kinds.pop() if len(kinds) == 1 else None
        if op.type in _PRODUCTS:
            return self._kind_of_product(op)
        if op.type not in ("Sum", "Mean"):
            return None
        if not _is_over_samples(op):
            return self.kind_of(op.inputs[0])
        if op.type == "Mean":
            return Kind.MEAN
        return Kind.MEAN if self._is_divided_by_count(op.inputs[0]) else Kind.SUM

    def _kind_of_product(self, op: Any) -> Kind | None:
        first, second = op.inputs
        if op.type == "Mul" and not self._is_of_data(first):
            first, second = second, first
        follows = self._follows_from(second)
        if follows is _Of.DATA:
            return None
        kind = self.kind_of(first)
        if follows is _Of.NOTHING or kind is None:
            return kind
        return Kind.MEAN if kind is Kind.SUM else None

    def _is_divided_by_count(self, tensor: Any) -> bool:
        """Each sample's number is."""
        op = tensor.op
        if op.type in _THROUGH:
            return self._is_divided_by_count(op.inputs[0])
        if op.type not in _PRODUCTS:
            return False
        follow = [self._follows_from(each) for each in op.inputs]
        if _Of.COUNT in follow:
            return True
        return any(
            self._is_divided_by_count(each)
            for each, of in zip(op.inputs, follow, strict=True)
            if of is _Of.DATA
        )

    def _is_of_data(self, tensor: Any) -> bool:
        return self._follows_from(tensor) is _Of.DATA

    def _follows_from(self, tensor: Any) -> _Of:
        waiting = [tensor.op]
        while waiting:  # graphs are deeper than Python's stack
            op = waiting[-1]
            inputs = [] if op.type in _WEIGHTS | _DATA else [each.op for each in op.inputs]
            missing = [each for each in inputs if each not in self._known]
            if missing and op not in self._known:
                self._known.setdefault(op, _Of.NOTHING)  # loops end
                waiting.extend(missing)
                continue
            waiting.pop()
            most = max((self._known[each] for each in inputs), key=_rank, default=_Of.NOTHING)
            if op.type in _DATA:
                most = _Of.NOTHING if op.outputs[0].dtype.name == "resource" else _Of.DATA
            elif op.type in _COUNTS and most is _Of.DATA:
                most = _Of.COUNT
            self._known[op] = most
        return self._known[tensor.op]


def _rank(of: _Of) -> int:
    return of.value


def _is_over_samples(op: Any) -> bool:
    """A reduction of what has samples first."""
    import tensorflow as tf

    shape = op.inputs[0].shape
    axes = tf.get_static_value(op.inputs[1])
    if shape.rank is None or shape.rank == 0 or shape[0] is not None or axes is None:
        return False
    return any(int(axis) % shape.rank == 0 for axis in axes.ravel())


class Seen(Exception):
    """Ends a trace: the first loss was there."""


def trace(step: Any, *batch: Any) -> None:
    """Makes a graph of the step up to its first loss, and computes nothing. A step that cannot be
    in a graph shows none."""
    import tensorflow as tf

    def spec(value: Any) -> Any:
        return None if value is None else tf.TensorSpec([None, *value.shape[1:]], value.dtype)

    with suppress(Exception):
        tf.function(step).get_concrete_function(*tf.nest.map_structure(spec, batch))
