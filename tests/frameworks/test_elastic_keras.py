"""farandole.keras.elastic: fit goes on in worlds of other sizes, on every backend."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from keras_work import hvd, keras, values

import elastic_worlds
from elastic_worlds import Changes, Worlds
from harness import World

BATCH, BATCHES, EPOCHS = 6, 4, 4
BACKENDS = [
    pytest.param(f"keras on {name}", id=name)
    for name in ("jax", "tensorflow", "torch")
    if all(importlib.util.find_spec(each) for each in ("keras", name, f"farandole.{name}"))
]


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCHES, BATCH, 5)).astype("float32")
    return x, x[:, :, :1] - 2 * x[:, :, 1:2]


def net(seed: int) -> Any:
    keras.utils.set_random_seed(seed)
    layers = [
        keras.Input((5,)),
        keras.layers.GaussianNoise(1e-9),  # whose seed is a variable of the model
        keras.layers.Dense(4, activation="tanh"),
        keras.layers.Dense(1),
    ]
    return keras.Sequential(layers)


def alone(steps: Sequence[int]) -> list[np.ndarray]:
    """One process, which takes these batches."""
    model, (x, y) = net(1), data()
    model.compile(keras.optimizers.Adam(0.01), "mse")
    for step in steps:
        model.train_on_batch(x[step], y[step])
    return values(model)


def trained(own: int) -> tuple[list[int], list[np.ndarray], list[np.ndarray]]:
    """The sizes in which epochs ended; the weights, and those of one process."""
    elastic_worlds.begin()
    hvd.init()
    model = net(1 if own == 0 else 2 + own)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse", metrics=["mae"])
    state = hvd.elastic.KerasState(model, epoch=0, sizes=[])

    class Events(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
            if (own, state.epoch, batch) == (2, 1, 3):
                elastic_worlds.die()
            if (own, state.epoch, batch, hvd.size()) == (0, 2, 1, 2):
                elastic_worlds.hear(Changes(wanted=True, only_fewer=False))

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
            state.sizes = [*state.sizes, hvd.size()]

    @hvd.elastic.run
    def train(state: Any) -> None:
        share = BATCH // hvd.size()
        mine = slice(hvd.rank() * share, (hvd.rank() + 1) * share)
        x, y = (each[:, mine].reshape(-1, each.shape[2]) for each in data())
        callbacks = [
            Events(),
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.CommitStateCallback(state, batches_per_commit=3),
        ]
        model.fit(
            x, y, share, initial_epoch=state.epoch, epochs=EPOCHS, shuffle=False, verbose=0,
            callbacks=callbacks,
        )  # fmt: skip

    train(state)
    assert state.epoch == EPOCHS
    x, y = data()
    assert model.evaluate(x[0], y[0], verbose=0)[0] < 10
    whole = list(range(BATCHES))
    # Every third batch of a fit is committed, and each end of an epoch.
    steps = [*whole, 0, 1, *whole, 0, 1, *whole, *whole]
    return state.sizes, values(model), alone(steps)


@pytest.mark.parametrize("framework", BACKENDS)
def test_fit_goes_on_with_fewer_and_more_ranks(framework: str, spawn: Callable[..., World]) -> None:
    """A rank dies in the middle of an epoch, and then one comes, in the middle of another."""
    ranks = spawn(4, framework)
    for rank in range(4):
        ranks.start(trained, rank, ranks=[rank])
    worlds = Worlds(ranks)
    worlds.form(0, 1, 2)
    worlds.form(0, 1)
    worlds.form(0, 1, 3)
    for rank in (0, 1, 3):
        outcome = ranks.outcome(rank)
        assert outcome.error is None, outcome.trace
        sizes, mine, right = outcome.value
        assert sizes == [3, 2, 3, 3]
        for value, expected in zip(mine, right, strict=True):
            np.testing.assert_allclose(value, expected, atol=1e-5)


def alone_and_together(worlds: int) -> Any:
    """The weight of a model that fit has trained, in a job that is not elastic."""
    elastic_worlds.begin(elastic=False)
    hvd.init()
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.5)), "mae")
    for number in range(worlds):
        if number:
            hvd.shutdown()
            hvd.init()
        model.layers[0].kernel.assign([[0.0]])
        x = np.full((2, 1), hvd.rank() + 1.0)
        model.fit(x, x, batch_size=2, verbose=0)
    hvd.shutdown()
    return model.layers[0].kernel.numpy().item()


@pytest.mark.parametrize("framework", BACKENDS)
def test_fit_follows_worlds_of_any_job(framework: str, spawn: Callable[..., World]) -> None:
    """One rank alone, then two, then one."""
    ranks = spawn(3, framework)
    for rank, number in enumerate((3, 1, 2)):
        ranks.start(alone_and_together, number, ranks=[rank])
    worlds = Worlds(ranks)
    worlds.form(0)
    worlds.form(0, 2)
    worlds.form(0, 2, 1)
    for outcome in ranks.outcomes():
        assert outcome.error is None, outcome.trace
        assert outcome.value == 1.0  # half of the ranks' mean
