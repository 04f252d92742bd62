"""Operations on tensors, as ops: checked, named, made.

An operation works on a list of tensors, which are one operation: none starts before all ranks have
submitted all of them. It is matched with the other ranks' by its name. Several operations can be
made together (`run_all`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np
import tensorflow as tf

from farandole import _core, _world
from farandole._arguments import type_of
from farandole.common._process_set import members_of
from farandole.common._reduction import share
from farandole.tensorflow import _graph, _plugin, _turns
from farandole.tensorflow._graph import refused

DTYPES = {getattr(tf, name): name for name in _core.dtypes if hasattr(tf, name)}


@dataclass
class Request:
    """One operation."""

    kind: str  # the engine's word, or the plug-in's
    tensors: Sequence[tf.Tensor]
    name: str | None = None
    set: int = 0
    op: str = "sum"
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    splits: tf.Tensor | None = None  # all_to_all: int64, empty for equal ones
    # Compared between ranks, line by line. For a part of a step: the name of the barrier before it.
    note: str = ""
    called: str = ""  # in its graph, once it has been made


_Tensors = Sequence[tf.Tensor]

# Gradient functions by kind, of a request, its results and their gradients. _gradients.py adds
# them; they make requests themselves.
rules: dict[str, Callable[[Request, _Tensors, _Tensors], list[tf.Tensor]]] = {}


def tensor_from(value: Any, what: str) -> tf.Tensor:
    """A dense tensor that can be sent. Raises Refused."""
    if isinstance(value, tf.IndexedSlices):
        raise refused(f"{what} is a tf.IndexedSlices; pass tf.convert_to_tensor(…) of it")
    try:
        tensor = tf.convert_to_tensor(value)
    except (TypeError, ValueError) as error:
        raise refused(f"{what} is not a tensor: {error}") from error
    if tensor.dtype not in DTYPES:
        raise refused(
            f"{what} is of {tensor.dtype.name}, which is not supported; there are "
            + ", ".join(DTYPES.values())
        )
    return tensor


def variable_from(variable: Any, name: str) -> tf.Tensor:
    """The value of a variable. Raises Refused for an object without assign()."""
    if not hasattr(variable, "assign"):
        raise refused(f"'{name}' is {type_of(variable)}, not a variable")
    return tensor_from(variable, f"variable '{name}'")


def tensors_from(values: Any, what: str = "tensors") -> list[tf.Tensor]:
    if not isinstance(values, list | tuple):
        raise refused(f"{what} is {type_of(values)}; pass a list of tensors")
    if not values:
        raise refused(f"the list of {what} is empty")
    return [tensor_from(value, f"tensor {i}") for i, value in enumerate(values)]


def run(request: Request) -> list[tf.Tensor]:
    """The results: one a tensor, and for all_to_all also the rows that came from each rank, for
    join the last rank to join, for a step whether weights are compared in it (csrc/base/plugin.h).
    A barrier has none, nor have weights."""
    return run_all([request])[0]


def run_all(requests: Sequence[Request]) -> list[list[tf.Tensor]]:
    """Several operations that are all started before any of them is waited for."""
    _graph.check_place()
    _plugin.ready()
    if not requests:
        return []
    if _graph.goes_on() and any(request.set for request in requests):
        raise refused(
            "a graph of an elastic job has an operation on a process set, which ends with its "
            "world; the graph goes on\n  advice: call it eagerly, or on all ranks"
        )
    raw = _plugin.ops()
    results = (
        _in_pairs(raw, requests)
        if _plugin.uses_pairs()
        else [_async(raw, request) for request in requests]
    )
    if not tf.executing_eagerly():
        _turns.take()
        for request, made in zip(requests, results, strict=True):
            _set_shapes(request, made)
            if not _plugin.uses_pairs() and _plugin.runs_unordered():
                _graph.keep(made)
    return results


def _bits(factor: float) -> int:
    """A double as an attribute: those of TensorFlow have 32 bits."""
    return int(struct.unpack("<q", struct.pack("<d", factor))[0])


def _attributes(request: Request) -> dict[str, Any]:
    request.called = _graph.unique_name(request.name, request.kind)
    return {
        "kind": request.kind,
        "tensor_name": request.called,
        "note": request.note,
        "set": request.set,
        "reduction": request.op,
        "prescale": _bits(request.prescale),
        "postscale": _bits(request.postscale),
        "root": index(request.root),
        "waits": int(tf.executing_eagerly()),
    }


def _async(raw: Any, request: Request) -> list[tf.Tensor]:
    op = getattr(raw, f"farandole_{request.kind}")
    how = _attributes(request)
    if request.kind == "all_to_all":
        return list(op(request.tensors[0], request.splits, **how))
    if request.kind in ("join", "barrier", "step"):
        return [op(**how)]  # of a barrier the op itself, or None
    if request.kind == "weights":
        return [op(list(request.tensors), **how)]  # likewise
    return list(op(list(request.tensors), **how))


def _in_pairs(raw: Any, requests: Sequence[Request]) -> list[list[tf.Tensor]]:
    """Adds gradients here, since none can be registered: each of the two ops knows only a half."""
    flat = [tensor for request in requests for tensor in request.tensors]
    weighs = any(request.kind == "weights" for request in requests)
    if weighs or not any(tensor.dtype.is_floating for tensor in flat):
        return _start_and_finish(raw, requests)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def apply(*_: tf.Tensor) -> Any:
        results = _start_and_finish(raw, requests)

        def gradients(*upstream: Any) -> Any:
            flows, at = [], 0
            with _graph.after(results):
                for request, made in zip(requests, results, strict=True):
                    flows += gradient_of(request, made, upstream[at : at + len(made)])
                    at += len(made)
            return flows

        return [tensor for made in results for tensor in made], gradients

    return _cut(apply(*flat), [len(_result_dtypes(request)) for request in requests])


def gradient_of(request: Request, results: _Tensors, gradients: Sequence[Any]) -> list[Any]:
    """The gradients of an operation's results by its tensors. Raises Refused if it has none."""
    if request.kind not in rules:
        raise refused(f"{request.kind} has no gradient")
    dense = [
        tf.zeros_like(result) if gradient is None else tf.convert_to_tensor(gradient)
        for gradient, result in zip(gradients, results, strict=True)
    ]
    if tf.executing_eagerly() or not all(map(_graph.is_constant, request.tensors)):
        return rules[request.kind](request, results, dense)
    # Other ranks' tapes may not have recorded this one. Its gradient is of use only to a program
    # that watches a constant, on all ranks.
    with _graph.only_if_used():
        return rules[request.kind](request, results, dense)


def _cut(flat: Any, lengths: Sequence[int]) -> list[Any]:
    parts, at = [], 0
    for length in lengths:
        parts.append(list(flat[at : at + length]))
        at += length
    return parts


def _start_and_finish(raw: Any, requests: Sequence[Request]) -> list[list[tf.Tensor]]:
    handles = []
    for request in requests:
        inputs = [*request.tensors, *([request.splits] if request.kind == "all_to_all" else [])]
        handles.append(raw.farandole_start(inputs, **_attributes(request)))
    dtypes = [_result_dtypes(request) for request in requests]
    # Nothing that blocks before everything has been started.
    with _graph.after_other_finishes(), tf.control_dependencies(handles):
        flat = raw.farandole_finish(handles, R=[dtype for each in dtypes for dtype in each])
    if not any(dtypes):  # barriers alone: it is the op itself, or None
        _graph.note_finish(flat)
        return [[flat] for _ in requests]
    if not tf.executing_eagerly():
        _graph.note_finish(flat[0].op)
    return _cut(flat, [len(each) for each in dtypes])


def number_when_run(ask: Callable[[], int], name: str | None = None) -> tf.Tensor:
    """The number (int32) that `ask` returns when the graph runs."""
    result = tf.numpy_function(lambda: np.int32(ask()), [], tf.int32, name=name)
    result.set_shape([])
    return result


def members_when_run(number: int) -> Any:
    """How many ranks a set has: a tensor where that may change."""
    if _graph.goes_on():
        return number_when_run(lambda: len(members_of(number)[0]))
    return len(members_of(number)[0])


def place_when_run(number: int) -> Any:
    """This rank's position in a set, likewise."""
    if _graph.goes_on():
        return number_when_run(lambda: members_of(number)[1])
    return members_of(number)[1]


def _result_dtypes(request: Request) -> list[tf.DType]:
    if request.kind == "weights":
        return []
    more = [tf.int32] if request.kind in ("all_to_all", "join", "step") else []
    return [tensor.dtype for tensor in request.tensors] + more


def _set_shapes(request: Request, results: list[tf.Tensor]) -> None:
    """Sets the results' shapes as far as they are known while a graph is made. The number of ranks
    is not known before init(), or where it may change."""
    known = _world.is_initialized() and not _graph.goes_on()
    ranks, place = members_of(request.set) if known else ([], -1)
    if request.kind in ("join", "step"):
        results[0].set_shape([])
    if request.kind == "weights":
        return
    for tensor, result in zip(request.tensors, results, strict=False):
        shape = tensor.shape
        if request.kind in ("all_reduce", "broadcast"):
            result.set_shape(shape)
        elif shape.rank:
            rows = None
            if request.kind == "reduce_scatter" and shape[0] is not None and ranks:
                rows = share(shape[0], len(ranks), place)
            result.set_shape([rows, *shape[1:]])
    if request.kind == "all_to_all":
        results[1].set_shape([len(ranks) or None])
