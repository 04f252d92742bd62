"""Variables that start different, or come to be: named on every rank, and when."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

import numpy as np
import tensorflow as tf
from rank_cases import checking_weights, make_tests, on_ranks

import farandole as fd
import farandole.tensorflow as hvd

ADVICE = "hvd.broadcast_variables(model.variables, root_rank=0)"
Step = Callable[[], None]


class Model:
    """Two variables, and a step of gradient descent."""

    def __init__(self, seed: int = 3) -> None:
        noise = np.random.default_rng(seed)
        self.kernel = tf.Variable(noise.standard_normal((2, 3)), name="kernel")
        self.bias = tf.Variable(noise.standard_normal(3), name="bias")

    @property
    def variables(self) -> list[tf.Variable]:
        return [self.kernel, self.bias]

    def step(self, *, local: Any = None, **options: Any) -> None:
        x = tf.fill((1, 2), tf.cast(1.0 + hvd.rank(), tf.float64))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(x @ self.kernel + self.bias))
        tape = hvd.DistributedGradientTape(tape, **options)
        if local is not None:
            tape.register_local_source(local)
        for gradient, variable in zip(tape.gradient(loss, self.variables), self.variables):  # noqa: B905
            variable.assign_sub(0.01 * gradient)


def steps_of(model: Model, **options: Any) -> dict[str, Step]:
    """The same eagerly and as a graph, which is traced once."""
    return {
        "eager": lambda: model.step(**options),
        "graph": tf.function(lambda: model.step(**options)),
    }


def refused(call: Callable[[], Any]) -> str:
    """The error message of this call, which must be the same on all ranks."""
    with pytest.raises((fd.Error, tf.errors.OpError)) as caught:
        call()
    told = str(caught.value).partition("\n")[0].removeprefix("farandole.Mismatch: ")
    assert len(set(hvd.allgather_object(told))) == 1, told
    assert ADVICE in str(caught.value)
    return told


@on_ranks(2, 3)
def a_forgotten_broadcast_is_named_in_the_second_step() -> None:
    for kind in ("eager", "graph"):
        model = Model(seed=hvd.rank())
        step = steps_of(model)[kind]
        step()  # after which a program may still broadcast
        before = [v.numpy() for v in model.variables]
        told = refused(step)
        assert told.startswith("ranks start from different weights: 'kernel' has"), (kind, told)
        assert told.endswith("2 of 2 weights differ")
        for v, old in zip(model.variables, before, strict=True):
            np.testing.assert_array_equal(v.numpy(), old)


@on_ranks(2)
def the_error_is_one_of_ours_and_of_tensorflows() -> None:
    model = Model(seed=hvd.rank())
    model.step()
    with pytest.raises(tf.errors.FailedPreconditionError) as caught:
        model.step()
    assert isinstance(caught.value, fd.Mismatch)
    assert caught.value.tensor == "kernel"
    assert sorted(caught.value.values.values()) == [[0], [1]]


@on_ranks(2, 3)
def a_broadcast_after_the_first_step_comes_in_time() -> None:
    """As Horovod's examples do, with a function that is traced for the first batch and again."""

    def train(model: Model, first: bool) -> None:
        model.step()
        if first:
            hvd.broadcast_variables(model.variables, root_rank=0)

    for function in (train, tf.function(train)):
        model = Model(seed=hvd.rank())
        for number in range(4):
            function(model, number == 0)


@on_ranks(2)
def a_broadcast_between_calls_of_one_graph_comes_in_time() -> None:
    for kind in ("eager", "graph"):
        model = Model(seed=hvd.rank())
        step = steps_of(model)[kind]
        step()
        hvd.broadcast_variables(model.variables[:1], root_rank=0)
        hvd.broadcast_variables(model.variables[1:], root_rank=0)
        for _ in range(3):
            step()


@on_ranks(2)
def whoever_makes_them_equal_in_another_way_trains_on() -> None:
    for kind in ("eager", "graph"):
        model = Model(seed=hvd.rank())
        step = steps_of(model)[kind]
        step()
        for v in model.variables:
            v.assign(tf.ones_like(v))
        for _ in range(3):
            step()


@on_ranks(2)
def gradients_that_are_taken_twice_are_no_second_step() -> None:
    model = Model(seed=hvd.rank())
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.reduce_sum(model.kernel) + tf.reduce_sum(model.bias)
    tape = hvd.DistributedGradientTape(tape)
    for _ in range(3):
        tape.gradient(loss, model.variables)
    hvd.broadcast_variables(model.variables, root_rank=0)
    model.step()


@on_ranks(2, 3)
def one_bit_on_the_last_rank_is_enough() -> None:
    for kind in ("eager", "graph"):
        model = Model()
        if hvd.rank() == hvd.size() - 1:
            bits = model.bias.numpy().view(np.int64)
            bits[2] ^= 1
            model.bias.assign(bits.view(np.float64))
        step = steps_of(model)[kind]
        step()
        assert "'bias' has checksum" in refused(step), kind


@on_ranks(2, 3)
def steps_count_whatever_graph_they_are_in() -> None:
    """Each rank traces where it likes."""
    with checking_weights("4"):
        model = Model()
        for _ in range(2):
            tf.function(model.step)()
        step = tf.function(model.step)
        for number in range(3, 5):
            step = tf.function(model.step) if number == 3 + hvd.rank() else step
            step()
        model.bias.assign_add([0.0, float(hvd.rank()), 0.0])
        assert "before step 2, and differ before step 5: 'bias'" in refused(step)


@on_ranks(2)
def a_graph_compares_by_itself_and_from_a_file() -> None:
    """It calls no Python, which no file could have."""
    model = tf.Module()
    model.own = Model()
    model.variables_of = model.own.variables
    model.step = tf.function(model.own.step, input_signature=())
    with checking_weights("2"), tempfile.TemporaryDirectory() as place:
        tf.saved_model.save(model, place)
        loaded = tf.saved_model.load(place)
    operations = model.step.get_concrete_function().graph.get_operations()
    assert not [op for op in operations if "PyFunc" in op.type]
    for _ in range(3):
        loaded.step()
    loaded.variables_of[1].assign_add([0.0, float(hvd.rank()), 0.0])
    loaded.step()
    assert "before step 3, and differ before step 5: 'bias'" in refused(loaded.step)


@on_ranks(2)
def what_differs_from_the_start_is_said_again() -> None:
    for kind in ("eager", "graph"):
        step = steps_of(Model(seed=hvd.rank()))[kind]
        step()
        assert refused(step) == refused(step)


@on_ranks(2)
def nothing_is_compared_where_it_is_off() -> None:
    with checking_weights("off"):
        for kind in ("eager", "graph"):
            step = steps_of(Model(seed=hvd.rank()))[kind]
            for _ in range(3):
                step()


@on_ranks(2)
def what_comes_apart_later_is_found_every_k_steps() -> None:
    with checking_weights("2"):
        for kind in ("eager", "graph"):
            model = Model()
            step = steps_of(model)[kind]
            for _ in range(3):
                step()
            model.bias.assign_add([0.0, float(hvd.rank()), 0.0])
            step()
            told = refused(step)
            assert "before step 3, and differ before step 5: 'bias'" in told, (kind, told)


@on_ranks(2)
def ranks_that_update_apart_are_found_in_the_second_step() -> None:
    for kind in ("eager", "graph"):
        model = Model()
        step = steps_of(model)[kind]
        step()
        model.bias.assign_add([0.0, float(hvd.rank()), 0.0])
        told = refused(step)
        assert "before step 1, and differ before step 2: 'bias'" in told, (kind, told)


@on_ranks(2)
def local_sources_and_watched_tensors_are_not_compared() -> None:
    model = Model()
    model.bias.assign_add(tf.fill(3, tf.cast(hvd.rank(), tf.float64)))
    for _ in range(3):
        model.step(local=model.bias)
    for _ in range(3):
        x = tf.constant(float(hvd.rank()))
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x * x
        hvd.DistributedGradientTape(tape).gradient(y, [x])


@on_ranks(3)
def a_process_set_is_compared_by_itself() -> None:
    pair = hvd.add_process_set([0, 2])
    model = Model(seed=hvd.rank() % 2)  # equal in the set alone
    for _ in range(3):
        if pair.included():
            model.step(process_set=pair)
    other = Model(seed=hvd.rank())
    if pair.included():
        other.step(process_set=pair)
        with pytest.raises(fd.Mismatch) as caught:
            other.step(process_set=pair)
        assert sorted(caught.value.values.values()) == [[0], [2]]
    fd.barrier()
    hvd.remove_process_set(pair)


@on_ranks(2)
def optimizers_of_tensorflow_1_compare_where_they_run_eagerly() -> None:
    model = Model(seed=hvd.rank())
    optimizer = hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.01))

    def step() -> None:
        def loss() -> Any:
            return tf.reduce_sum(tf.square(model.kernel)) + tf.reduce_sum(model.bias)

        rows = optimizer.compute_gradients(loss, model.variables)
        optimizer.apply_gradients(rows)

    step()
    assert "'kernel' has" in refused(step)


test_on_ranks = make_tests(__name__, "tensorflow")
