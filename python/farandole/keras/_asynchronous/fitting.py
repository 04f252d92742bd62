"""One fit of a worker: epochs, batches and callbacks, as Keras' own fit has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from farandole._core import InvalidArgument
from farandole.keras._asynchronous.caught import Caught
from farandole.keras._asynchronous.dealing import Batch, Source
from farandole.keras._asynchronous.lookups import Lookups, assign_rows, rows_with_values
from farandole.keras._calls import is_due
from farandole.keras._global.sources import unpacked
from farandole.parameter_server import Rows, Worker


class Steps:
    """The training steps of one worker, on the model that it has."""

    def __init__(self, model: Any, variables: Mapping[str, Any], worker: Worker) -> None:
        self._model, self._variables, self._worker = model, variables, worker
        self._caught = Caught()
        self._caught.build(model.trainable_variables)
        self._lookups = Lookups(model, variables)

    def take_weights(self, rows: Mapping[str, np.ndarray] | None = None) -> None:
        """Pulls all weights; of the variables in `rows` only these rows."""
        for name, value in self._worker.pull(rows=rows).items():
            if rows and name in rows:
                assign_rows(self._variables[name], rows[name], value)
            else:
                self._variables[name].assign(value)

    def run(self, batch: Batch, class_weight: Any) -> dict[str, float]:
        """One step; returns Keras' logs, of the epoch so far."""
        x, y, weights = batch
        rows = self._lookups.of(x, self._variables)
        self.take_weights(rows)
        with self._catching():
            logs = self._model.train_on_batch(
                x, y, sample_weight=weights, class_weight=class_weight, return_dict=True
            )
        gradients = {
            name: Rows.found_in(gradient)
            for name, gradient in zip(self._variables, self._caught.gradients, strict=True)
            if gradient is not None
        }
        for name, looked_up in rows.items():
            if name in gradients:
                self._lookups.check(name, rows_with_values(gradients[name]), looked_up)
        self._worker.push(gradients)
        return {name: float(value) for name, value in logs.items()}

    @contextmanager
    def _catching(self) -> Iterator[None]:
        """Replaces the optimizer for one batch only, since callbacks may save the model's own.
        Metrics accumulate from batch to batch."""
        own = vars(self._model)
        before = own["optimizer"]
        own["optimizer"], own["reset_metrics"] = self._caught, lambda: None
        try:
            yield
        finally:
            own["optimizer"] = before
            del own["reset_metrics"]


class Validation:
    """Evaluates the model after epochs, on each worker by itself."""

    def __init__(self, data: Batch | Any, batch_size: int | None, steps: int | None, every: Any):
        self._data, self._batch_size, self._steps, self._every = data, batch_size, steps, every

    def after(self, epoch: int, model: Any) -> dict[str, float]:
        if self._data is None or not is_due(epoch, self._every):
            return {}
        x, y, weights = unpacked(self._data)
        logs = model.evaluate(
            x, y, sample_weight=weights, batch_size=self._batch_size, steps=self._steps, verbose=0,
            return_dict=True,
        )  # fmt: skip
        return {f"val_{name}": value for name, value in logs.items()}


def train(
    steps: Steps,
    worker: Worker,
    model: Any,
    source: Source,
    callbacks: Any,
    epochs: range,
    each: int,
    validation: Validation,
    class_weight: Any,
) -> None:
    """All epochs of a worker. `each`: steps of an epoch, of all workers together."""
    numbers = worker.steps(len(epochs) * each)
    number = next(numbers, None)
    rate = _rate(model)
    for epoch in epochs:
        model.reset_metrics()
        callbacks.on_epoch_begin(epoch)
        logs: dict[str, float] = {}
        done = 0
        # A worker that died may have left a step of an earlier epoch.
        while number is not None and epochs[number // each] <= epoch and not model.stop_training:
            callbacks.on_train_batch_begin(done)
            logs = steps.run(source.batch(epochs[number // each], number % each), class_weight)
            callbacks.on_train_batch_end(done, logs)
            _check_rate(model, rate)
            done += 1
            number = next(numbers, None)
        steps.take_weights()
        worker.rest()  # no worker waits for this one while it evaluates
        logs |= validation.after(epoch, model)
        callbacks.on_epoch_end(epoch, logs)
        source.end_epoch()
        _check_rate(model, rate)
        if model.stop_training:
            break


def _rate(model: Any) -> Any:
    kept = model.optimizer._learning_rate
    if isinstance(kept, keras.optimizers.schedules.LearningRateSchedule):
        return kept
    rate: Any = keras.ops.convert_to_numpy(model.optimizer.learning_rate)
    return float(rate)


def _check_rate(model: Any, rate: Any) -> None:
    now = _rate(model)
    if now != rate:
        raise InvalidArgument(
            f"a callback has set the learning rate to {now}; the optimizer is on the servers, and "
            f"goes on with {rate}\n  advice: a schedule of keras.optimizers.schedules, which "
            "counts updates there"
        )
