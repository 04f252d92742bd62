"""Gradients of our operations: other operations, which have gradients themselves."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from farandole import _world
from farandole.common._process_set import members_of
from farandole.tensorflow._calls import Ask, run, run_all
from farandole.tensorflow._graph import refused

_Tensors = Sequence[tf.Tensor]


def gradient_of(ask: Ask, results: _Tensors, gradients: Sequence[Any]) -> list[Any]:
    """Of an operation's results by its tensors. Raises Refused where there is none."""
    if ask.kind not in _RULES:
        raise refused(f"{ask.kind} has no gradient")
    dense = [
        tf.zeros_like(result) if gradient is None else tf.convert_to_tensor(gradient)
        for gradient, result in zip(gradients, results, strict=True)
    ]
    return _RULES[ask.kind](ask, results, dense)


def _name(ask: Ask) -> str | None:
    return f"gradient of {ask.name}" if ask.name else None


def _average(ask: Ask, gradients: _Tensors) -> Ask:
    return Ask("all_reduce", gradients, _name(ask), ask.set, "mean")


def _require_linear(ask: Ask) -> None:
    if ask.op not in ("mean", "sum"):
        raise refused(f"{ask.kind} by {ask.op} has no gradient")


def _of_all_reduce(ask: Ask, _: _Tensors, gradients: _Tensors) -> list[tf.Tensor]:
    _require_linear(ask)
    how = (ask.set, ask.op, ask.prescale, ask.postscale)
    return run(Ask("all_reduce", gradients, _name(ask), *how))


def _of_broadcast(ask: Ask, _: _Tensors, gradients: _Tensors) -> list[tf.Tensor]:
    averaged = run(_average(ask, gradients))
    if _world.rank() == ask.root:
        return averaged
    # A session runs nothing that its result does not need, and the root waits for all ranks.
    with tf.control_dependencies(averaged):
        return [tf.zeros_like(gradient) for gradient in gradients]


def _of_all_gather(ask: Ask, _: _Tensors, gradients: _Tensors) -> list[tf.Tensor]:
    """This rank's rows of the average."""
    rows = tf.stack([tf.shape(tensor, tf.int64)[0] for tensor in ask.tensors])
    name = f"rows of {ask.name}" if ask.name else None
    count = Ask("all_gather", [rows[None]], name, ask.set)
    averaged, (by_rank,) = run_all([_average(ask, gradients), count])
    begins = tf.cumsum(by_rank, exclusive=True)[members_of(ask.set)[1]]
    return [a[begins[i] : begins[i] + rows[i]] for i, a in enumerate(averaged)]


def _of_reduce_scatter(ask: Ask, _: _Tensors, gradients: _Tensors) -> list[tf.Tensor]:
    _require_linear(ask)
    factor = ask.prescale * ask.postscale
    if ask.op == "sum":
        factor *= len(members_of(ask.set)[0])
    scaled = [gradient * tf.cast(factor, gradient.dtype) for gradient in gradients]
    return run(Ask("all_gather", scaled, _name(ask), ask.set))


def _of_all_to_all(ask: Ask, results: _Tensors, gradients: _Tensors) -> list[tf.Tensor]:
    """The rows go back to where they came from."""
    received = tf.cast(results[1], tf.int64)
    return run(Ask("all_to_all", gradients[:1], _name(ask), ask.set, splits=received))[:1]


_RULES: dict[str, Callable[[Ask, _Tensors, _Tensors], list[tf.Tensor]]] = {
    "all_reduce": _of_all_reduce,
    "broadcast": _of_broadcast,
    "all_gather": _of_all_gather,
    "reduce_scatter": _of_reduce_scatter,
    "all_to_all": _of_all_to_all,
}


# ---- as TensorFlow asks for them ----


def _ask_of(op: Any, tensors: _Tensors) -> Ask:
    """What an op's attributes say."""

    def text(attribute: str) -> str:
        value = op.get_attr(attribute)
        return value.decode() if isinstance(value, bytes) else str(value)

    def factor(attribute: str) -> float:
        return float(struct.unpack("<d", struct.pack("<q", op.get_attr(attribute)))[0])

    return Ask(
        text("kind"),
        tensors,
        text("tensor_name") or None,
        int(op.get_attr("set")),
        text("reduction"),
        factor("prescale"),
        factor("postscale"),
        int(op.get_attr("root")),
    )


def _of_op(op: Any, *gradients: Any) -> Any:
    return gradient_of(_ask_of(op, op.inputs), op.outputs, gradients)


for _op in ("AllReduce", "Broadcast", "AllGather", "ReduceScatter"):
    tf.RegisterGradient(f"Farandole{_op}")(_of_op)


def _of_all_to_all_op(op: Any, *gradients: Any) -> Any:
    return *gradient_of(_ask_of(op, op.inputs[:1]), op.outputs, gradients), None


tf.RegisterGradient("FarandoleAllToAll")(_of_all_to_all_op)
tf.no_gradient("FarandoleBarrier")
tf.no_gradient("FarandoleJoin")
