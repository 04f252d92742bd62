"""The gradients of one call of a function: any order, calls left half-way, several models."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

import tensorflow as tf
from rank_cases import begin_tensorflow, make_tests, on_ranks

import farandole.tensorflow as hvd

Gradients = Callable[..., list[tf.Tensor]]
SIZES = (0, 1, 7, 1000, 40_000)  # elements; the last goes by itself, in place


def prepare() -> None:
    begin_tensorflow(threads=1)  # an op that held it while it waits would stop everything


def after(x: tf.Tensor, turns: int) -> tf.Tensor:
    """`x`, when so much has been computed."""
    y = tf.random.normal([64, 64])
    for _ in range(turns):
        y = tf.linalg.matmul(y, y) * 1e-3
    return tf.identity(x) if turns == 0 else x + tf.cast(0 * tf.reduce_sum(y), x.dtype)


def reduced(
    variables: Sequence[tf.Variable], gradient_of: Callable[[int, tf.Tensor], tf.Tensor]
) -> list[tf.Tensor]:
    """Gradients that are what `gradient_of(i, ones)` makes of them, summed over the ranks."""

    def shaped(i: int, variable: tf.Variable) -> tf.Tensor:
        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def through(x: tf.Tensor) -> Any:
            return tf.identity(x), lambda upstream: gradient_of(i, tf.ones_like(upstream))

        return tf.reduce_sum(through(variable))

    with tf.GradientTape() as tape:
        loss = tf.add_n([shaped(i, v) for i, v in enumerate(variables)])
    tape = hvd.DistributedGradientTape(tape, op=hvd.Sum)
    return list(tape.gradient(loss, list(variables)))


def variables_of(names: str) -> list[tf.Variable]:
    return [tf.Variable(tf.zeros(3), name=name) for name in names]


def each_is(gradients: Sequence[tf.Tensor], value: float) -> None:
    for gradient in gradients:
        np.testing.assert_array_equal(gradient, np.full(gradient.shape, value))


@on_ranks(2, 3)
def gradients_come_in_opposite_orders() -> None:
    rank, size = hvd.rank(), hvd.size()
    variables = [tf.Variable(tf.zeros(n), name=f"v{i}") for i, n in enumerate(SIZES * 4)]
    last = len(variables) - 1

    @tf.function
    def step() -> list[tf.Tensor]:
        def made(i: int, ones: tf.Tensor) -> tf.Tensor:
            return after(ones * (i + 1.0) * (rank + 1), i if rank % 2 else last - i)

        return reduced(variables, made)

    for _ in range(5):
        for i, gradient in enumerate(step()):
            np.testing.assert_array_equal(
                gradient, np.full(SIZES[i % len(SIZES)], (i + 1) * size * (size + 1) / 2)
            )


def breakable(names: str, order: Sequence[int]) -> Gradients:
    """A step whose backward breaks when the i-th of `order` is told to: that gradient never comes,
    nor those after it."""
    variables = variables_of(names)

    @tf.function
    def step(breaks: tf.Tensor) -> list[tf.Tensor]:
        guards: dict[int, tf.Operation] = {}
        before: list[tf.Operation] = []
        for place, i in enumerate(order):
            with tf.control_dependencies(before):
                guards[i] = tf.debugging.Assert(breaks[place] == 0, ["backward broke"])
            before = [guards[i]]

        def made(i: int, ones: tf.Tensor) -> tf.Tensor:
            with tf.control_dependencies([guards[i]]):
                return tf.identity(ones)

        return reduced(variables, made)

    return step


@on_ranks(2, 3)
def a_step_that_one_rank_leaves_is_named_on_the_others() -> None:
    step = breakable("abcd", (0, 1, 2, 3))
    none, third = tf.constant([0, 0, 0, 0]), tf.constant([0, 0, 1, 0])
    for _ in range(3):
        each_is(step(none), hvd.size())
        if hvd.rank() == 1:
            with pytest.raises(tf.errors.InvalidArgumentError, match="backward broke"):
                step(third)
        else:
            with pytest.raises(tf.errors.UnknownError) as raised:
                step(third * 0)
            text = str(raised.value)
            assert ".step/gradients of a step' was abandoned half-way on rank" in text, text
            assert "never came from all ranks: '" in text
            assert ".step/gradients/" in text or "/weights of gradients" in text, text
        each_is(step(none), hvd.size())


@on_ranks(2, 3)
def a_step_that_all_ranks_leave_at_different_places_is_forgotten() -> None:
    """Also when gradients of some ranks wait for those of others, which will not come."""
    step = breakable("abcd", (0, 1, 2, 3))
    none = tf.constant([0, 0, 0, 0])
    breaks = tf.one_hot(1 + hvd.rank(), 4, dtype=tf.int32)
    for _ in range(3):
        each_is(step(none), hvd.size())
        with pytest.raises(tf.errors.OpError):
            step(breaks)
    each_is(step(none), hvd.size())


@on_ranks(2)
def data_that_end_in_the_graph_end_a_step_before_it_began() -> None:
    variables = variables_of("ab")
    data = iter(tf.data.Dataset.range(2).repeat(1))

    @tf.function
    def step(iterator: Any) -> list[tf.Tensor]:
        x = tf.cast(next(iterator), tf.float32)
        return reduced(variables, lambda _, ones: ones * (x + 1))

    for _ in range(3):
        each_is(step(data), hvd.size())
        each_is(step(data), 2 * hvd.size())
        with pytest.raises(tf.errors.OutOfRangeError):
            step(data)
        data = iter(tf.data.Dataset.range(2))


@on_ranks(2)
def one_rank_traces_again() -> None:
    """A shorter last batch, on one rank alone."""
    variables = variables_of("ab")
    traces = []

    @tf.function
    def step(x: tf.Tensor) -> list[tf.Tensor]:
        traces.append(x.shape)
        return reduced(variables, lambda _, ones: ones * tf.reduce_mean(x))

    for i in range(6):
        rows = 3 if hvd.rank() == 1 and i % 2 else 4
        each_is(step(tf.ones(rows)), hvd.size())
    assert len(traces) == 1 + hvd.rank()


@on_ranks(2)
def two_models_in_turn_and_in_one_function() -> None:
    first, second = variables_of("ab"), variables_of("abc")
    one = tf.function(lambda: reduced(first, lambda _, ones: ones))
    other = tf.function(lambda: reduced(second, lambda _, ones: ones * 2))
    for _ in range(4):
        each_is(one(), hvd.size())
        each_is(other(), 2 * hvd.size())

    @tf.function
    def both() -> list[tf.Tensor]:
        rank = hvd.rank()
        left = reduced(first, lambda i, ones: after(ones, 4 * (i + rank)))
        right = reduced(second, lambda i, ones: after(ones, 4 * (3 - i - rank)))
        return left + right

    @tf.function
    def chained() -> list[tf.Tensor]:
        """The second needs the first's results, which others compute later."""
        left = reduced(first, lambda _, ones: ones)
        total = tf.reduce_sum(left[0]) / 3
        return left + [g / total for g in reduced(second, lambda _, ones: ones * total)]

    for _ in range(4):
        each_is(both(), hvd.size())
        each_is(chained(), hvd.size())


@on_ranks(2)
def gradients_in_loops_and_branches() -> None:
    variables = variables_of("ab")

    @tf.function
    def step(turns: tf.Tensor) -> tf.Tensor:
        total = tf.zeros(3)
        for turn in tf.range(turns):
            if turn % 2 == 0:
                factor = tf.cast(turn, tf.float32)
                total += tf.add_n(reduced(variables, lambda _, ones, f=factor: ones * f))
        return total

    for turns in (1, 4, 7):
        even = sum(range(0, turns, 2))
        np.testing.assert_array_equal(step(tf.constant(turns)), np.full(3, 2 * even * hvd.size()))


test_on_ranks = make_tests(__name__, "tensorflow", prepare=prepare)
