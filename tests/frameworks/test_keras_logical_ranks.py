"""farandole.keras.Model(logical_ranks=G): the same bits for any number of ranks."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import grid
from harness import World

Spawn = Callable[..., World]
PARTS = 4
N, BATCH = 34, 8  # a last batch of 2, which leaves parts without samples
_rng = np.random.default_rng(3)
X = _rng.normal(size=(N, 6)).astype("float32")
Y = _rng.integers(0, 3, size=N).astype("int32")


def _require(backend: str) -> None:
    if not all(importlib.util.find_spec(name) for name in ("keras", backend)):
        pytest.skip(f"Keras or {backend} is not installed")


def _net(*, drawing: bool) -> Any:
    import keras

    keras.utils.set_random_seed(1)
    between = [keras.layers.Dropout(0.3), keras.layers.BatchNormalization()] if drawing else []
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(16, activation="gelu"),
            *between,
            keras.layers.Dense(3),
        ]
    )


def _compiled(model: Any) -> Any:
    import keras

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model


def _digest(*arrays: Any) -> str:
    found = hashlib.sha256()
    for array in arrays:
        found.update(np.asarray(array).tobytes())
    return found.hexdigest()


def train() -> dict[str, str]:
    """The results of a program with random layers and batch statistics, as text or digests."""
    import keras

    import farandole.keras as fd

    fd.init()
    keras.utils.set_random_seed(10 + fd.rank())
    model = _compiled(fd.Model(_net(drawing=True), logical_ranks=PARTS))
    seen: list[float] = []
    each = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda _, logs: seen.append(logs["loss"])
    )
    history = model.fit(
        X,
        Y,
        batch_size=BATCH,
        epochs=2,
        validation_data=(X[:9], Y[:9]),
        callbacks=[each],
        verbose=0,
    )
    results = {
        "weights": _digest(*model.get_weights()),
        "optimizer": _digest(*(keras.ops.convert_to_numpy(v) for v in model.optimizer.variables)),
        "history": repr(history.history),
        "losses of batches": repr([float(v) for v in seen]),
        "evaluate": repr(model.evaluate(X, Y, batch_size=7, verbose=0)),
        "predict": _digest(model.predict(X, batch_size=7, verbose=0)),
    }
    model.layers[0].trainable = False  # statistics have other places among what is not trained
    _compiled(model).fit(X, Y, batch_size=BATCH, verbose=0)
    return results | {"weights behind a frozen layer": _digest(*model.get_weights())}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("backend", ["tensorflow", "torch", "jax"])
def test_the_bits_do_not_depend_on_the_number_of_ranks(spawn: Spawn, backend: str) -> None:
    _require(backend)
    sizes = (1, 2, 3, 4) if grid.full() or backend == "torch" else (1, 3)
    results = {size: spawn(size, f"keras on {backend}").run(train) for size in sizes}
    for size, ranks in results.items():
        for rank, result in enumerate(ranks):
            for what, value in result.items():
                assert value == results[1][0][what], f"{what}, rank {rank} of {size}"


def as_in_one_process_whatever_the_data(backend: str) -> None:
    import farandole.keras as fd
    from farandole.data import FromRank0

    fd.init()

    def weights(data: dict[str, Any], steps: int | None = None) -> list[Any]:
        model = _compiled(fd.Model(_net(drawing=False), logical_ranks=PARTS))
        model.fit(**data, epochs=1, shuffle=False, verbose=0, steps_per_epoch=steps)
        return [np.asarray(w) for w in model.get_weights()]

    batches = [(X[i : i + BATCH], Y[i : i + BATCH]) for i in range(0, N, BATCH)]
    right = weights({"x": X, "y": Y, "batch_size": BATCH})
    data: dict[str, Any] = {}
    if backend == "torch":
        import torch

        samples = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
        data["a loader"] = torch.utils.data.DataLoader(samples, batch_size=BATCH)
        data |= {"a generator": (each for each in batches), "rank 0": FromRank0(batches)}
    else:
        import tensorflow as tf

        data["a dataset"] = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)
    for name, x in data.items():
        found = weights({"x": x}, len(batches))
        assert _digest(*found) == _digest(*right), name
    alone = _compiled(_net(drawing=False))
    alone.fit(X, Y, batch_size=BATCH, epochs=1, shuffle=False, verbose=0)
    for a, b in zip(right, alone.get_weights(), strict=True):
        assert np.abs(a - b).max() <= 1e-5


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_every_kind_of_data_is_cut_alike(spawn: Spawn, backend: str) -> None:
    _require(backend)
    spawn(3, f"keras on {backend}").run(as_in_one_process_whatever_the_data, backend)


def refusals() -> None:
    import keras

    import farandole as core
    import farandole.keras as fd

    fd.init()

    def refused(words: str, act: Callable[[], Any]) -> None:
        with pytest.raises(core.InvalidArgument, match=words):
            act()

    net = _net(drawing=False)
    refused("logical_ranks is 0; it is a whole number", lambda: fd.Model(net, logical_ranks=0))
    refused(
        "logical_ranks=2 do not go on 3 ranks, but on 1, 2\n",
        lambda: fd.Model(net, logical_ranks=2),
    )
    refused(
        "compression changes what each rank sends",
        lambda: fd.Model(net, logical_ranks=4, compression=fd.Compression.fp16),
    )
    model = fd.Model(net, logical_ranks=4)
    refused(
        "the optimizer is a DistributedOptimizer; with logical_ranks, pass the Keras optimizer",
        lambda: model.compile(fd.DistributedOptimizer(keras.optimizers.SGD()), "mse"),
    )
    tokens = keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            keras.layers.Embedding(9, 3, mask_zero=True),
            keras.layers.Dense(1),
        ]
    )
    masked = fd.Model(tokens, logical_ranks=4)
    masked.compile("sgd", "mse")
    x = np.tile(np.arange(4, dtype="int32"), (8, 1))
    refused(
        "logical_ranks=4: the loss is divided by the mask of the whole batch",
        lambda: masked.fit(x, x[..., None].astype("float32"), batch_size=8, verbose=0),
    )


def test_what_would_make_bits_depend_on_ranks_is_refused(spawn: Spawn) -> None:
    _require("torch")
    spawn(3, "keras on torch").run(refusals)


def refused_as_fast() -> None:
    import farandole as core
    import farandole.keras as fd

    fd.init()
    with pytest.raises(core.InvalidArgument, match="logical_ranks=4 with FARANDOLE_LEVEL=fast"):
        fd.Model(_net(drawing=False), logical_ranks=4)


def test_the_level_fast_is_refused(spawn: Spawn) -> None:
    _require("torch")
    spawn(1, "keras on torch", env={"FARANDOLE_LEVEL": "fast"}).run(refused_as_fast)
