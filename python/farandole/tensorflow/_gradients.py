"""Gradients of our operations: other operations, which have gradients themselves."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from farandole import _world
from farandole.tensorflow._calls import (
    Request,
    gradient_of,
    members_when_run,
    number_when_run,
    place_when_run,
    rules,
    run,
    run_all,
)
from farandole.tensorflow._graph import goes_on, refused

_Tensors = Sequence[tf.Tensor]


def _name(request: Request) -> str | None:
    return f"gradient of {request.name}" if request.name else None


def _average(request: Request, gradients: _Tensors) -> Request:
    return Request("all_reduce", gradients, _name(request), request.set, "mean")


def _require_linear(request: Request) -> None:
    if request.op not in ("mean", "sum"):
        raise refused(f"{request.kind} by {request.op} has no gradient")


def _of_all_reduce(request: Request, _: _Tensors, gradients: _Tensors) -> list[tf.Tensor]:
    _require_linear(request)
    how = (request.set, request.op, request.prescale, request.postscale)
    return run(Request("all_reduce", gradients, _name(request), *how))


def _of_broadcast(request: Request, _: _Tensors, gradients: _Tensors) -> list[tf.Tensor]:
    averaged = run(_average(request, gradients))
    if goes_on():
        is_root = tf.equal(number_when_run(_world.rank), request.root)
        return [tf.where(is_root, each, tf.zeros_like(each)) for each in averaged]
    if _world.rank() == request.root:
        return averaged
    # A session runs nothing that its result does not need, and the root waits for all ranks.
    with tf.control_dependencies(averaged):
        return [tf.zeros_like(gradient) for gradient in gradients]


def _of_all_gather(request: Request, _: _Tensors, gradients: _Tensors) -> list[tf.Tensor]:
    """This rank's rows of the average."""
    rows = tf.stack([tf.shape(tensor, tf.int64)[0] for tensor in request.tensors])
    name = f"rows of {request.name}" if request.name else None
    count = Request("all_gather", [rows[None]], name, request.set)
    averaged, (by_rank,) = run_all([_average(request, gradients), count])
    begins = tf.cumsum(by_rank, exclusive=True)[place_when_run(request.set)]
    return [a[begins[i] : begins[i] + rows[i]] for i, a in enumerate(averaged)]


def _of_reduce_scatter(request: Request, _: _Tensors, gradients: _Tensors) -> list[tf.Tensor]:
    _require_linear(request)
    factor = request.prescale * request.postscale
    if request.op == "sum":
        size = members_when_run(request.set)
        factor *= size if isinstance(size, int) else tf.cast(size, tf.float64)
    scaled = [gradient * tf.cast(factor, gradient.dtype) for gradient in gradients]
    return run(Request("all_gather", scaled, _name(request), request.set))


def _of_all_to_all(request: Request, results: _Tensors, gradients: _Tensors) -> list[tf.Tensor]:
    """The rows go back to where they came from."""
    received = tf.cast(results[1], tf.int64)
    return run(Request("all_to_all", gradients[:1], _name(request), request.set, splits=received))[
        :1
    ]


rules.update(
    all_reduce=_of_all_reduce,
    broadcast=_of_broadcast,
    all_gather=_of_all_gather,
    reduce_scatter=_of_reduce_scatter,
    all_to_all=_of_all_to_all,
)


# ---- as TensorFlow asks for them ----


def _request_of(op: Any, tensors: _Tensors) -> Request:
    """The request that an op's attributes describe."""

    def text(attribute: str) -> str:
        value = op.get_attr(attribute)
        return value.decode() if isinstance(value, bytes) else str(value)

    def factor(attribute: str) -> float:
        return float(struct.unpack("<d", struct.pack("<q", op.get_attr(attribute)))[0])

    return Request(
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
    return gradient_of(_request_of(op, op.inputs), op.outputs, gradients)


for _op in ("AllReduce", "Broadcast", "AllGather", "ReduceScatter"):
    tf.RegisterGradient(f"Farandole{_op}")(_of_op)


def _of_all_to_all_op(op: Any, *gradients: Any) -> Any:
    return *gradient_of(_request_of(op, op.inputs[:1]), op.outputs, gradients), None


tf.RegisterGradient("FarandoleAllToAll")(_of_all_to_all_op)
tf.no_gradient("FarandoleBarrier")
tf.no_gradient("FarandoleJoin")
tf.no_gradient("FarandoleStep")
tf.no_gradient("FarandoleWeights")
