"""On a rank: Keras' part of the tables, with farandole.keras.Model or MirroredStrategy."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import data
import keras
import numpy as np
from data import BATCH, CLASSES, EPOCHS, INPUTS, LABELS, LENGTH, PARTS, REMAINDERS, WIDTH, WORDS

import farandole.keras as fd
from farandole.common._objects import allgather_object

layers = keras.layers


class Batches(keras.utils.PyDataset):
    def __init__(self, x: Any, y: Any, size: int) -> None:
        super().__init__()
        self._batches = data.batches(x, y, size)

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, at: int) -> Any:
        return self._batches[at]


def generated(x: Any, y: Any, size: int) -> Iterator[Any]:
    while True:
        yield from data.batches(x, y, size)


def dataset(x: Any, y: Any, size: int) -> Any:
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.data.Dataset.from_tensor_slices((x, y)).batch(size)
    import torch

    samples = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    return torch.utils.data.DataLoader(samples, batch_size=size)


KINDS: dict[str, Callable[[Any, Any, int], dict[str, Any]]] = {
    "arrays": lambda x, y, size: {"x": x, "y": y, "batch_size": size},
    "dataset": lambda *of: {"x": dataset(*of)},
    "PyDataset": lambda *of: {"x": Batches(*of)},
    "generator": lambda x, y, size: {
        "x": generated(x, y, size),
        "steps_per_epoch": -(-len(x) // size),
    },
}


def small() -> Any:
    keras.utils.set_random_seed(1)
    net = [keras.Input((WIDTH,)), layers.Dense(8, activation="tanh"), layers.Dense(1)]
    return keras.Sequential(net)


def learned(model: Any, **options: Any) -> list[Any]:
    """Weights, and what fit and evaluate say."""
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    history = model.fit(**options, epochs=EPOCHS, shuffle=False, verbose=0)
    return [*map(np.asarray, model.get_weights()), *history.history.values()]


def of_all_ranks(strategy: Any, **options: Any) -> list[Any]:
    if strategy is None:
        return learned(fd.Model(small()), **options)
    with strategy.scope():  # of which the optimizer is, too
        return learned(small(), **options)


def equality(strategy: Any) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {kind: {} for kind in KINDS}
    for remainder, (n, size) in REMAINDERS.items():
        x, y = data.X[:n], data.Y[:n]
        right = learned(small(), x=x, y=y, batch_size=size)
        for kind, make in KINDS.items():
            mine = of_all_ranks(strategy, **make(x, y, size))
            same = set(allgather_object(data.digest(mine), "digest"))
            found[kind][remainder] = data.apart(mine, right) if len(same) == 1 else float("inf")
    return found


def attention() -> Any:
    words = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, 8)(words)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4, dropout=0.1)(x, x))
    x = layers.LayerNormalization()(x + layers.Dense(8)(layers.Dense(16, activation="gelu")(x)))
    return keras.Model(words, layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(x)))


MODELS: dict[str, Callable[[], Any]] = {
    "MLP": lambda: keras.Sequential(
        [
            keras.Input((WIDTH,)), layers.Dense(16, activation="gelu"), layers.Dropout(0.2),
            layers.Dense(CLASSES),
        ]
    ),
    "CNN": lambda: keras.Sequential(
        [
            keras.Input((8, 8, 1)), layers.Conv2D(4, 3), layers.BatchNormalization(),
            layers.ReLU(), layers.MaxPooling2D(), layers.Flatten(), layers.Dense(CLASSES),
        ]
    ),
    "transformer": attention,
}  # fmt: skip


def bits() -> dict[str, str]:
    found = {}
    for name, build in MODELS.items():
        keras.utils.set_random_seed(1)
        model = fd.Model(build(), logical_ranks=PARTS)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
        history = model.fit(INPUTS[name], LABELS, batch_size=BATCH, verbose=0)
        digest = data.digest([*map(np.asarray, model.get_weights()), *history.history.values()])
        assert len(set(allgather_object(digest, "digest"))) == 1, "ranks differ"
        found[name] = digest
    return found


def main(name: str, what: str, path: str) -> None:
    strategy = None
    if name == "strategy":
        from farandole.strategy import MirroredStrategy

        strategy = MirroredStrategy()
    fd.init()
    found: Any = equality(strategy) if what == "equality" else bits()
    if fd.rank() == 0:
        Path(path).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
