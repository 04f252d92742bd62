"""`fit` with more batches on one rank than on another: a deadlock, told in batches and epochs."""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from harness import World

Spawn = Callable[..., World]
START = 100.0  # seconds: two ranks compile, and others want the cores
BATCHES = (6, 4)


def fit_unevenly() -> None:
    import keras

    import farandole.keras as hvd

    hvd.init()
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    x = np.ones((2 * BATCHES[hvd.rank()], 4), np.float32)
    callbacks = [hvd.callbacks.MetricAverageCallback()]
    model.fit(x, x[:, :1], batch_size=2, epochs=1, verbose=0, callbacks=callbacks)


@pytest.mark.timeout(START + 30)
@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_uneven_batches_are_a_deadlock_told_in_batches(spawn: Spawn, backend: str) -> None:
    # Not imported here: the backend is chosen first.
    if not all(importlib.util.find_spec(name) for name in ("keras", backend)):
        pytest.skip(f"Keras or {backend} is not installed")
    world = spawn(2, f"keras on {backend}", env={"FARANDOLE_WARN_AFTER": "1"})
    world.start(fit_unevenly)
    outcomes = world.outcomes(timeout=START)
    # JAX's steps run behind the program, which is ahead by one or two.
    ahead = "is in batch 5" if backend == "tensorflow" else "has begun "
    for o in outcomes:
        assert o.error is not None
        assert "ranks 0-1 wait for each other for ever: " in o.text, o.trace
        assert f"rank 0 {ahead}" in o.text
        assert "rank 1 ended epoch 1 after 4 batches and waits in " in o.text
        assert "test_keras_uneven.py, line " in o.text
    assert outcomes[1].error == "Deadlock"


LOOKS = 5000


def look_at_a_fit_that_goes_on() -> set[str]:
    import keras

    import farandole.keras as hvd
    from farandole import _watch
    from farandole.keras import _progress

    hvd.init()
    seen: set[str] = set()
    main = threading.get_ident()

    def look() -> None:
        for _ in range(LOOKS):
            frames = _watch._inner_first(sys._current_frames()[main])
            time.sleep(0)  # what was looked at may be gone now
            seen.add(_progress.describe(frames))

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    x = np.ones((16, 4), np.float32)
    thread = threading.Thread(target=look)
    thread.start()
    while thread.is_alive():
        model.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0)
        model.evaluate(x, x[:, :1], batch_size=4, verbose=0)
    return seen


def test_another_thread_may_look_at_any_moment(spawn: Spawn) -> None:
    if not all(importlib.util.find_spec(name) for name in ("keras", "tensorflow")):
        pytest.skip("Keras or TensorFlow is not installed")
    (seen,) = spawn(1, "keras on tensorflow").run(look_at_a_fit_that_goes_on, timeout=START)
    places = {f"is in batch {step} of epoch {epoch}" for step in range(1, 5) for epoch in (1, 2)}
    assert seen & places
    assert not {place for place in seen if place.startswith("is in")} - places
