"""Operations in traced functions that call others: what they are called, and when they run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

import tensorflow as tf
from rank_cases import begin_tensorflow, make_tests, on_ranks

import farandole.tensorflow as hvd
from farandole.tensorflow import _plugin, _turns
from harness import World


def prepare() -> None:
    begin_tensorflow(threads=4)


def mine() -> float:
    return float(hvd.rank() + 1)


def late(x: tf.Tensor, on: int) -> tf.Tensor:
    """The tensor, on one rank after a while: operations arrive in different orders."""
    if hvd.rank() != on:
        return x

    def wait(value: Any) -> Any:
        time.sleep(0.2)
        return value

    waited = tf.numpy_function(wait, [x], x.dtype)
    waited.set_shape(x.shape)
    return waited


def total(x: tf.Tensor, name: str) -> tf.Tensor:
    return hvd.allreduce(x, name=name, op=hvd.Sum)


def gradient(variable: tf.Variable, factor: Any) -> tf.Tensor:
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(variable) * factor
    return hvd.DistributedGradientTape(tape, op=hvd.Sum).gradient(loss, [variable])[0]


@on_ranks(2)
def a_function_and_its_caller_may_use_the_same_name() -> None:
    @tf.function
    def metric(x: tf.Tensor) -> tf.Tensor:
        return total(late(x, 0), "m")

    @tf.function
    def outer(x: tf.Tensor) -> Any:
        before = total(late(x * 10, 1), "m")
        return metric(x), before

    for _ in range(2):  # traced by itself, before and after
        assert float(metric(tf.constant(mine()))) == 3
        assert [float(v) for v in outer(tf.constant(mine()))] == [3, 30]


@on_ranks(2)
def gradients_by_constants_run_where_they_are_used() -> None:
    """TensorFlow makes ones of a known shape without `x`, and of an unknown one from it: then a
    tape that watches `x` has them, on this rank alone."""
    if _plugin.uses_pairs():
        return  # which run whatever a tape has
    shape = [None] if hvd.rank() else [2]

    @tf.function(input_signature=[tf.TensorSpec(shape)])
    def counted(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            count = total(tf.reduce_sum(tf.ones_like(x)), "count")
            loss = total(tf.reduce_sum(x * x), "squares") / count
        return tape.gradient(loss, x)

    @tf.function(input_signature=[tf.TensorSpec(shape)])
    def watched(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            ones = tf.ones_like(x)
            tape.watch([x, ones])
            loss = total(tf.reduce_sum(ones * 3.0), "ones") * tf.reduce_sum(x)
        return tape.gradient(loss, ones)

    for _ in range(2):
        assert counted(tf.fill([2], mine())).numpy().tolist() == [mine()] * 2
        assert watched(tf.fill([2], mine())).numpy().tolist() == [18.0, 18.0]


@on_ranks(2)
def a_function_that_one_rank_alone_traces_twice_keeps_its_names() -> None:
    """As TensorFlow does where a function makes variables, also one that another calls."""
    made = [tf.Variable([0.0])] if hvd.rank() == 1 else []

    @tf.function
    def inner(factor: tf.Tensor) -> tf.Tensor:
        if not made:
            made.append(tf.Variable([0.0]))
        step = gradient(made[0], factor)
        made[0].assign_sub(step)
        return total(made[0], "after")

    @tf.function
    def outer(factor: tf.Tensor) -> tf.Tensor:
        return inner(factor)

    for i in range(1, 4):
        assert float(outer(tf.constant(mine()))[0]) == -6 * i


@on_ranks(1, 2)
def functions_of_datasets_are_refused() -> None:
    """They run ahead, several at once: an element would be summed with another, and an iterator
    that goes would wait for what other ranks no longer give."""

    @tf.function
    def traced_before(x: tf.Tensor) -> tf.Tensor:
        return total(x, "n")

    assert float(traced_before(tf.constant(1.0))) == hvd.size()
    numbers = tf.data.Dataset.range(4).map(lambda x: tf.cast(x, tf.float32))

    def my_reduce_of(x: tf.Tensor) -> tf.Tensor:
        return total(x, "n")

    for call in (
        lambda: numbers.map(my_reduce_of, num_parallel_calls=2),
        lambda: numbers.map(lambda x: hvd.allreduce(x)).prefetch(2),
        lambda: numbers.map(tf.function(lambda x: total(x, "n")), num_parallel_calls=2),
        lambda: numbers.map(lambda x: traced_before(x) + 1, num_parallel_calls=2),
        lambda: numbers.map(traced_before),
        lambda: numbers.map(lambda x: tf.cond(x > 1, lambda: total(x, "n"), lambda: x)),
        lambda: numbers.filter(lambda x: total(x, "n") > 0),
        tf.function(lambda: numbers.map(lambda x: total(x, "n")).reduce(0.0, tf.add)),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"function of tf\.data") as caught:
            call()
        assert "advice: reduce what the dataset gives" in str(caught.value)

    @tf.function
    def step() -> tf.Tensor:  # AutoGraph makes functions of the dataset of it, too
        summed = tf.constant(0.0)
        for x in numbers:
            summed += total(x, "n")
        return summed

    assert float(step()) == 6 * hvd.size()


@on_ranks(2)
def methods_of_one_name_may_call_each_other() -> None:
    class Inner(tf.Module):
        @tf.function
        def call(self, x: tf.Tensor) -> tf.Tensor:
            return hvd.allreduce(late(x, 0), op=hvd.Sum)

    class Outer(tf.Module):
        def __init__(self) -> None:
            self.inner = Inner()

        @tf.function
        def call(self, x: tf.Tensor) -> Any:
            before = hvd.allreduce(late(x * 10, 1), op=hvd.Sum)
            return self.inner.call(x), before

    both = Outer()
    both.inner.call(tf.constant(mine()))
    for _ in range(2):
        assert [float(v) for v in both.call(tf.constant(mine()))] == [3, 30]


@on_ranks(2)
def a_step_may_call_another_that_was_traced_before() -> None:
    d, g = tf.Variable(tf.ones([3]), name="d"), tf.Variable(tf.ones([2]), name="g")

    @tf.function
    def of_d(factor: tf.Tensor) -> tf.Tensor:
        return gradient(d, factor)

    @tf.function
    def both(factor: tf.Tensor, x: tf.Tensor) -> Any:
        return of_d(factor), gradient(g, factor * 10), gradient(g, tf.reduce_sum(x))

    of_d(tf.constant(mine()))
    for rows in (4, 4, 3):  # the last batch is shorter: traced once more
        got = both(tf.constant(mine()), tf.ones([rows]) * mine())
        assert [float(tensor[0]) for tensor in got] == [3, 30, 3 * rows]


@on_ranks(2)
def numbered_names_stay_apart_from_given_ones() -> None:
    w, another = tf.Variable(tf.ones([2]), name="w"), tf.Variable(tf.ones([2]), name="w_1")

    @tf.function
    def named(x: tf.Tensor) -> Any:
        return total(x, "x"), total(late(x * 10, 0), "x"), total(late(x * 100, 1), "x_1")

    @tf.function
    def steps(factor: tf.Tensor) -> Any:
        return gradient(w, factor), gradient(another, factor * 10), gradient(w, factor * 100)

    for _ in range(3):
        assert [float(v) for v in named(tf.constant(mine()))] == [3, 30, 300]
        assert [float(v[0]) for v in steps(tf.constant(mine()))] == [3, 30, 300]


@on_ranks(2)
def gradients_go_through_branches_and_loops() -> None:
    @tf.function
    def loop(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            state = x
            for _ in tf.range(3):
                state = state * 2 + hvd.allreduce(state, op=hvd.Sum)
        return state, tape.gradient(state, x)

    @tf.function
    def branch(x: tf.Tensor, taken: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.cond(taken, lambda: hvd.allreduce(x * x, op=hvd.Sum), lambda: x)
        return y, tape.gradient(y, x)

    # Gradients of the sum of all ranks' results: each pass doubles it, and adds it once a rank.
    state, by_x = loop(tf.constant(1.0))
    assert (float(state), float(by_x)) == (4.0**3, 4.0**3)
    y, by_x = branch(tf.constant(mine()), tf.constant(True))
    assert (float(y), float(by_x)) == (5.0, 2 * 2 * mine())
    y, by_x = branch(tf.constant(mine()), tf.constant(False))
    assert (float(y), float(by_x)) == (mine(), 1.0)
    point = tf.constant(mine())
    with tf.GradientTape() as tape:  # eagerly, over a function with a branch
        tape.watch(point)
        y = branch(point, tf.constant(True))[0]
    assert float(tape.gradient(y, point)) == 2 * 2 * mine()


@on_ranks(2)
def two_functions_of_one_maker_may_be_called_together() -> None:
    """Their operations have the same names, and they share no variable."""

    def make(variable: tf.Variable, late_on: int) -> Any:
        @tf.function
        def step(factor: tf.Tensor) -> tf.Tensor:
            return gradient(variable, late(factor, late_on))

        return step

    first = make(tf.Variable(tf.ones([2])), 0)
    second = make(tf.Variable(tf.ones([2])), 1)

    @tf.function
    def both(factor: tf.Tensor) -> Any:
        return first(factor), second(factor * 10)

    for _ in range(3):
        assert [float(v[0]) for v in both(tf.constant(mine()))] == [3, 30]


@on_ranks(2)
def calls_in_branches_and_loops_take_turns_with_those_beside_them() -> None:
    """Also where they share variables with others, which TensorFlow orders otherwise."""
    mark = tf.Variable(0.0)

    @tf.function
    def metric(x: tf.Tensor, on: int) -> tf.Tensor:
        return total(late(x, on), "m")

    @tf.function
    def through(x: tf.Tensor, on: int) -> tf.Tensor:
        mark.assign_add(1.0)
        return metric(x, on)

    @tf.function
    def outer(x: tf.Tensor, taken: tf.Tensor) -> Any:
        first = tf.cond(taken, lambda: through(x, 0), lambda: x)
        second = metric(x * 10, 1)
        rows = tf.TensorArray(tf.float32, 3)
        for i in tf.range(3):
            rows = rows.write(i, metric(x * tf.cast(i + 1, tf.float32) * 100, 0))
        return first, second, rows.stack(), metric(x * 1000, 1)

    for _ in range(2):
        first, second, rows, last = outer(tf.constant(mine()), tf.constant(True))
        assert [float(v) for v in (first, second, last)] == [3, 30, 3000]
        assert rows.numpy().tolist() == [300, 600, 900]
    assert float(mark) == 2


@on_ranks(2)
def loops_within_loops_do_not_get_mixed_up() -> None:
    """Inner iterations are called alike in every outer one. One rank is late in the first."""

    @tf.function
    def nested(x: tf.Tensor) -> tf.Tensor:
        rows = tf.TensorArray(tf.float32, 3)
        for i in tf.range(3):
            row = tf.TensorArray(tf.float32, 2)
            for j in tf.range(2):
                cell = x * tf.cast(10 * i + j + 1, tf.float32)
                row = row.write(j, total(late(cell, 0) if i == 0 else cell, "cell"))
            rows = rows.write(i, row.stack())
        return rows.stack()

    for _ in range(2):
        assert nested(tf.constant(mine())).numpy().tolist() == [[3, 6], [33, 36], [63, 66]]


def _untold() -> None:
    _turns.are_known = lambda: False  # type: ignore[assignment]
    prepare()
    two_functions_of_one_maker_may_be_called_together()
    calls_in_branches_and_loops_take_turns_with_those_beside_them()


def test_calls_take_turns_where_tensorflow_cannot_be_told(spawn: Callable[..., World]) -> None:
    spawn(2, "tensorflow").run(_untold, timeout=60)


class Model(tf.Module):
    def __init__(self) -> None:
        self.w = tf.Variable(tf.ones([3]), name="w")

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        return tf.linalg.matvec(x, self.w)

    @tf.function
    def step(self, factor: tf.Tensor, on: int) -> tf.Tensor:
        moved = gradient(self.w, late(factor, on))
        if tf.reduce_sum(moved) < 1000:
            moved = total(moved, "again") / hvd.size()
        return self.w.assign_sub(moved)


def _save(folder: str) -> None:
    prepare()
    model = Model()
    factor = tf.constant(mine())
    assert model.step(factor, -1).numpy().tolist() == [-2] * 3
    if hvd.rank() == 0:
        tf.saved_model.save(model, folder)
    hvd.barrier()
    loaded = tf.saved_model.load(folder)
    assert loaded(tf.ones([1, 3])).numpy().tolist() == [-6]

    @tf.function
    def both() -> Any:  # their operations have the same names
        return loaded.step(factor, -1), model.step(factor * 10, -1)

    for i in range(1, 4):
        assert [float(w[0]) for w in both()] == [-2 - 3 * i, -2 - 30 * i]


def _load(folder: str) -> None:
    """In a process that has made no operation yet."""
    prepare()
    first, second = (tf.saved_model.load(folder) for _ in range(2))

    @tf.function
    def both(factor: tf.Tensor) -> Any:
        return first.step(factor, -1), second.step(late(factor * 10, 0), -1)

    for i in range(1, 4):
        assert [float(w[0]) for w in both(tf.constant(mine()))] == [-2 - 3 * i, -2 - 30 * i]


def test_a_module_with_a_distributed_step_is_saved_and_loaded(
    spawn: Callable[..., World], tmp_path: Path
) -> None:
    for step in (_save, _load):
        spawn(2, "tensorflow").run(step, str(tmp_path), timeout=60)


test_on_ranks = make_tests(__name__, "tensorflow", prepare=prepare)
