"""Models of Keras whose ranks start from different weights, on each backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from keras_work import hvd, keras
from rank_cases import checking_weights, make_tests, needs, on_ranks

from farandole.common._objects import allgather_object

needs("keras", "tensorflow", "torch", "jax")

CALLBACK = "hvd.callbacks.BroadcastGlobalVariablesCallback(0) to the callbacks of fit()"


def make(seed: int = 3, *, local: bool = False, **options: Any) -> Any:
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(3, name="inner"), keras.layers.Dense(1, name="last")]
    )
    wrap = hvd.PartialDistributedOptimizer if local else hvd.DistributedOptimizer
    if local:
        options["local_layers"] = [model.layers[0]]
    model.compile(wrap(keras.optimizers.SGD(0.01), **options), "mse")
    return model


def train(model: Any, steps: int, callbacks: Any = ()) -> None:
    x = np.full((4 * steps, 2), 1.0 + hvd.rank(), np.float32)
    model.fit(x, x[:, :1], batch_size=4, epochs=1, verbose=0, callbacks=list(callbacks))


def move_apart(variable: Any) -> None:
    variable.assign(np.full(variable.shape, 1.0 + hvd.rank(), np.float32))


def refused(call: Callable[[], Any]) -> str:
    """The error message of this call, which must be the same on all ranks."""
    with pytest.raises(Exception, match="weights") as caught:
        call()
    told = str(caught.value)
    told = told[told.index("rank") :].partition("\n")[0]
    if keras.backend.backend() == "jax":
        import farandole.jax

        farandole.jax.recover()
    assert len(set(allgather_object(told))) == 1
    assert CALLBACK in str(caught.value)
    return told


@on_ranks(2)
def a_forgotten_callback_is_named_before_the_third_batch() -> None:
    told = refused(lambda: train(make(seed=hvd.rank() + 1), 3))
    assert told.startswith("ranks start from different weights: 'sequential/inner/kernel [0]' has")
    assert told.endswith("2 of 4 weights differ")  # biases are zeros


@on_ranks(2)
def the_callback_is_the_cure() -> None:
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    train(make(seed=hvd.rank() + 1), 4, [callback])


@on_ranks(2)
def passes_that_the_optimizer_adds_up_are_compared_in_the_one_that_updates() -> None:
    model = make(seed=hvd.rank() + 1, backward_passes_per_step=2)
    assert "'sequential/inner/kernel [0]'" in refused(lambda: train(model, 4))
    train(make(backward_passes_per_step=2), 4)


@on_ranks(2)
def local_layers_are_left_alone() -> None:
    for layer, differs in ((0, False), (1, True)):
        model = make(local=True)
        move_apart(model.layers[layer].kernel)
        if differs:
            assert "1 of 2 weights differs" in refused(lambda: train(model, 3))  # noqa: B023
        else:
            train(model, 3)


@on_ranks(2)
def nothing_is_compared_where_it_is_off() -> None:
    with checking_weights("off"):
        train(make(seed=hvd.rank() + 1), 3)


@on_ranks(2)
def what_comes_apart_later_is_found_every_k_steps() -> None:
    with checking_weights("2"):
        model = make()
        train(model, 4)
        move_apart(model.layers[1].kernel)
        assert "'sequential/last/kernel [2]'" in refused(lambda: train(model, 3))


@on_ranks(2)
def ranks_that_update_apart_are_found_in_the_second_step() -> None:
    model = make()
    train(model, 1)
    move_apart(model.layers[1].kernel)
    assert "'sequential/last/kernel [2]'" in refused(lambda: train(model, 2))


# A farandole.keras.Model: everything is equal on its ranks.


def shared(**options: Any) -> Any:
    keras.utils.set_random_seed(3)
    layers = [
        keras.Input((2,)),
        keras.layers.Dense(3, name="frozen", trainable=False),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.Dropout(0.5),
        keras.layers.Dense(1, name="last"),
    ]
    model = hvd.Model(keras.Sequential(layers), **options)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.5), "mse")
    return model


def after_moving(what: Callable[[Any], Any], **options: Any) -> str:
    """The error of fit() after `what` was changed on each rank; empty if there is none."""
    x = np.linspace(0, 1, 32, dtype=np.float32).reshape(16, 2)
    with checking_weights("1"):
        model = shared(**options)
        model.fit(x, x[:, :1], batch_size=4, verbose=0)
        before = what(model)
        values = keras.ops.convert_to_numpy(before)
        before.assign(values + np.asarray(hvd.rank(), values.dtype))
        try:
            model.fit(x, x[:, :1], batch_size=4, verbose=0)
        except Exception as error:
            found = str(error)
            found = found[found.index("rank") :].partition("\n")[0]
            if keras.backend.backend() == "jax":
                import farandole.jax

                farandole.jax.recover()
        else:
            found = ""
    assert len(set(allgather_object(found))) == 1, found
    return found


def mean(model: Any) -> Any:
    return model.layers[1].moving_mean


@on_ranks(2, 3)
def frozen_weights_and_the_state_of_the_optimizer_are_compared() -> None:
    assert "/frozen/kernel [" in after_moving(lambda model: model.layers[0].kernel)
    assert "momentum [" in after_moving(lambda model: model.optimizer.variables[-1])


@on_ranks(2)
def statistics_are_compared_where_they_are_of_all_ranks() -> None:
    assert after_moving(mean) == ""
    assert "/norm/moving_mean [" in after_moving(mean, sync_batch_norm=True)


@on_ranks(2)
def logical_ranks_compare_what_layers_draw_from() -> None:
    found = after_moving(lambda model: model.layers[2].seed_generator.state, logical_ranks=2)
    assert "seed" in found


@on_ranks(2)
def what_ranks_accumulate_is_their_own() -> None:
    x = np.linspace(0, 1, 32, dtype=np.float32).reshape(16, 2)
    with checking_weights("1"):
        model = shared()
        optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)
        model.compile(optimizer, "mse")
        model.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0)


test_on_tensorflow = make_tests(__name__, "keras on tensorflow")
test_on_torch = make_tests(__name__, "keras on torch")
test_on_jax = make_tests(__name__, "keras on jax")
