"""Where TensorFlow may place our ops: on GPUs, too, with tensors of the host. No GPU is needed:
what is registered is looked at, and a place that is not there is the CPU."""

from __future__ import annotations

import os

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

import tensorflow as tf
from rank_cases import make_tests, on_ranks
from tensorflow.python.framework import kernels, op_def_registry

import farandole.tensorflow as hvd

OPS = "AllReduce AllGather Broadcast ReduceScatter AllToAll Barrier Join Start Finish".split()


@on_ranks(1)
def every_op_has_a_kernel_for_gpus_whose_tensors_are_the_hosts() -> None:
    for op in (f"Farandole{name}" for name in OPS):
        definition = op_def_registry.get(op)
        arguments = {a.name for a in [*definition.input_arg, *definition.output_arg]}
        registered = kernels.get_registered_kernels_for_op(op).kernel
        on_host = {kernel.device_type: set(kernel.host_memory_arg) for kernel in registered}
        assert on_host == {"CPU": set(), "GPU": arguments}, op


@on_ranks(2)
def a_program_may_name_a_gpu() -> None:
    """Without a GPU the op runs on the CPU, as TensorFlow's own ops do."""

    def results() -> list[tf.Tensor]:
        with tf.device("/GPU:0"):
            x = tf.ones([5]) * (hvd.rank() + 1.0)
            return [
                hvd.allreduce(x, op=hvd.Sum, name="sum"),
                hvd.allgather(x, name="all"),
                hvd.broadcast(x, 1, name="root"),
                *hvd.alltoall(tf.range(4.0), [1, 3], name="parts"),
            ]

    for made in (results(), tf.function(results)()):
        total, gathered, root, parts, received = made
        np.testing.assert_array_equal(total, [3.0] * 5)
        np.testing.assert_array_equal(gathered, [1.0] * 5 + [2.0] * 5)
        np.testing.assert_array_equal(root, [2.0] * 5)
        assert parts.shape == (2 if hvd.rank() == 0 else 6,)
        np.testing.assert_array_equal(received, [1, 1] if hvd.rank() == 0 else [3, 3])


test_on_ranks = make_tests(__name__, "tensorflow")
