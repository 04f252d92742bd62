"""Operations on tensors, as ops: checked, named, made.

An operation works on a list of tensors, which are one operation: none starts before all ranks have
submitted all of them. It is matched with the other ranks' by its name. Several operations can be
made together (`run_all`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import tensorflow as tf

from farandole import _core, _world
from farandole.common._process_set import members_of
from farandole.common._reductions import share
from farandole.tensorflow import _graph, _plugin, _turns
from farandole.tensorflow._graph import refused

DTYPES = {getattr(tf, name): name for name in _core.dtypes}


@dataclass
class Ask:
    """One operation."""

    kind: str  # the engine's word
    tensors: Sequence[tf.Tensor]
    name: str | None = None
    set: int = 0
    op: str = "sum"
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    splits: tf.Tensor | None = None  # all_to_all: int64, empty for equal ones
    # Compared between ranks, line by line. Of parts of a step: the name of the barrier before them.
    note: str = ""
    called: str = ""  # in its graph, once it has been made


_OPS = {
    "all_reduce": "farandole_all_reduce",
    "all_gather": "farandole_all_gather",
    "broadcast": "farandole_broadcast",
    "reduce_scatter": "farandole_reduce_scatter",
    "all_to_all": "farandole_all_to_all",
    "barrier": "farandole_barrier",
    "join": "farandole_join",
}


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
    """The value of what can be assigned to. Raises Refused."""
    if not hasattr(variable, "assign"):
        raise refused(f"'{name}' is a {type(variable).__name__}, not a variable")
    return tensor_from(variable, f"variable '{name}'")


def tensors_from(values: Any, what: str = "tensors") -> list[tf.Tensor]:
    if not isinstance(values, list | tuple):
        raise refused(f"{what} is a {type(values).__name__}; pass a list of tensors")
    if not values:
        raise refused(f"the list of {what} is empty")
    return [tensor_from(value, f"tensor {i}") for i, value in enumerate(values)]


def run(ask: Ask) -> list[tf.Tensor]:
    """The results: one a tensor, and for all_to_all also the rows that came from each rank, for
    join the last rank to join. A barrier has none."""
    return run_all([ask])[0]


def run_all(asks: Sequence[Ask]) -> list[list[tf.Tensor]]:
    """Several operations that are all started before any of them is waited for."""
    _graph.check_place()
    _plugin.ready()
    if not asks:
        return []
    raw = _plugin.ops()
    results = _in_pairs(raw, asks) if _plugin.uses_pairs() else [_async(raw, ask) for ask in asks]
    if not tf.executing_eagerly():
        _turns.take()
        for ask, made in zip(asks, results, strict=True):
            _set_shapes(ask, made)
            if not _plugin.uses_pairs() and _plugin.runs_unordered():
                _graph.keep(made)
    return results


def _bits(factor: float) -> int:
    """A double as an attribute: those of TensorFlow have 32 bits."""
    return int(struct.unpack("<q", struct.pack("<d", factor))[0])


def _attributes(ask: Ask) -> dict[str, Any]:
    ask.called = _graph.unique_name(ask.name, ask.kind)
    return {
        "kind": ask.kind,
        "tensor_name": ask.called,
        "note": ask.note,
        "set": ask.set,
        "reduction": ask.op,
        "prescale": _bits(ask.prescale),
        "postscale": _bits(ask.postscale),
        "root": index(ask.root),
        "waits": int(tf.executing_eagerly()),
    }


def _async(raw: Any, ask: Ask) -> list[tf.Tensor]:
    op = getattr(raw, _OPS[ask.kind])
    how = _attributes(ask)
    if ask.kind == "all_to_all":
        return list(op(ask.tensors[0], ask.splits, **how))
    if ask.kind == "join":
        return [op(**how)]
    if ask.kind == "barrier":
        return [op(**how)]  # the op itself, or None
    return list(op(list(ask.tensors), **how))


def _in_pairs(raw: Any, asks: Sequence[Ask]) -> list[list[tf.Tensor]]:
    """With gradients, which nothing could register: the two ops know only halves."""
    flat = [tensor for ask in asks for tensor in ask.tensors]
    if not any(tensor.dtype.is_floating for tensor in flat):
        return _start_and_finish(raw, asks)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def apply(*_: tf.Tensor) -> Any:
        results = _start_and_finish(raw, asks)

        def gradients(*upstream: Any) -> Any:
            from farandole.tensorflow._gradients import gradient_of

            flows, at = [], 0
            with _graph.after(results):
                for ask, made in zip(asks, results, strict=True):
                    flows += gradient_of(ask, made, upstream[at : at + len(made)])
                    at += len(made)
            return flows

        return [tensor for made in results for tensor in made], gradients

    return _cut(apply(*flat), [len(_result_dtypes(ask)) for ask in asks])


def _cut(flat: Any, lengths: Sequence[int]) -> list[Any]:
    parts, at = [], 0
    for length in lengths:
        parts.append(list(flat[at : at + length]))
        at += length
    return parts


def _start_and_finish(raw: Any, asks: Sequence[Ask]) -> list[list[tf.Tensor]]:
    handles = []
    for ask in asks:
        inputs = [*ask.tensors, *([ask.splits] if ask.kind == "all_to_all" else [])]
        handles.append(raw.farandole_start(inputs, **_attributes(ask)))
    dtypes = [_result_dtypes(ask) for ask in asks]
    # Nothing that blocks before everything has been started.
    with _graph.after_other_finishes(), tf.control_dependencies(handles):
        flat = raw.farandole_finish(handles, R=[dtype for each in dtypes for dtype in each])
    if not any(dtypes):  # barriers alone: it is the op itself, or None
        _graph.note_finish(flat)
        return [[flat] for _ in asks]
    if not tf.executing_eagerly():
        _graph.note_finish(flat[0].op)
    return _cut(flat, [len(each) for each in dtypes])


def _result_dtypes(ask: Ask) -> list[tf.DType]:
    more = {"all_to_all": [tf.int32], "join": [tf.int32]}.get(ask.kind, [])
    return [tensor.dtype for tensor in ask.tensors] + more


def _set_shapes(ask: Ask, results: list[tf.Tensor]) -> None:
    """What is known of the results' shapes while a graph is made: without the number of ranks where
    that is before init()."""
    ranks, place = members_of(ask.set) if _world.is_initialized() else ([], -1)
    if ask.kind == "join":
        results[0].set_shape([])
    for tensor, result in zip(ask.tensors, results, strict=False):
        shape = tensor.shape
        if ask.kind in ("all_reduce", "broadcast"):
            result.set_shape(shape)
        elif shape.rank:
            rows = None
            if ask.kind == "reduce_scatter" and shape[0] is not None and ranks:
                rows = share(shape[0], len(ranks), place)
            result.set_shape([rows, *shape[1:]])
    if ask.kind == "all_to_all":
        results[1].set_shape([len(ranks) or None])
