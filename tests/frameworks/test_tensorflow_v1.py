"""Optimizers of TensorFlow 1 on ranks, and Adasum of a step's gradients, against numpy."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

import tensorflow as tf
from adasum_reference import numpys_adasum
from rank_cases import make_tests, on_ranks

import farandole as fd
import farandole.tensorflow as hvd

RATE = 0.25
SGD = tf.compat.v1.train.GradientDescentOptimizer
MOMENTUM = tf.compat.v1.train.MomentumOptimizer


def gradients_of(rank: int, step: int) -> list[np.ndarray]:
    random = np.random.default_rng(100 * step + rank)
    return [random.normal(size=size).astype(np.float32) for size in (5, 3)]


def mean_over_ranks(step: int) -> list[np.ndarray]:
    rows = [gradients_of(rank, step) for rank in range(hvd.size())]
    return [np.mean([row[i] for row in rows], 0) for i in range(2)]


def step_in_a_session(optimizer: Any, steps: int) -> list[list[np.ndarray]]:
    """The variables after each step of a program of TensorFlow 1."""
    seen = []
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        feeds = [tf.compat.v1.placeholder(tf.float32, [size]) for size in (5, 3)]
        variables = [
            tf.compat.v1.get_variable(f"v{i}", initializer=tf.ones(size))
            for i, size in enumerate((5, 3))
        ]
        loss = tf.add_n([tf.reduce_sum(v * g) for v, g in zip(variables, feeds, strict=True)])
        train = optimizer.minimize(loss)
        session.run(tf.compat.v1.global_variables_initializer())
        for step in range(steps):
            session.run(train, dict(zip(feeds, gradients_of(hvd.rank(), step), strict=True)))
            seen.append(session.run(variables))
    return seen


@on_ranks(2)
def local_variables_keep_their_own_gradients() -> None:
    for scaled in (True, False):
        for passes in (1, 2):
            optimizer = hvd.DistributedOptimizer(
                SGD(RATE), backward_passes_per_step=passes, scale_local_gradients=scaled
            )
            variables = [tf.Variable(tf.ones(size)) for size in (5, 3)]
            optimizer.register_local_var(variables[1])
            sums = [np.zeros(size, np.float32) for size in (5, 3)]
            for step in range(passes):
                mine = gradients_of(hvd.rank(), step)

                def loss(variables: Any = variables, mine: Any = mine) -> tf.Tensor:
                    terms = zip(variables, mine, strict=True)
                    return tf.add_n([tf.reduce_sum(v * g) for v, g in terms])

                optimizer.apply_gradients(optimizer.compute_gradients(loss, variables))
                sums[0] += mean_over_ranks(step)[0]
                sums[1] += mine[1] / (2 if scaled else 1)
            for variable, total in zip(variables, sums, strict=True):
                np.testing.assert_allclose(variable, 1 - RATE * total, rtol=1e-5, atol=1e-6)


def step_eagerly(optimizer: Any, steps: int, *, graph: bool) -> list[list[np.ndarray]]:
    variables = [tf.Variable(tf.ones(size)) for size in (5, 3)]

    def step(*gradients: tf.Tensor) -> None:
        def loss() -> tf.Tensor:
            return tf.add_n(
                [tf.reduce_sum(v * g) for v, g in zip(variables, gradients, strict=True)]
            )

        rows = optimizer.compute_gradients(loss, variables)
        optimizer.apply_gradients(rows)

    run = tf.function(step) if graph else step
    seen = []
    for i in range(steps):
        run(*[tf.constant(g) for g in gradients_of(hvd.rank(), i)])
        seen.append([v.numpy() for v in variables])
    return seen


def every_way(make: Any, steps: int) -> list[list[list[np.ndarray]]]:
    return [
        step_in_a_session(make(), steps),
        step_eagerly(make(), steps, graph=False),
        step_eagerly(make(), steps, graph=True),
    ]


def assert_equal_on_all_ranks(seen: list[list[np.ndarray]]) -> None:
    flat = np.concatenate([v for step in seen for v in step])
    assert np.array_equal(fd.all_reduce(flat, "min"), fd.all_reduce(flat, "max"))


@on_ranks(1, 2, 3)
def passes_are_added_up_and_the_last_one_applies() -> None:
    for average in (False, True):
        expected, at = [], [np.ones(5), np.ones(3)]
        for step in range(6):
            if step % 3 == 2:
                total = [
                    sum(mean_over_ranks(s)[i] for s in range(step - 2, step + 1)) for i in range(2)
                ]
                at = [v - RATE * g / (3 if average else 1) for v, g in zip(at, total, strict=True)]
            expected.append(at)
        for seen in every_way(
            lambda average=average: hvd.DistributedOptimizer(
                SGD(RATE), backward_passes_per_step=3, average_aggregated_gradients=average
            ),
            6,
        ):
            assert_equal_on_all_ranks(seen)
            for step, (found, right) in enumerate(zip(seen, expected, strict=True)):
                for a, b in zip(found, right, strict=True):
                    assert np.allclose(a, b, 0, 1e-5), (average, step, a, b)


@on_ranks(1, 2, 3)
def adasum_folds_what_every_rank_moves() -> None:
    expected, at = [], [np.ones(5), np.ones(3)]
    slots = [[np.zeros(5), np.zeros(3)] for _ in range(hvd.size())]
    for step in range(4):
        for rank, slot in enumerate(slots):
            slots[rank] = [0.5 * s + g for s, g in zip(slot, gradients_of(rank, step), strict=True)]
        at = [v + numpys_adasum([-RATE * s[i] for s in slots]) for i, v in enumerate(at)]
        expected.append(at)
    for seen in every_way(lambda: hvd.DistributedOptimizer(MOMENTUM(RATE, 0.5), op=hvd.Adasum), 4):
        assert_equal_on_all_ranks(seen)
        for found, right in zip(seen, expected, strict=True):
            for a, b in zip(found, right, strict=True):
                assert np.allclose(a, b, 0, 1e-5), (a, b)


@on_ranks(1, 2, 3)
def a_tape_reduces_by_adasum() -> None:
    variables = [tf.Variable(tf.ones(size)) for size in (5, 3)] + [tf.Variable(1.0)]
    rows = [gradients_of(rank, 0) for rank in range(hvd.size())]
    mine = [tf.constant(g) for g in rows[hvd.rank()]]

    def step() -> list[Any]:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(v * g) for v, g in zip(variables, mine, strict=False)])
        found: list[Any] = hvd.DistributedGradientTape(tape, op=hvd.Adasum).gradient(
            loss, variables
        )
        return found[:2] if found[2] is None else []  # None on all ranks: it stays None

    for run in (step, tf.function(step)):
        found = run()
        for i, gradient in enumerate(found):
            right = numpys_adasum([row[i] for row in rows])
            assert np.allclose(gradient, right, 0, 1e-5)
        assert len(found) == 2


@on_ranks(1, 2)
def what_does_not_go_together_is_refused() -> None:
    def refusal(call: Any) -> str:
        with pytest.raises(tf.errors.InvalidArgumentError) as caught:
            call()
        return str(caught.value)

    assert "backward_passes_per_step is 0" in refusal(
        lambda: hvd.DistributedOptimizer(SGD(RATE), backward_passes_per_step=0)
    )
    assert "op=Adasum moves the variables in every pass" in refusal(
        lambda: hvd.DistributedOptimizer(SGD(RATE), op=hvd.Adasum, backward_passes_per_step=2)
    )
    twice = hvd.DistributedOptimizer(SGD(RATE), backward_passes_per_step=2)
    assert "already" in refusal(lambda: hvd.DistributedOptimizer(twice))
    table = tf.Variable(tf.ones([4, 2]))

    def slices() -> tf.Tensor:
        return tf.reduce_sum(tf.gather(table, [1, 1]))

    assert "sparse_as_dense=True" in refusal(lambda: twice.compute_gradients(slices, [table]))
    with tf.GradientTape() as tape:
        loss = slices()
    tape = hvd.DistributedGradientTape(tape, op=hvd.Adasum)
    assert "takes dense gradients" in refusal(lambda: tape.gradient(loss, [table]))


test_on_ranks = make_tests(__name__, "tensorflow")
