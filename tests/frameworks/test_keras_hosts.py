"""Strategies, pipelines and parameter servers of Keras models over two hosts give what they give in
one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from keras_work import Late, keras
from rank_cases import needs

import farandole as fd
from harness import World, split

hvd: Any = Late("farandole.keras")
strategies: Any = Late("farandole.strategy")
needs("keras", "tensorflow")

_rng = np.random.default_rng(3)
X = _rng.normal(size=(21, 5)).astype("float32")  # of three batches, the last of 5
Y = (X[:, :1] - X[:, 1:2]).astype("float32")


def net() -> Any:
    keras.utils.set_random_seed(1)
    layers = [keras.Input((5,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)]
    return keras.Sequential(layers)


HOW: dict[str, Any] = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}


def compiled(model: Any) -> Any:
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", run_eagerly=True)
    return model


def fitted(model: Any) -> Any:
    compiled(model).fit(X, Y, **HOW)
    return model


def same_as_alone(weights: list[Any]) -> None:
    for mine, right in zip(weights, fitted(net()).get_weights(), strict=True):
        np.testing.assert_allclose(np.array(mine), right, atol=1e-5)


def all_three() -> None:
    hvd.init()
    assert fd.cross_size() == 2
    with strategies.MultiWorkerMirroredStrategy().scope():
        mirrored = fitted(net())
    same_as_alone(mirrored.get_weights())
    weights = fitted(hvd.Pipeline(net(), micro_batches=3)).get_weights(root_rank=None)
    same_as_alone(weights)
    served = compiled(net())
    hvd.ParameterServer().fit(served, X, Y, **HOW)
    same_as_alone(served.get_weights())  # of one worker


@pytest.mark.timeout(200)
def test_two_hosts_are_as_one_process(spawn: Callable[..., World]) -> None:
    spawn(2, "keras on tensorflow", env=split("1,1")).run(all_three, timeout=180)
