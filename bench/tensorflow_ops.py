"""The cost of an operation in TensorFlow, beside other ways to carry it.

    farandole run -np 2 -- python bench/tensorflow_ops.py [--rounds 20] [--json FILE]
    farandole run -np 1 -- python bench/tensorflow_ops.py          the op alone, without other ranks

Each way is a function of 200 tensors of 64 bytes; ways alternate, and what is shown is the median
time of a call by 200, and what it is above the same without communication. Eagerly: one tensor a
call.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

import farandole as fd
import farandole.tensorflow as hvd

TENSORS = 200


def by_numpy(x: tf.Tensor) -> tf.Tensor:
    """The all-reduce of a program that has no ops of its own."""
    return tf.ensure_shape(tf.numpy_function(fd.all_reduce, [x], tf.float32), x.shape)


def one_by_one(way: Callable[[tf.Tensor], tf.Tensor]) -> Callable[[list[Any]], tf.Tensor]:
    return lambda xs: tf.add_n([way(x * 1.5) for x in xs])


def gradients(
    wrap: Callable[[tf.GradientTape], tf.GradientTape],
    each: Callable[[tf.Tensor], tf.Tensor] = lambda gradient: gradient,
) -> Callable[[list[Any]], tf.Tensor]:
    """The gradients of a step. The graph computes their inputs, so that they come one by one."""

    def of(xs: list[Any]) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(0.75 * tf.square(x)) for x in xs])
        return tf.add_n([each(gradient) for gradient in wrap(tape).gradient(loss, xs)])

    return of


GRAPHS: dict[str, Callable[[list[Any]], tf.Tensor]] = {
    "identity": one_by_one(tf.identity),
    "allreduce": one_by_one(lambda x: hvd.allreduce(x, op=hvd.Sum)),
    "grouped_allreduce": lambda xs: tf.add_n(
        hvd.grouped_allreduce([x * 1.5 for x in xs], op=hvd.Sum)
    ),
    "gradients alone": gradients(lambda tape: tape, tf.identity),
    "DistributedGradientTape": gradients(lambda t: hvd.DistributedGradientTape(t, op=hvd.Sum)),
}
EAGER: dict[str, Callable[[Any], tf.Tensor]] = {
    "eager identity": tf.identity,
    "eager allreduce": lambda x: hvd.allreduce(x, op=hvd.Sum, name="eager"),
    "eager numpy_function": by_numpy,
}

BASES = {  # what a way is compared with, if not with the identity
    "DistributedGradientTape": "gradients alone",
    **dict.fromkeys(EAGER, "eager identity"),
}


def seconds(call: Callable[[], Any], calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    tf.get_logger().setLevel("ERROR")  # functions of one line of code look like one, traced again
    tf.config.threading.set_inter_op_parallelism_threads(2)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()
    if hvd.size() == 1:  # with others, numpy_function's order would be anybody's guess
        GRAPHS["numpy_function"] = one_by_one(by_numpy)
    variables = [tf.Variable(np.full(16, i, np.float32)) for i in range(TENSORS)]
    calls = {}
    for label, way in GRAPHS.items():
        calls[label] = tf.function(lambda way=way: way(variables)), TENSORS, 5
    x = tf.constant(np.ones(16, np.float32))
    for label, eager in EAGER.items():
        calls[label] = (lambda eager=eager: eager(x)), 1, 50
    expected = 1.5 * sum(range(TENSORS))
    for label, (call, _, _) in calls.items():
        for _ in range(3):
            result = call()
        factor = 1 if label in ("identity", "eager identity", "gradients alone") else hvd.size()
        right = factor * (1.0 if label in EAGER else expected)
        assert np.allclose(result, right), f"{label} is wrong"
    times: dict[str, list[float]] = {label: [] for label in calls}
    for _ in range(arguments.rounds):
        for label, (call, tensors, repeat) in calls.items():
            hvd.barrier()
            times[label].append(seconds(call, repeat) / tensors * 1e6)
    if hvd.rank() != 0:
        return
    print(f"TensorFlow {tf.__version__}, {hvd.size()} ranks, us a tensor")
    medians = {label: statistics.median(row) for label, row in times.items()}
    rows = []
    for label, us in medians.items():
        base = BASES.get(label, "identity")
        above = us - medians[base]
        print(f"  {label:24} {us:8.2f}   above {base:16} {above:8.2f}")
        rows.append(
            {
                "benchmark": "tensorflow_ops",
                "ranks": hvd.size(),
                "way": label,
                "us": us,
                "above_us": above,
                "verified": True,  # asserted above
            }
        )
    if arguments.json:
        arguments.json.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


if __name__ == "__main__":
    main()
