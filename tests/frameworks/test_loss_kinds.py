"""How a custom loss combines samples, read off TensorFlow's graph."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytest.importorskip("keras")

import keras
import tensorflow as tf
from rank_cases import make_tests, on_ranks

GLOBAL = 12


def each(x: Any) -> Any:
    return tf.reduce_mean(tf.square(x), -1)


def count(x: Any) -> Any:
    return tf.cast(tf.shape(x)[0], tf.float32)


weight = None  # made where TensorFlow may begin


def penalty() -> Any:
    return 0.1 * tf.nn.l2_loss(weight)


MEANS: dict[str, Callable[[Any], Any]] = {
    "of all": lambda x: tf.reduce_mean(tf.square(x)),
    "of samples": lambda x: tf.reduce_mean(each(x)),
    "by a number": lambda x: tf.reduce_mean(each(x)) / 3,
    "of outputs": lambda x: tf.reduce_sum(tf.reduce_mean(tf.square(x), 0)),
    "penalized": lambda x: tf.reduce_mean(each(x)) + penalty(),
    "of several": lambda x: tf.reduce_mean(each(x)) - 0.5 * tf.reduce_mean(x),
}
SUMS: dict[str, Callable[[Any], Any]] = {
    "by a number": lambda x: tf.reduce_sum(each(x)) / GLOBAL,
    "by a factor": lambda x: (1.0 / GLOBAL) * tf.reduce_sum(each(x)),
    "sample by sample": lambda x: tf.reduce_sum(each(x) / GLOBAL),
    "undivided": lambda x: -tf.reduce_sum(x),
    "of outputs": lambda x: tf.reduce_mean(tf.reduce_sum(tf.square(x), 0)) / GLOBAL,
    "of a weight": lambda x: tf.reduce_sum(each(x * weight)) / GLOBAL,
    "of a layer": lambda x: tf.reduce_sum(
        tf.nn.relu(tf.matmul(x, tf.reshape(weight, (2, 1))) + 1.0)[:, 0] / GLOBAL
    ),
    "clipped": lambda x: tf.reduce_sum(tf.clip_by_value(each(x), 0.0, 1.0)) / GLOBAL,
    "flattened": lambda x: tf.reduce_sum(tf.reshape(x, (-1, 1, 2))) / GLOBAL,
}
UNKNOWN: dict[str, Callable[[Any], Any]] = {
    "a root": lambda x: tf.sqrt(tf.reduce_sum(each(x))),
    "a mean and a sum": lambda x: tf.reduce_mean(each(x)) + tf.reduce_sum(each(x)),
    "by what samples have": lambda x: tf.reduce_sum(each(x)) / tf.reduce_sum(tf.abs(x)),
    "a product": lambda x: tf.reduce_mean(each(x)) * tf.reduce_mean(x),
    "in a function": lambda x: tf.function(lambda x: tf.reduce_sum(x))(x),
    "no number": lambda x: each(x),
    "a penalty": lambda _: penalty(),
    "a sum and a penalty": lambda x: tf.reduce_sum(each(x)) / GLOBAL + penalty(),
    # Divided by what follows from a shape, which may be that of samples.
    "by a count": lambda x: tf.reduce_sum(each(x)) / count(x),
    "by a width": lambda x: tf.reduce_sum(x) / (GLOBAL * tf.cast(tf.shape(x)[1], tf.float32)),
    "by a size": lambda x: tf.reduce_sum(x) / tf.cast(tf.size(x), tf.float32),
    "sample by sample": lambda x: tf.reduce_sum(each(x) / count(x)),
    # These mix samples: they have divisors of their own, or compare pairs.
    "a mask": lambda x: tf.reduce_mean(tf.boolean_mask(each(x), x[:, 0] > 0)),
    "weights by their sum": lambda x: tf.reduce_sum(
        each(x) * tf.abs(x[:, 0]) / tf.reduce_sum(tf.abs(x[:, 0]))
    ),
    "a softmax of samples": lambda x: tf.reduce_sum(tf.nn.softmax(x, axis=0) * x),
    "the hardest": lambda x: tf.reduce_mean(tf.sort(each(x))[2:]),
    "pairs": lambda x: tf.reduce_mean(tf.matmul(x, x, transpose_b=True)),
    "pairs by mistake": lambda x: tf.reduce_mean(tf.square(x[:, :1] - x[:, 0])),
    "a spread": lambda x: tf.reduce_mean(tf.square(x - tf.reduce_mean(x))),
    "running": lambda x: tf.reduce_mean(tf.cumsum(x, axis=0)),
    "of unit length": lambda x: tf.reduce_mean(tf.nn.l2_normalize(x, axis=0) * x),
    "turned": lambda x: tf.reduce_mean(tf.transpose(x)),
}


@on_ranks(1)
def a_loss_is_a_mean_or_a_sum_or_not_understood() -> None:
    from farandole.keras._global.loss_kinds import Kind, kind_of

    global weight
    weight = tf.Variable([1.0, 2.0])
    found: dict[tuple[str, str], Any] = {}
    tables = {"mean": MEANS, "sum": SUMS, "unknown": UNKNOWN}

    @tf.function
    def step(x: Any) -> None:
        for kind, table in tables.items():
            for name, loss in table.items():
                found[kind, name] = kind_of(loss(x))

    step.get_concrete_function(tf.TensorSpec([None, 2]))
    right = {"mean": Kind.MEAN, "sum": Kind.SUM, "unknown": None}
    wrong = {key: kind for key, kind in found.items() if kind is not right[key[0]]}
    assert len(found) == len(MEANS) + len(SUMS) + len(UNKNOWN)
    assert not wrong


def squared(y: Any, out: Any) -> Any:
    return tf.reduce_mean(tf.square(y - out), -1)


class Huber(keras.losses.Loss):  # type: ignore[misc, name-defined]
    def call(self, y: Any, out: Any) -> Any:
        return keras.losses.huber(y, out)


def counted(mark: float, y: Any, out: Any) -> tuple[Any, Any]:
    """The loss of each sample, and whether its target is not marked as left out."""
    counts = ~(tf.math.is_nan(y) if mark != mark else tf.equal(y, mark))
    each = tf.where(counts, tf.square(y - out), 0.0)
    return tf.reduce_sum(each, -1), tf.reduce_sum(tf.cast(counts, "float32"), -1)


def by_all_that_count(mark: float, y: Any, out: Any) -> Any:
    each, counts = counted(mark, y, out)
    return each / tf.reduce_mean(counts)


def by_its_own_that_count(mark: float, y: Any, out: Any) -> Any:
    return tf.math.divide_no_nan(*counted(mark, y, out))


MARKS = (-1.0, -100.0, 0.0, math.nan)  # of targets that do not count
APART: dict[str, Any] = {
    "a function": squared,
    "a class": Huber(),
    "of Keras": keras.losses.CosineSimilarity(),
    "squeezed": lambda y, out: tf.reduce_sum(tf.square(tf.squeeze(y) - tf.squeeze(out)), -1),
    "focal": lambda y, out: tf.reduce_sum(-y * tf.math.log(out) * (1.0 - out) ** 2.0, -1),
    "weights of a sample": lambda y, out: squared(y, out) * (1.0 + y[:, 0]),
    "in a function": lambda y, out: tf.function(squared)(y, out),
    "an index": lambda y, out: tf.gather([0.5, 2.0, 3.0], tf.cast(y[:, 0], tf.int32)) * out[:, 0],
    **{f"leaving out {mark}": partial(by_its_own_that_count, mark) for mark in MARKS},
    "branching": lambda y, out: tf.where(tf.abs(y - out) < 0.5, y - out, tf.square(out))[:, 0],
}
TOGETHER: dict[str, Any] = {
    "one number": lambda y, out: tf.reduce_mean(squared(y, out)),
    "of Keras, of pairs": keras.losses.Circle(),
    "pairs": lambda y, out: tf.reduce_sum(tf.nn.softmax(tf.matmul(y, out, transpose_b=True)), 0),
    "some": lambda y, out: tf.boolean_mask(squared(y, out), y[:, 0] > -1.0),
    "those that are none": lambda y, out: tf.gather(squared(y, out), tf.where(y[:, 0] > 9.0)),
    "weights by their sum": lambda y, out: squared(y, out) * y[:, 0] / tf.reduce_sum(y[:, 0]),
    "of one class": lambda y, out: (
        squared(y, out) * tf.reduce_sum(tf.cast(y == y[:, :1], "float32"))
    ),
    **{f"counting {mark}": partial(by_all_that_count, mark) for mark in MARKS},
    "a spread": lambda y, out: squared(y, out) + tf.math.reduce_variance(out),
    "the next one": lambda y, out: squared(tf.roll(y, 1, 0), out),
    "not to be tried": lambda y, out: squared(y, tf.ensure_shape(out, (7, 2))),
}


@on_ranks(1)
def losses_that_keep_samples_apart_are_found() -> None:
    from keras.src.losses.losses import LossFunctionWrapper

    from farandole.keras._global.samples_apart import keeps_samples_apart

    found: dict[str, bool] = {}
    spec = tf.TensorSpec([None, 2])
    for name, given in (APART | TOGETHER).items():
        loss = given if isinstance(given, keras.losses.Loss) else LossFunctionWrapper(given)

        @tf.function
        def step(y: Any, out: Any, name: str = name, loss: Any = loss) -> None:
            found[name] = keeps_samples_apart(loss, y, out)

        step.get_concrete_function(spec, spec)
    assert {name for name, apart in found.items() if apart} == set(APART)
    assert found.keys() == (APART | TOGETHER).keys()


@on_ranks(1)
def nothing_is_known_without_a_graph_or_of_batches_of_one_size() -> None:
    from farandole.keras._global.loss_kinds import kind_of

    x = tf.ones((4, 2))
    assert kind_of(tf.reduce_sum(x) / GLOBAL) is None
    found: list[Any] = []

    @tf.function
    def step(x: Any) -> None:
        found.append(kind_of(tf.reduce_sum(x) / GLOBAL))

    step.get_concrete_function(tf.TensorSpec([4, 2]))
    assert found == [None]


test_on_ranks = make_tests(__name__, "tensorflow")
