"""A gradient that is NaN on one rank, by Keras on each backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from keras_work import hvd, keras
from rank_cases import make_tests, needs, numerics, on_ranks, raises, told

import farandole as fd

needs("keras", "tensorflow", "torch", "jax")


def make(name: str, *, scaled: bool = False, whole: bool = False, of: Any = None) -> Any:
    keras.utils.set_random_seed(3)
    layers = [keras.Input((2,)), keras.layers.Dense(1, name=f"layer_{name}")]
    optimizer: Any = keras.optimizers.SGD(0.01)
    if not whole:
        optimizer = hvd.DistributedOptimizer(optimizer)
    if scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    inner = (of or keras.Sequential)(layers)
    model = hvd.Model(inner) if whole else inner
    model.compile(optimizer, "mse")
    return model


def settle() -> None:
    if keras.backend.backend() == "jax":
        import jax

        jax.effects_barrier()


def train(model: Any, bad: float = 1.0) -> None:
    """Two batches; the last rank's second has that number."""
    x = np.ones((8, 2), np.float32)
    if hvd.rank() == hvd.size() - 1:
        x[5] = bad
    model.fit(x, x[:, :1], batch_size=4, epochs=1, verbose=0, shuffle=False)
    settle()


@on_ranks(2)
def it_is_told_once_and_counted() -> None:
    model = make("a")
    train(model)
    before = fd.nonfinite_steps()
    with told(1, settle) as texts:
        train(model, np.nan)
        train(model, np.nan)  # whose first batch meets weights that are NaN
    assert fd.nonfinite_steps() == before + 3
    assert f"rank {hvd.size() - 1} has a gradient that is NaN" in texts[0]
    assert "layer_a" in texts[0]


@on_ranks(2)
def it_is_an_error_on_every_rank_before_weights_change() -> None:
    with numerics("error"):
        model = make("b")
        train(model)
        with pytest.raises(Exception, match="rank 1 has a gradient that is NaN"):
            train(model, np.nan)
        if keras.backend.backend() == "jax":
            import farandole.jax

            farandole.jax.recover()
        else:
            assert all(np.isfinite(w).all() for w in model.get_weights())


@on_ranks(2)
def a_step_that_is_skipped_for_its_scaled_loss_is_none() -> None:
    model = make("c", scaled=True)
    before = fd.nonfinite_steps()
    with numerics("error"), told(0, settle):
        train(model, np.inf)
    assert fd.nonfinite_steps() == before
    assert all(np.isfinite(w).all() for w in model.get_weights())


@on_ranks(2)
def one_in_what_a_step_asks_of_autograd_is_told_of_and_counted() -> None:
    if keras.backend.backend() != "torch":
        return
    import torch

    class Asking(keras.Sequential):  # type: ignore[misc, name-defined]
        def train_step(self, data: Any) -> Any:
            (x, y), weights = data, self.trainable_weights
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
            gradients = torch.autograd.grad(loss, [v.value for v in weights])
            with torch.no_grad():
                self.optimizer.apply([0.5 * each for each in gradients], weights)
            return {"loss": loss}

    def bad_step(model: Any) -> None:
        """The last sample is bad, which is the last rank's."""
        x = np.ones((4, 2), np.float32)
        x[3] = np.nan
        model.fit(x, x[:, :1], batch_size=4, epochs=1, verbose=0, shuffle=False)

    model = make("asked", whole=True, of=Asking)
    before = fd.nonfinite_steps()
    with told(1) as texts:
        bad_step(model)
    assert fd.nonfinite_steps() == before + 1
    assert f"rank {hvd.size() - 1} has a gradient that is NaN" in texts[0]
    assert "layer_asked" in texts[0]
    with numerics("error"):
        model = make("asked", whole=True, of=Asking)
        with raises(fd.NumericsError, "rank 1 has a gradient that is NaN"):
            bad_step(model)
        assert all(np.isfinite(w).all() for w in model.get_weights())


test_on_torch = make_tests(__name__, "keras on torch")
test_on_tensorflow = make_tests(__name__, "keras on tensorflow")
test_on_jax = make_tests(__name__, "keras on jax")
