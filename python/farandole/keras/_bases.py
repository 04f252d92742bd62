"""Keras' classes that ours derive from. Keras has no types: they say what ours call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras

__all__ = ["Callback", "ModelCheckpoint", "PyDataset", "TerminateOnNaN"]

if TYPE_CHECKING:

    class Callback:
        model: Any
        params: dict[str, Any]

        def __init__(self, **options: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...  # the rest
        def set_model(self, model: Any) -> None: ...
        def on_train_begin(self, logs: Any = None) -> None: ...
        def on_batch_end(self, batch: int, logs: Any = None) -> None: ...
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None: ...
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None: ...

    ModelCheckpoint = Callback

    class TerminateOnNaN(Callback): ...

    class PyDataset:
        def __init__(
            self, workers: int = 1, use_multiprocessing: bool = False, max_queue_size: int = 10
        ) -> None: ...
else:
    Callback, ModelCheckpoint = keras.callbacks.Callback, keras.callbacks.ModelCheckpoint
    PyDataset, TerminateOnNaN = keras.utils.PyDataset, keras.callbacks.TerminateOnNaN
