"""Helpers that the cases of farandole.keras share (keras_cases.py): data, a model, a reference.

Ranks take parts of every batch; the reference is one process with the whole batch: rank 0, to which
the others are equal in every bit.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

BATCH = 8  # of all ranks together
EPOCHS = 3  # of 8 batches


class Late:
    """A module, imported where something of it is used first: on ranks alone, whose nursery has
    chosen Keras' backend."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


keras: Any = Late("keras")
hvd: Any = Late("farandole.keras")


def backend() -> str:
    return str(keras.backend.backend())


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 8)).astype("float32")
    return x, (x[:, :1] * 2 - x[:, 1:2]).astype("float32")


def part() -> tuple[np.ndarray, np.ndarray]:
    """This rank's share of every batch."""
    x, y = data()
    share = BATCH // hvd.size()
    begin = hvd.rank() * share
    mine = np.concatenate([np.arange(b + begin, b + begin + share) for b in range(0, 64, BATCH)])
    return x[mine], y[mine]


def net(cls: Any = None, **options: Any) -> Any:
    keras.utils.set_random_seed(1)
    layers = [
        keras.Input((8,)),
        keras.layers.Dense(16, activation="tanh"),
        keras.layers.Dense(16, activation="tanh"),
        keras.layers.Dense(1),
    ]
    return (cls or keras.Sequential)(layers, **options)


def values(model: Any) -> list[np.ndarray]:
    return [np.asarray(keras.ops.convert_to_numpy(w)) for w in model.weights]


def fit(model: Any, x: np.ndarray, y: np.ndarray, batch: int, callbacks: Any = ()) -> Any:
    return model.fit(
        x, y, batch_size=batch, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=list(callbacks)
    )


def fit_part(model: Any, callbacks: Any = ()) -> Any:
    return fit(model, *part(), BATCH // hvd.size(), callbacks)


def assert_same_on_all_ranks(model: Any) -> None:
    for i, mine in enumerate(values(model)):
        for theirs in hvd.allgather(mine[None], f"weights {i}"):
            assert np.array_equal(mine, theirs), f"weight {i} differs between ranks"


def assert_equal(model: Any, reference: Any, tolerance: float) -> None:
    """`reference`: a model that rank 0 has trained, or its values."""
    assert_same_on_all_ranks(model)
    if hvd.rank() == 0:
        right = reference if isinstance(reference, list) else values(reference)
        worst = max(np.abs(a - b).max() for a, b in zip(values(model), right, strict=True))
        assert worst <= tolerance, f"differs from one process by {worst}"


_trained: dict[str, tuple[list[np.ndarray], list[float]]] = {}


def trained_alone(optimizer: Any, scale: float) -> tuple[list[np.ndarray], list[float]]:
    """Values and losses of rank 0, once for all cases."""
    policy = keras.config.dtype_policy().name
    key = f"{type(optimizer).__name__} {optimizer.get_config()} {scale} {policy}"
    if key not in _trained:
        alone, losses = net(), []
        if hvd.rank() == 0:
            alone.compile(optimizer, "mse")
            x, y = data()
            losses = fit(alone, x, y * scale, BATCH).history["loss"]
        _trained[key] = values(alone), losses
    return _trained[key]


def compare(
    make: Callable[[], Any],
    *,
    tolerance: float = 1e-6,
    wrap: Callable[[Any], Any] | None = None,
    reference: Callable[[], Any] | None = None,
    scale: float = 1.0,
    **options: Any,
) -> None:
    """24 steps of fit: ranks that begin apart, against one process."""
    right, right_losses = trained_alone((reference or make)(), scale)
    model = net()
    if hvd.rank() != 0:
        for variable in model.trainable_variables:
            variable.assign(variable + 1.0)
    model.compile((wrap or hvd.DistributedOptimizer)(make()), "mse", **options)
    x, y = part()
    history = fit(
        model,
        x,
        y * scale,
        BATCH // hvd.size(),
        [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()],
    )
    assert_equal(model, right, tolerance)
    losses = history.history["loss"]
    assert hvd.rank() != 0 or losses == approx(right_losses, 1e-3)
    assert losses == list(hvd.allgather(np.array([losses]), "losses")[0])


def approx(expected: Any, relative: float) -> Any:
    return pytest.approx(expected, rel=relative)


def gradient_of(*shape: int) -> Any:
    return keras.ops.convert_to_tensor(np.full(shape, hvd.rank() + 1.0, "float32"))
