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


def make(name: str, *, graph: bool) -> tuple[list[Any], Callable[[float], None]]:
    """Variables, and a step that multiplies the gradient of the second by a number."""
    dense = tf.Variable(tf.ones([3, 2]), name="dense")
    rows = tf.Variable(tf.ones([4, 2]), name=name)
    half = tf.Variable(tf.ones([2], tf.float16), name="half")

    def step(factor: tf.Tensor) -> None:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
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


test_on_ranks = make_tests(__name__, "tensorflow")
