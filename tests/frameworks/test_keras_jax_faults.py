"""The errors of a Keras program on JAX when a rank dies."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax", minversion="0.10", reason="JAX is not installed")
pytest.importorskip("keras", reason="Keras is not installed")

from harness import World, listen, tell

START = 100.0  # seconds: two ranks compile, and others want the cores


def fit_in_silence(epochs: int, steps: int) -> str:
    """The error that ended fit(verbose=0), and after how many batches."""
    import keras

    import farandole as fd
    import farandole.keras as hvd

    hvd.init()
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    x = np.ones((4, 4), np.float32)
    model.fit(x, x[:, :1], batch_size=4, verbose=0)
    tell("trained")

    class Batches(keras.callbacks.Callback):
        seen = 0

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
            if epoch == 0:
                listen()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
            self.seen += 1

    batches = Batches()
    x = np.ones((4 * steps, 4), np.float32)
    with pytest.raises(fd.PeerLost) as caught:
        model.fit(x, x[:, :1], batch_size=4, epochs=epochs, verbose=0, callbacks=[batches])
    return f"{batches.seen} batches, then {caught.value}"


@pytest.mark.parametrize(("epochs", "steps"), [(1000, 20), (1, 1)], ids=["long", "one step"])
def test_fit_without_words_ends_when_a_rank_dies(
    spawn: Callable[..., World], epochs: int, steps: int
) -> None:
    world = spawn(2, "keras on jax")
    world.start(fit_in_silence, epochs, steps)
    for rank in range(2):
        assert world.hear(rank, START) == "trained"
    world.signal(1, signal.SIGKILL)
    world.say(0, "go on")
    outcome = world.outcome(0, START)
    assert outcome.error is None, outcome.trace
    seen, _, verdict = outcome.value.partition(" batches, then ")
    assert verdict.startswith("rank 1 (pid "), outcome.value
    assert int(seen) < epochs * steps or steps == 1, outcome.value
