"""The same with pairs of ops, a start and a finish, and what they alone must show."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

import tensorflow as tf
import test_tensorflow_ops as ops
import test_tensorflow_steps as steps
import test_tensorflow_training as training
from rank_cases import begin_tensorflow, make_tests, on_ranks

import farandole.tensorflow as hvd
from farandole.tensorflow import _plugin


def prepare() -> None:
    os.environ["FARANDOLE_TF_OP"] = "pair"
    begin_tensorflow(threads=1)  # for all that blocks: what could deadlock does
    assert _plugin.uses_pairs()


@on_ranks(2)
def two_optimizers_in_one_function_do_not_deadlock() -> None:
    """Two independent sets of gradients, ready in another order on each rank."""
    a, b = tf.Variable([1.0]), tf.Variable([1.0])

    def slow(x: tf.Tensor, turns: int) -> tf.Tensor:
        y = tf.random.normal([200, 200])
        for _ in range(turns):
            y = tf.linalg.matmul(y, y) * 1e-3
        return x + 0 * tf.reduce_sum(y)

    @tf.function
    def step() -> list[tf.Tensor]:
        results = []
        for variable, turns in ((a, 5 * hvd.rank()), (b, 5 - 5 * hvd.rank())):
            with tf.GradientTape() as tape:
                loss = variable * (1.0 + hvd.rank())
            gradient = hvd.DistributedGradientTape(tape).gradient(loss, variable)
            results.append(hvd.allreduce(slow(gradient, turns), op=hvd.Sum))
        return results

    for _ in range(10):
        for result in step():
            np.testing.assert_array_equal(result, [3.0])


def again(case: Callable[[], None]) -> None:
    """A case of another module, run in the worlds of this one."""

    @functools.wraps(case)
    def run() -> None:
        case()

    run.__module__ = __name__
    globals()[case.__name__] = on_ranks(2)(run)


for _case in (
    ops.every_collective_is_right_in_a_function,
    ops.ranks_come_in_any_order,
    ops.equal_operations_are_neither_merged_nor_folded,
    ops.loops_and_branches_work,
    ops.calls_of_one_function_are_not_mixed_up,
    ops.gradients_are_those_of_the_joined_program,
    ops.disagreement_is_an_error_on_all_ranks_and_the_next_call_works,
    ops.graphs_of_tensorflow_1_work,
    training.ranks_together_train_as_one_process_does,
    training.embeddings_and_structures_and_unused_variables,
    training.what_differs_between_models_is_named,
    steps.gradients_come_in_opposite_orders,
    steps.two_models_in_turn_and_in_one_function,
    steps.a_step_that_one_rank_leaves_is_named_on_the_others,
    steps.a_step_that_all_ranks_leave_at_different_places_is_forgotten,
    steps.data_that_end_in_the_graph_end_a_step_before_it_began,
):
    again(_case)

test_on_ranks = make_tests(__name__, "tensorflow", prepare=prepare)
