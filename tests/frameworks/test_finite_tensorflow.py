"""A gradient that is NaN or infinite on one rank, by TensorFlow: eagerly and in graphs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("tensorflow")

import tensorflow as tf
from rank_cases import make_tests, numerics, on_ranks, told

import farandole as fd
import farandole.tensorflow as hvd


def make(name: str, *, graph: bool, **options: Any) -> tuple[list[Any], Callable[[float], None]]:
    """Variables, and a step that multiplies the gradient of the second by a number."""
    dense = tf.Variable(tf.ones([3, 2]), name="dense")
    rows = tf.Variable(tf.ones([4, 2]), name=name)
    half = tf.Variable(tf.ones([2], tf.float16), name="half")

    def step(factor: tf.Tensor) -> None:
        with hvd.DistributedGradientTape(tf.GradientTape(), **options) as tape:
            found = tf.reduce_sum(tf.gather(rows, [1, 3])) * factor
            loss = tf.reduce_sum(dense) + found + tf.cast(tf.reduce_sum(half), tf.float32)
        variables = [dense, rows, half]
        for v, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            v.assign_sub(1e-3 * tf.convert_to_tensor(gradient))

    chosen: Any = tf.function(step) if graph else step
    return [dense, rows, half], lambda factor: chosen(tf.constant(factor))


def mine(bad: float) -> float:
    return bad if hvd.rank() == hvd.size() - 1 else 1.0


@on_ranks(2, 3)
def it_is_told_once_and_counted() -> None:
    for graph in False, True:
        for bad, word in (math.nan, "NaN"), (-math.inf, "infinite"):
            name = f"rows {graph} {word}"
            _, step = make(name, graph=graph)
            before = fd.nonfinite_steps()
            step(1.0)
            step(1.0)
            assert fd.nonfinite_steps() == before, graph
            with told(hvd.rank() in (0, hvd.size() - 1)) as texts:
                for _ in range(3):
                    step(mine(bad))
            assert fd.nonfinite_steps() == before + 3, graph
            for text in texts:
                assert f"rank {hvd.size() - 1} has a gradient that is {word}: '{name}'" in text


@on_ranks(2)
def it_is_an_error_on_every_rank_before_weights_change() -> None:
    with numerics("error"):
        for graph in False, True:
            variables, step = make(f"rows {graph}", graph=graph)
            step(1.0)
            step(1.0)
            weights = [v.numpy() for v in variables]
            with pytest.raises((fd.NumericsError, tf.errors.OpError)) as caught:
                step(mine(math.nan))
            assert "rank 1 has a gradient that is NaN: 'rows " in str(caught.value), graph
            for v, old in zip(variables, weights, strict=True):
                assert (v.numpy() == old).all(), graph
            step(1.0)


@on_ranks(2)
def nobody_looks_where_it_is_off() -> None:
    with numerics("off"), told(0):
        for graph in False, True:
            before = fd.nonfinite_steps()
            _, step = make(f"rows {graph}", graph=graph)
            step(1.0)
            step(mine(math.nan))
            assert fd.nonfinite_steps() == before


@on_ranks(2, 3)
def it_is_told_with_adasum() -> None:
    for graph in False, True:
        name = f"adasum {graph}"
        _, step = make(name, graph=graph, op=hvd.Adasum, sparse_as_dense=True)
        before = fd.nonfinite_steps()
        step(1.0)
        assert fd.nonfinite_steps() == before
        with told(hvd.rank() in (0, hvd.size() - 1)) as texts:
            for _ in range(2):
                step(mine(math.nan))
        assert fd.nonfinite_steps() == before + 2
        for text in texts:
            assert f"rank {hvd.size() - 1} has a gradient that is NaN: '{name}'" in text


def sgd(**options: Any) -> Any:
    plain = tf.compat.v1.train.GradientDescentOptimizer(0.1)
    return hvd.DistributedOptimizer(plain, **options)


def session_of(made: Callable[[], Any], name: str) -> Any:
    """A step of a program of TensorFlow 1, in which a gradient has that number."""
    session = tf.compat.v1.Session(graph=tf.Graph())
    with session.graph.as_default():
        factor = tf.compat.v1.placeholder(tf.float32, [])
        rows = tf.compat.v1.get_variable(name, initializer=tf.ones([4, 2]))
        other = tf.compat.v1.get_variable("other", initializer=tf.ones([3]))
        train = made().minimize(tf.reduce_sum(rows) * factor + tf.reduce_sum(other))
        session.run(tf.compat.v1.global_variables_initializer())

    def step(number: float) -> Any:
        session.run(train, {factor: number})
        return session.run([rows, other])

    return step


@on_ranks(2)
def it_is_told_in_sessions_of_tensorflow_1() -> None:
    for passes, op in (1, hvd.Average), (2, hvd.Average), (1, hvd.Adasum):
        name, how = f"v1_{passes}_{op}", {"backward_passes_per_step": passes, "op": op}
        step = session_of(lambda how=how: sgd(**how), name)
        before = fd.nonfinite_steps()
        for _ in range(passes):
            step(1.0)
        assert fd.nonfinite_steps() == before
        with told(1) as texts:
            for _ in range(2 * passes):
                step(mine(math.nan))
        assert fd.nonfinite_steps() == before + 2
        assert f"rank 1 has a gradient that is NaN: '{name}'" in texts[0]
    with numerics("error"):
        step = session_of(sgd, "v1")
        weights = step(1.0)
        with pytest.raises(tf.errors.OpError, match="rank 1 has a gradient that is NaN: 'v1'"):
            step(mine(math.nan))
        for new, old in zip(step(0.0), weights, strict=True):
            assert new.shape == old.shape
            assert not math.isnan(new.sum())


@on_ranks(2)
def a_step_that_tensorflow_1_skips_for_its_scaled_loss_is_none() -> None:
    mixed: Any = tf.compat.v1.mixed_precision
    before = fd.nonfinite_steps()
    try:
        step = session_of(lambda: mixed.enable_mixed_precision_graph_rewrite(sgd()), "scaled")
        with told(0):
            assert (step(1e36)[0] == 1).all()
    finally:
        mixed.disable_mixed_precision_graph_rewrite()
    assert fd.nonfinite_steps() == before


test_on_ranks = make_tests(__name__, "tensorflow")
