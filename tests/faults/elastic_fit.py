"""Keras' fit in an elastic job, for tests: rank 1 is killed in the midst of it.

Everyone who comes to the end prints as JSON what it has.
"""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import keras
import numpy as np

import farandole.keras as hvd

EPOCHS = 3


class Dying(keras.callbacks.Callback):  # type: ignore[misc]
    """In the second epoch, before the batch's gradients are reduced."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        if (hvd.rank(), hvd.size(), state.epoch, batch) == (1, 3, 1, 2):
            os.kill(os.getpid(), signal.SIGKILL)


hvd.init()
keras.utils.set_random_seed(int(os.environ["FARANDOLE_WORKER"]))  # rank 0's weights count
x = np.linspace(-1, 1, 96, dtype=np.float32).reshape(48, 2)
y = np.sin(x.sum(1, keepdims=True))
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.05)), "mse")
state = hvd.elastic.KerasState(model, epoch=0, batch=0)
begun = []


@hvd.elastic.run
def train(state: Any) -> None:
    begun.append([hvd.size(), state.epoch, state.batch])
    mine = slice(hvd.rank(), None, hvd.size())
    callbacks = [
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.CommitStateCallback(state, batches_per_commit=2),
        Dying(),
    ]
    model.fit(
        x[mine], y[mine], 4, initial_epoch=state.epoch, epochs=EPOCHS, shuffle=False, verbose=0,
        callbacks=callbacks,
    )  # fmt: skip


train(state)
found = {
    "begun": begun,
    "epoch": state.epoch,
    "weights": [w.tolist() for w in model.get_weights()],
    "steps": int(model.optimizer.iterations),
}
print(json.dumps(found), flush=True)
