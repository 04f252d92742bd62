"""farandole.tensorflow with tensors on this rank's device, eagerly and in functions: collectives
beside numpy, trainings beside the same training in one process. Tensors go by way of the host.
Cases of cases.py."""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
from cases import Differs, Skipped, asked, compared, main, my_device, needs

import farandole as fd

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")  # ranks share the device

STEPS, ROWS, WIDE = 4, 8, 48
TOLERANCE = 1e-5
SERIAL = "training in one process"
place = ""  # as tf.device() names it


def begin() -> None:
    needs("tensorflow")
    import tensorflow as tf

    devices = tf.config.list_physical_devices("CPU" if asked.host else "GPU")
    if not devices:
        raise Skipped("this TensorFlow sees no device")
    tf.config.experimental.enable_tensor_float_32_execution(False)
    tf.config.set_soft_device_placement(False)
    import farandole.tensorflow as hvd

    hvd.init()
    global place
    place = "/CPU:0" if asked.host else f"/GPU:{my_device(len(devices))}"


def of_device(tensors: Any) -> list[Any]:
    """Their values; they must lie there."""
    for tensor in tensors:
        if not tensor.device.endswith(place.replace("/", "device:")):
            raise Differs(f"a result is on {tensor.device}, not on {place}")
    return [tensor.numpy() for tensor in tensors]


# ---- collectives ----


def numbers(rank: int, count: int) -> Any:
    """Small integers, of which every sum is exact."""
    return np.random.default_rng(rank).integers(-9, 9, (count, 2)).astype(np.float32)


def collectives(in_function: bool) -> str:
    import tensorflow as tf

    import farandole.tensorflow as hvd

    size, rank = fd.size(), fd.rank()

    def program(x: Any) -> Any:
        n = int(x.shape[0])
        return [
            hvd.allreduce(x, op=hvd.Sum, name=f"sum {n}"),
            hvd.broadcast(x, size - 1, name=f"broadcast {n}"),
            hvd.allgather(x, name=f"gather {n}"),
            hvd.reducescatter(x, op=hvd.Sum, name=f"scatter {n}"),
        ]

    run = tf.function(program) if in_function else program
    found = ""
    for count in (size, 50_000 * size):
        parts = [numbers(r, count) for r in range(size)]
        total, share = sum(parts[1:], parts[0]), count // size
        wanted = [total, parts[-1], np.concatenate(parts)]
        wanted.append(total[rank * share : (rank + 1) * share])
        with tf.device(place):
            found = compared(
                of_device(run(tf.constant(parts[rank]))), wanted, 0.0, "numpy's results"
            )
    return found


# ---- training ----


def network() -> Any:
    import tensorflow as tf

    generator = np.random.default_rng(1)
    shapes = [(WIDE, 128), (128, 130), (130, 3)]
    drawn = [0.1 * generator.standard_normal(shape).astype(np.float32) for shape in shapes]
    return [tf.Variable(each, name=f"w{i}") for i, each in enumerate(drawn)]


def loss_of(params: Any, x: Any) -> Any:
    import tensorflow as tf

    for w in params[:-1]:
        x = tf.tanh(x @ w)
    return tf.reduce_mean((x @ params[-1] - 1) ** 2)


def batch(step: int, rank: int) -> Any:
    import tensorflow as tf

    drawn = np.random.default_rng(100 * step + rank).standard_normal((ROWS, WIDE))
    return tf.constant(drawn.astype(np.float32))


def train(in_function: bool) -> str:
    import tensorflow as tf

    import farandole.tensorflow as hvd

    def gradients(params: Any, x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(params, x)
        return hvd.DistributedGradientTape(tape).gradient(loss, params)

    with tf.device(place):
        params = network()
        run = tf.function(gradients) if in_function else gradients
        for step in range(STEPS):
            for p, g in zip(params, run(params, batch(step, fd.rank())), strict=True):
                p.assign_sub(0.3 * g)
        mine = [p.read_value() for p in params]
        return compared(of_device(mine), _alone(), TOLERANCE, SERIAL)


def _alone() -> Any:
    import tensorflow as tf

    params = network()
    for step in range(STEPS):
        parts = []
        for rank in range(fd.size()):
            with tf.GradientTape() as tape:
                loss = loss_of(params, batch(step, rank))
            parts.append(tape.gradient(loss, params))
        for p, *each in zip(params, *parts, strict=True):
            p.assign_sub(0.3 * (sum(each[1:], each[0]) / len(each)))
    return [p.numpy() for p in params]


CASES = {
    "collectives": lambda: collectives(in_function=False),
    "collectives in a function": lambda: collectives(in_function=True),
    "training": lambda: train(in_function=False),
    "training in a function": lambda: train(in_function=True),
}

if __name__ == "__main__":
    sys.exit(main(CASES, begin, fd.shutdown))
