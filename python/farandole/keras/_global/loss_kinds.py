"""Tells whether a number that a user's own step computes is a mean or a sum over samples.

TensorFlow's graph is read from the number back to the data.

A mean over a rank's samples and their sum by a constant look alike in all else, and need other
weights. Only what is known to keep samples apart is read: what mixes them (a mask that leaves some
out, weights that are divided by their sum, a softmax over the batch) has divisors of its own. All
else is neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from math import prod
from typing import Any


class Kind(Enum):
    MEAN = "a mean over the samples of its batch"
    SUM = "a sum over the samples of its batch, by a constant"


_THROUGH = {"Identity", "Cast", "Neg"}
_TERMS = {"AddV2", "Add", "AddN", "Sub"}
_PRODUCTS = {"Mul", "RealDiv"}
_WEIGHTS = {"ReadVariableOp", "VarHandleOp"}
_DATA = {"IteratorGetNext", "Placeholder"}

# These operations compute each sample, along the first dimension, from that sample alone.
_EACH_ELEMENT = {
    *_THROUGH, *_TERMS, *_PRODUCTS, "Abs", "CheckNumerics", "ClipByValue", "DivNoNan", "Elu",
     "Equal", "Erf", "Exp", "Expm1", "Floor", "Greater", "GreaterEqual", "LeakyRelu", "Less",
    "LessEqual", "Log", "Log1p", "LogicalAnd", "LogicalNot", "LogicalOr", "Maximum", "Minimum",
    "NotEqual", "OnesLike", "Pow", "Reciprocal", "Relu", "Relu6", "Rsqrt", "Select", "SelectV2",
    "Selu", "Sigmoid", "Sign", "Softplus", "Softsign", "Sqrt", "Square", "SquaredDifference",
    "StopGradient", "Tanh", "ZerosLike",
}  # fmt: skip
_EACH_ROW = {"LogSoftmax", "Softmax", "SoftmaxCrossEntropyWithLogits",
             "SparseSoftmaxCrossEntropyWithLogits"}  # fmt: skip
_OF_THE_FIRST = {"AvgPool", "BatchMatMulV2", "BiasAdd", "Conv2D", "MatMul", "MaxPool"}
_REDUCTIONS = {"All", "Any", "Max", "Mean", "Min", "Prod", "Sum"}


def kind_of(number: Any, known: Mapping[int, Kind] | None = None) -> Kind | None:
    """Returns None if it is not known, as without a graph or with a fixed number of samples.

    Args:
        known: kinds of numbers, by id.
    """
    if not hasattr(number, "graph") or number.shape.rank != 0:
        return None
    return _Reading(known or {}).kind_of(number)


def compares_samples(outputs: Any) -> bool:
    """Whether rows of a matrix are products of one sample with each of the batch."""
    if not hasattr(outputs, "graph"):
        return False
    op = outputs.op
    while op.type in _EACH_ELEMENT and op.inputs:
        op = max(op.inputs, key=lambda each: each.shape.rank or 0).op
    if op.type not in ("MatMul", "BatchMatMulV2", "Einsum"):
        return False
    of_data = _Reading({}).follows_from_data
    return all(map(of_data, op.inputs)) and op.outputs[0].shape.as_list() == [None, None]


def follows_from(tensor: Any, given: Mapping[int, Any]) -> bool:
    """Whether a tensor of a graph is made of the given ones, of weights and numbers alone. An array
    may be of this process' own."""
    if not hasattr(tensor, "graph") or hasattr(tensor, "dense_shape"):
        return False
    waiting, seen = [tensor], set()
    while waiting:
        each = waiting.pop()
        op = each.op
        if id(each) in given or id(op) in seen or op.type in _WEIGHTS:
            continue
        seen.add(id(op))
        is_number = op.type == "Const" and (each.shape.rank == 0 or each.dtype.is_integer)
        if op.type in _DATA or not (op.inputs or is_number) or "Random" in op.type:
            return False
        waiting += op.inputs
    return True


class _Reading:
    def __init__(self, known: Mapping[int, Kind]) -> None:
        self._known = known
        self._of_data: dict[Any, bool] = {}  # by operation

    def kind_of(self, tensor: Any) -> Kind | None:
        if id(tensor) in self._known:
            return self._known[id(tensor)]
        op = tensor.op
        if op.type in _THROUGH:
            return self.kind_of(op.inputs[0])
        if op.type in _TERMS:
            return self._kind_of_terms(op)
        if op.type in _PRODUCTS:
            return self._kind_of_product(op)
        if op.type not in ("Sum", "Mean"):
            return None
        if not _has_samples(op.inputs[0]):
            return self.kind_of(op.inputs[0])
        if not _is_over_samples(op) or not self._keeps_samples_apart(op.inputs[0]):
            return None
        return Kind.MEAN if op.type == "Mean" else Kind.SUM

    def _kind_of_terms(self, op: Any) -> Kind | None:
        kinds = {self.kind_of(each) for each in op.inputs if self.follows_from_data(each)}
        kind = kinds.pop() if len(kinds) == 1 else None
        besides = not all(map(self.follows_from_data, op.inputs))  # a penalty of weights, say
        return None if besides and kind is Kind.SUM else kind

    def _kind_of_product(self, op: Any) -> Kind | None:
        first, second = op.inputs
        if op.type == "Mul" and not self.follows_from_data(first):
            first, second = second, first
        return None if self.follows_from_data(second) else self.kind_of(first)

    def follows_from_data(self, tensor: Any) -> bool:
        """Or from how many there are: it is not made of constants and weights alone."""
        waiting = [tensor.op]
        while waiting:  # graphs are deeper than Python's stack
            op = waiting[-1]
            inputs = [] if op.type in _WEIGHTS | _DATA else [each.op for each in op.inputs]
            missing = [each for each in inputs if each not in self._of_data]
            if missing and op not in self._of_data:
                self._of_data[op] = False  # loops end
                waiting.extend(missing)
                continue
            waiting.pop()
            self._of_data[op] = any(self._of_data[each] for each in inputs) or (
                op.type in _DATA and op.outputs[0].dtype.name != "resource"
            )
        return self._of_data[tensor.op]

    def _keeps_samples_apart(self, tensor: Any) -> bool:
        """Row by row it is of one sample, and of weights."""
        waiting, seen = [tensor], set()
        while waiting:
            each = waiting.pop()
            if id(each) in seen or not self.follows_from_data(each):
                continue
            seen.add(id(each))
            of = _rows_of(each, self.follows_from_data)
            if of is None or not _has_samples(each):
                return False
            waiting += of
        return True


def _has_samples(tensor: Any) -> bool:
    return bool(tensor.shape.rank) and tensor.shape[0] is None


def _rows_of(tensor: Any, of_data: Any) -> list[Any] | None:
    """The tensors whose rows it is made of, each row of the same row; None where that is not
    known."""
    op = tensor.op
    inputs = [each for each in op.inputs if of_data(each)]
    if op.type in _DATA:
        return []
    if op.type in _EACH_ELEMENT:
        # An input of fewer dimensions is repeated along the first one.
        return inputs if all(each.shape.rank == tensor.shape.rank for each in inputs) else None
    if op.type in _EACH_ROW:
        return inputs if all((each.shape.rank or 0) > 1 or each.dtype.is_integer
                             for each in inputs) else None  # fmt: skip
    if op.type in _OF_THE_FIRST:
        turned = op.type == "MatMul" and op.get_attr("transpose_a")
        alone = len(inputs) == 1 and inputs[0] is op.inputs[0]
        return inputs if alone and not turned else None
    if op.type in _REDUCTIONS:
        return [op.inputs[0]] if _is_over_samples(op) is False else None
    if op.type == "Reshape":
        return [op.inputs[0]] if _width(op.inputs[0]) == _width(tensor) is not None else None
    if op.type == "ExpandDims":
        return [op.inputs[0]] if _static(op.inputs[1]) not in (None, 0) else None
    if op.type == "Squeeze":
        axes = op.get_attr("squeeze_dims")
        return [op.inputs[0]] if axes and 0 not in axes else None
    if op.type == "StridedSlice":
        return [op.inputs[0]] if _takes_all_rows(op) else None
    return None


def _static(tensor: Any) -> int | None:
    import tensorflow as tf

    value = tf.get_static_value(tensor)
    return None if value is None or value.size != 1 else int(value.ravel()[0])


def _is_over_samples(op: Any) -> bool | None:
    """Whether a reduction is over the first dimension; None: not known."""
    import tensorflow as tf

    rank, axes = op.inputs[0].shape.rank, tf.get_static_value(op.inputs[1])
    if not rank or axes is None:
        return None
    return any(int(axis) % rank == 0 for axis in axes.ravel())


def _width(tensor: Any) -> int | None:
    """Returns the number of elements in a row, or None if it is not known."""
    if not _has_samples(tensor) or None in tensor.shape[1:].as_list():
        return None
    return int(prod(tensor.shape[1:].as_list()))


def _takes_all_rows(op: Any) -> bool:
    import tensorflow as tf

    strides = tf.get_static_value(op.inputs[3])
    whole = op.get_attr("begin_mask") & op.get_attr("end_mask") & 1
    moves = op.get_attr("new_axis_mask") | op.get_attr("ellipsis_mask")
    shrinks = op.get_attr("shrink_axis_mask") & 1
    return bool(whole) and not moves and not shrinks and strides is not None and strides[0] == 1
