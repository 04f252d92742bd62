"""One LearningRate on PyTorch, Keras and optax."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import pytest
from rank_cases import _registered, make_tests, on_ranks, raises

import farandole as fd
from farandole.learning_rate import LearningRate

OPTIONS: dict[str, Any] = {
    "batch_size": 64, "base_batch_size": 16, "warmup_steps": 4, "decay": "cosine",
    "total_steps": 12, "end": 0.01,
}  # fmt: skip


@on_ranks(1)
def of_torch() -> None:
    import torch

    rate = LearningRate(0.1, **OPTIONS)
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups: list[dict[str, Any]] = [{"params": parameters[:1]}]
    groups.append({"params": parameters[1:], "lr": 0.05})
    optimizer = torch.optim.SGD(groups, lr=0.1)
    schedule = rate.for_torch(optimizer)
    for step in range(14):
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == pytest.approx([rate(step), rate(step) / 2])
        optimizer.step()
        schedule.step()
    with raises(fd.InvalidArgument, "rate is 0.5, and the base of this one 0.1"):
        rate.for_torch(torch.optim.SGD(parameters, lr=0.5))


@on_ranks(1)
def of_keras() -> None:
    import keras
    import numpy as np

    rate = LearningRate(0.1, **OPTIONS)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(keras.optimizers.SGD(rate.for_keras()), "mse")
    model.set_weights([np.zeros((1, 1))])
    moved = 0.0  # the gradient of (w - y)² is 2·(w - y)
    for step in range(14):
        assert float(model.optimizer.learning_rate) == pytest.approx(rate(step), rel=1e-5)
        model.train_on_batch(np.ones((1, 1)), np.ones((1, 1)))
        moved -= rate(step) * 2 * (moved - 1)
    assert float(model.get_weights()[0].item()) == pytest.approx(moved, rel=1e-4)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        model.save(path)
        again = keras.models.load_model(path)
    assert float(again.optimizer.learning_rate) == pytest.approx(rate(14), rel=1e-5)


@on_ranks(1)
def of_optax() -> None:
    import jax
    import optax

    rate = LearningRate(0.1, **OPTIONS)
    optimizer = optax.sgd(rate)
    state = optimizer.init(jax.numpy.zeros(1))
    update = jax.jit(optimizer.update)
    for step in range(14):
        moves, state = update(jax.numpy.ones(1), state)
        assert float(moves[0]) == pytest.approx(-rate(step), rel=1e-5)
    constant = LearningRate(0.1, batch_size=8)
    assert float(jax.jit(constant)(3)) == pytest.approx(0.1)


def cases_on(framework: str, case: str, *modules: str) -> Any:
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        return lambda: pytest.skip(f"{missing[0]} is not installed")
    others = [each.__name__ for each, _ in _registered[__name__] if each.__name__ != case]
    return make_tests(__name__, framework, without=others)


test_on_torch = cases_on("torch", "of_torch", "torch")
test_on_keras = cases_on("keras on torch", "of_keras", "keras", "torch")
test_on_jax = cases_on("jax", "of_optax", "jax", "optax")
