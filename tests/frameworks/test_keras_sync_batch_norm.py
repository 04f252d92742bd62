"""farandole.keras.Model(sync_batch_norm=True): batch normalization as in one process."""

from __future__ import annotations

import importlib.util
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras_model_cases as model_cases
import numpy as np
from keras_work import hvd, keras
from rank_cases import make_tests, on_ranks, raises

import farandole as fd
import grid
from farandole.common._objects import broadcast_object

BATCH, N = 8, 26  # a last batch of 2, which leaves ranks without samples
FLAT, Y = model_cases.X[:N], model_cases.Y[:N]
X = np.random.default_rng(7).normal(3.0, 2.0, (N, 5, 6)).astype("float32")
for _i in range(N):
    X[_i, 1 + _i * _i % 5 :] = 0  # what the mask leaves is of another size on each rank
SGD = {"class_name": "SGD", "config": {"learning_rate": 0.1}}
OPTIONS = model_cases.UNMEASURED | {"optimizer": SGD}


def net(**of_layer: Any) -> Any:
    """With a layer that has a mask, and one in a model in the model."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    inputs = keras.Input((5, 6))
    masked = layers.BatchNormalization(momentum=0.5)(layers.Masking()(inputs))
    pooled = layers.GlobalAveragePooling1D()(masked)
    norm = layers.BatchNormalization(momentum=0.5, **of_layer)
    inner = keras.Sequential([keras.Input((6,)), layers.Dense(4), norm, layers.Activation("tanh")])
    return keras.Model(inputs, layers.Dense(1, activation="sigmoid")(inner(pooled)))


def one(layer: Any) -> Any:
    keras.utils.set_random_seed(1)
    dense = keras.layers.Dense
    return keras.Sequential([keras.Input((6,)), dense(4), layer, dense(1, activation="sigmoid")])


def fit(x: Any) -> Callable[[Any, bool], Any]:
    def fit(model: Any, _: bool) -> Any:
        return model.fit(
            x, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0,
            validation_data=(x[:13], Y[:13]),
        )  # fmt: skip

    return fit


def compare(mine: Any, build: Callable[[], Any], x: Any) -> None:
    """With plain Keras; and nobody warns of statistics that are a rank's own."""
    if hvd.rank() == 0:
        keras.layers.BatchNormalization()  # names of layers and models may differ between ranks
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model_cases.compare(
            model_cases.compiled(mine, **OPTIONS), fit(x), build=build, **OPTIONS,
            then=lambda model, _: {"outputs": model.predict(x, batch_size=7, verbose=0)},
        )  # fmt: skip
    told = [each.message for each in caught if "own samples" in str(each.message)]
    assert not told


@on_ranks(1, 2, 3, 4)
def statistics_are_those_of_the_whole_batch() -> None:
    model = hvd.Model(net(), sync_batch_norm=True)
    compare(model, net, X)
    layers = [each for each in model._flatten_layers() if hasattr(each, "moving_mean")]
    assert len(layers) == 2
    assert not any("_moments" in vars(each) for each in layers)  # outside of steps it is Keras' own

    folder = Path(broadcast_object(tempfile.mkdtemp(), 0, "folder"))
    model.save(folder / "model.keras")
    again = keras.models.load_model(folder / "model.keras")
    assert np.array_equal(again.predict(X, verbose=0), model.model.predict(X, verbose=0))
    assert "farandole" not in again.to_json()


@on_ranks(3)
def layers_that_ask_for_it_have_it() -> None:
    import farandole.tensorflow as of_tensorflow

    def build() -> Any:
        return one(keras.layers.BatchNormalization())

    for layer in (
        keras.layers.BatchNormalization(synchronized=True),
        of_tensorflow.SyncBatchNormalization(),
    ):
        compare(hvd.Model(one(layer)), build, FLAT)
        with raises(fd.InvalidArgument, "logical_ranks=4", f"'{layer.name}'"):
            hvd.Model(one(layer), logical_ranks=4)


@on_ranks(2)
def what_cannot_be_joined_is_refused() -> None:
    class Ghost(keras.layers.BatchNormalization):  # type: ignore[misc, name-defined]
        def _moments(self, inputs: Any, mask: Any) -> Any:
            return super()._moments(inputs, mask)

    class Plain(keras.layers.BatchNormalization):  # type: ignore[misc, name-defined]
        def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:  # noqa: ARG002
            return inputs

    plain = keras.layers.BatchNormalization()
    for layer, options, *words in (
        (Ghost(name="a"), {}, "layer 'a'", "Ghost has statistics of its own"),
        (Plain(name="b"), {}, "layer 'b'", "Plain.call() asks no _moments()"),
        (plain, {"logical_ranks": 2}, "logical_ranks=2", "sync_batch_norm=True"),
    ):
        with raises(fd.InvalidArgument, *words):
            hvd.Model(one(layer), sync_batch_norm=True, **options)
    differs = hvd.Model(one(plain), sync_batch_norm=hvd.rank() == 0)
    with raises(fd.Mismatch, "1 layers that normalize over all ranks' samples; rank 1: 0 layers"):
        model_cases.compiled(differs, **OPTIONS).fit(FLAT, Y, verbose=0)


def cases_on(backend: str, **options: Any) -> Any:
    if not all(importlib.util.find_spec(name) for name in ("keras", backend)):
        return None
    return make_tests(__name__, f"keras on {backend}", **options)


ELSEWHERE = {
    "without": ("layers_that_ask_for_it_have_it", "what_cannot_be_joined_is_refused"),
    "only_sizes": () if grid.full() else (3,),
}
test_on_tensorflow = cases_on("tensorflow")
test_on_torch = cases_on("torch", **ELSEWHERE)
test_on_jax = cases_on("jax", **ELSEWHERE)
