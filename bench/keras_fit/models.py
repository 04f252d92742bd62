"""Training jobs: small models of Keras, and batches that every rank can make for any rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

BATCH = 32  # of every rank
RATE = 1e-3
_WORDS, _LENGTH, _WIDTH = 2000, 32, 128

Arrays = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Model:
    """A model, its inputs, and how many steps make a block of a few tenths of a second."""

    name: str
    build: Callable[[], Any]
    inputs: Callable[[np.random.Generator, int], np.ndarray[Any, Any]]
    steps: int

    def build_alike(self) -> Any:
        """With the same weights, wherever and whenever it is built."""
        import keras

        keras.utils.set_random_seed(7)
        return self.build()

    def batches(self, rank: int, count: int) -> Arrays:
        """Inputs and classes of so many batches of a rank, one after the other."""
        rng = np.random.default_rng(100 + rank)
        x = self.inputs(rng, count * BATCH)
        return x, rng.integers(0, 10, len(x)).astype("int32")


def _cnn() -> Any:
    from keras import Input, Sequential, layers

    blocks: list[Any] = []
    for width in (32, 64, 128, 128):
        blocks += [layers.Conv2D(width, 3, padding="same", activation="relu")]
        blocks += [layers.MaxPooling2D()]
    return Sequential([Input((32, 32, 3)), *blocks, layers.Flatten(), layers.Dense(10)])


def _transformer() -> Any:
    from keras import Input, Model, layers

    words = Input((_LENGTH,), dtype="int32")
    x = layers.Embedding(_WORDS, _WIDTH)(words)
    for _ in range(2):
        attended = layers.MultiHeadAttention(4, _WIDTH // 4)(x, x)
        x = layers.LayerNormalization()(x + attended)
        wide = layers.Dense(4 * _WIDTH, activation="relu")(x)
        x = layers.LayerNormalization()(x + layers.Dense(_WIDTH)(wide))
    return Model(words, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


def _images(rng: np.random.Generator, count: int) -> np.ndarray[Any, Any]:
    return rng.normal(size=(count, 32, 32, 3)).astype("float32")


def _texts(rng: np.random.Generator, count: int) -> np.ndarray[Any, Any]:
    return rng.integers(0, _WORDS, (count, _LENGTH)).astype("int32")


MODELS = {
    model.name: model
    for model in (
        Model("cnn", _cnn, _images, 6),
        Model("transformer", _transformer, _texts, 5),
    )
}


def loss_of() -> Any:
    import keras

    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def plain_optimizer() -> Any:
    return keras_sgd()


def keras_sgd(**options: Any) -> Any:
    import keras

    return keras.optimizers.SGD(RATE, **options)


def weights_of(model: Any) -> np.ndarray[Any, Any]:
    import keras

    arrays = [np.asarray(keras.ops.convert_to_numpy(w)).ravel() for w in model.weights]
    return np.concatenate(arrays)
