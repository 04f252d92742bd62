"""Callbacks of the user's own in farandole.keras.Model: what they see, change and write."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from keras_metric_cases import measured
from keras_model_cases import BATCH, UNMEASURED, X, Y, compare, shared
from keras_work import hvd, keras
from rank_cases import on_ranks

import farandole as fd
from farandole.common._objects import broadcast_object


def slower(optimizer: Any) -> None:
    optimizer.learning_rate = 0.5 * float(keras.ops.convert_to_numpy(optimizer.learning_rate))


def follows_batches(seen: dict[str, list[float]]) -> Any:
    class Follows(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
        """Sets the rate by each batch's results."""

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            del batch
            seen["loss"].append(logs["loss"])
            seen["dice"].append(logs["dice"])
            self.model.optimizer.learning_rate = 0.2 * min(logs["loss"], 1.0)

        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            del batch
            seen["test"].append(logs["moving"])

    return Follows()


@on_ranks(3)
def callbacks_see_results_of_all_ranks_after_each_batch() -> None:
    def fit(model: Any, _: bool) -> Any:
        seen: dict[str, list[float]] = {"loss": [], "dice": [], "test": []}
        model.fit(
            X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0,
            validation_data=(X[:13], Y[:13]), callbacks=[follows_batches(seen)],
        )  # fmt: skip
        watching = keras.callbacks.LambdaCallback(
            on_test_batch_end=lambda _, logs: seen["test"].append(logs["loss"])
        )
        model.evaluate(X[:13], Y[:13], batch_size=7, verbose=0, callbacks=[watching])
        return seen

    compare(shared(**measured()), fit, **measured())


def change_rate(model: Any) -> None:
    slower(model.optimizer)


def change_weight(model: Any) -> None:
    weight = model.trainable_variables[0]
    weight.assign(weight + 1.0)


def on_rank_1(change: Callable[[Any], None], when: str) -> Any:
    def changes(self: Any, *_: Any, **__: Any) -> None:
        if hvd.rank() == 1:
            change(self.model)

    return type("Changes", (keras.callbacks.Callback,), {when: changes})()


def on_rank_0(folder: str) -> Any:
    class Saves(keras.callbacks.ModelCheckpoint):  # type: ignore[misc, name-defined]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            super().on_epoch_end(epoch, logs)
            slower(self.model.optimizer)

    return Saves(f"{folder}/best.weights.h5", save_weights_only=True)


@on_ranks(2)
def what_a_callback_changes_on_one_rank_is_a_mismatch() -> None:
    folder = broadcast_object(tempfile.mkdtemp(), 0, "folder")
    for callback, where, what in (
        (on_rank_1(change_rate, "on_train_batch_end"), "after epoch 1", "learning_rate 0.25"),
        (on_rank_1(change_rate, "on_train_end"), "as fit() ends", "learning_rate 0.25"),
        (on_rank_1(change_weight, "on_epoch_end"), "after epoch 1", "/kernel [0]' norm"),
        (on_rank_0(folder), "after epoch 1", "learning_rate 0.25"),
    ):
        options = UNMEASURED | {"optimizer": keras.optimizers.SGD(0.5)}
        model = shared(**options)
        with pytest.raises(fd.Mismatch) as caught:
            model.fit(X, Y, batch_size=33, verbose=0, callbacks=[callback])  # a single step
        text = str(caught.value)
        assert where in text
        assert what in text
        assert "rank 0: " in text
        assert "rank 1: " in text


@on_ranks(2)
def models_are_written_once_by_callbacks() -> None:
    """Whatever they are named by each rank."""
    folder = Path(broadcast_object(tempfile.mkdtemp(), 0, "folder"))

    def write(model: Any, epoch: int) -> None:
        """And goes back to what it has written, as who looks for a learning rate does."""
        before = model.get_weights()
        model.save(folder / f"{hvd.rank()}-{epoch}.keras")
        model.save_weights(folder / f"{hvd.rank()}-{epoch}.weights.h5")
        model.set_weights([each + 1.0 for each in before])
        model.load_weights(folder / f"{hvd.rank()}-{epoch}.weights.h5")
        assert all(map(np.array_equal, before, model.get_weights()))

    model = shared(**UNMEASURED)
    writing = keras.callbacks.LambdaCallback(on_epoch_end=lambda n, _: write(model.model, n))
    model.fit(X, Y, batch_size=17, epochs=2, verbose=0, callbacks=[writing])
    written = sorted(each.name for each in folder.iterdir())
    assert written == ["0-0.keras", "0-0.weights.h5", "0-1.keras", "0-1.weights.h5"]
    assert np.isfinite(model.evaluate(X, Y, verbose=0))
    model.model.save_weights(folder / f"own {hvd.rank()}.weights.h5")  # outside of fit()
    assert (folder / f"own {hvd.rank()}.weights.h5").exists()
