"""Callbacks, and values that travel."""

from __future__ import annotations

import itertools
from typing import Any

import keras_work as work
import numpy as np
from keras_work import hvd, keras
from rank_cases import on_ranks, raises


@on_ranks(2)
def warmup_reaches_the_rate_and_scales_velocities() -> None:
    rates, velocities = [], []

    class Watch(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
            optimizer = self.model.optimizer
            rates.append(float(optimizer.learning_rate))
            velocities.append(float(keras.ops.convert_to_numpy(optimizer.momentums[0]).sum()))

    model = work.net()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.08, momentum=0.5)), "mse")
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.08, warmup_epochs=2)
    builds = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    history = work.fit_part(model, [builds, Watch(), warmup])
    assert rates[1] == work.approx(0.04 * (1 + 1 / 16), 1e-5)
    assert rates[-1] == work.approx(0.08, 1e-5)
    assert np.all(np.diff(rates[1:17]) > 0)
    assert history.history["lr"] == work.approx([0.06, 0.08, 0.08], 1e-5)

    model.optimizer.momentums[0].assign(np.ones((8, 16), "float32"))
    model.optimizer.learning_rate = 0.08
    x, y = work.part()
    schedule = hvd.callbacks.LearningRateScheduleCallback(0.08, lambda _: 0.25)
    velocities.clear()
    model.fit(x[:4], y[:4], batch_size=4, verbose=0, callbacks=[schedule, Watch()])
    assert velocities == work.approx([32.0], 1e-5)
    powers = hvd.callbacks.LearningRateScheduleCallback(0.08, 0.5, start_epoch=1)
    assert [0.08 * powers.multiplier(e) for e in (1, 2, 3)] == [0.08, 0.04, 0.02]


@on_ranks(2)
def a_model_that_is_built_by_its_first_batch_is_broadcast_after_it() -> None:
    for batches in (8, 1):
        keras.utils.set_random_seed(hvd.rank())
        model = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1)])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.5)), "mse")
        x, y = work.part()
        model.fit(
            x[: 4 * batches],
            y[: 4 * batches],
            batch_size=4,
            verbose=0,
            callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(1)],
        )
        work.assert_same_on_all_ranks(model)


@on_ranks(2)
def a_model_that_is_built_on_one_rank_alone_equals_one_process() -> None:
    """On TensorFlow the other one builds it in its first step, which it traces twice."""

    def unbuilt() -> Any:
        keras.utils.set_random_seed(1)
        return keras.Sequential([keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])

    def sgd() -> Any:
        return keras.optimizers.SGD(0.05, momentum=0.5)

    alone = unbuilt()
    alone.compile(sgd(), "mse")
    if hvd.rank() == 0:
        work.fit(alone, *work.data(), work.BATCH)
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    for with_optimizer, callbacks in itertools.product((False, True), ([], [broadcast])):
        model, optimizer = unbuilt(), hvd.DistributedOptimizer(sgd())
        if hvd.rank() == 1:
            model.build((None, 8))
            if with_optimizer:
                optimizer.build(model.trainable_variables)
        model.compile(optimizer, "mse")
        work.fit_part(model, callbacks)
        work.assert_equal(model, alone, 1e-6)


@on_ranks(2)
def a_rank_that_made_other_layers_before_has_the_same_names() -> None:
    """Also those of what the optimizer keeps beside each of them."""
    if hvd.rank() == 1:
        keras.layers.Dense(3)
        keras.layers.Dense(3)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam()), "mse")
    work.fit_part(model, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    hvd.broadcast_variables(model.optimizer.variables, 0)


@on_ranks(2)
def metrics_are_averaged_and_must_be_alike() -> None:
    average = hvd.callbacks.MetricAverageCallback()
    logs = {"loss": 1.0 + hvd.rank(), "accuracy": 0.5 * hvd.rank()}
    average.on_epoch_end(0, logs)
    assert logs == {"loss": 1.5, "accuracy": 0.25}
    with raises(hvd.HorovodInternalError, "extra"):
        average.on_epoch_end(0, {"extra": 1.0} if hvd.rank() else {"loss": 1.0})


@on_ranks(2)
def a_state_is_committed_and_says_where_training_is() -> None:
    class State:
        epoch, batch = 2, 0

        def __init__(self) -> None:
            self.commits: list[tuple[int, int]] = []
            self.weights: list[Any] = []

        def commit(self) -> None:
            self.commits.append((self.epoch, self.batch))
            self.weights.append(work.values(model)[0])

    model, state = work.net(), State()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse")
    update = [hvd.callbacks.UpdateBatchStateCallback(state)]
    update.append(hvd.callbacks.UpdateEpochStateCallback(state))
    work.fit_part(model, [*update, hvd.callbacks.CommitStateCallback(state, batches_per_commit=3)])
    # Epochs have 8 batches, and the count goes on over their ends.
    first = [(2, 2), (2, 5), (3, 0)]
    second = [(3, 0), (3, 3), (3, 6), (4, 0)]
    third = [(4, 1), (4, 4), (4, 7), (5, 0)]
    assert state.commits == first + second + third
    moved = [not np.array_equal(a, b) for a, b in itertools.pairwise(state.weights)]
    assert moved == [True] * 9 + [False]  # nothing between the last batch and the end
    assert np.array_equal(state.weights[-1], work.values(model)[0])

    for batches, expected in ((1, 27), (0, 3), (24, 4)):
        state.commits.clear()
        commit = hvd.elastic.CommitStateCallback(state, batches_per_commit=batches)
        commit.batches_remaining = 5  # of an earlier fit
        work.fit_part(model, [commit])
        assert len(state.commits) == expected


@on_ranks(1)
def a_state_has_what_a_batch_of_fit_has_left() -> None:
    """On JAX the model has no values then, unless it is asked for them."""

    class Save(keras.callbacks.Callback):  # type: ignore[misc,name-defined]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
            if batch == 1:
                state.save()

    x, y = work.data()
    model, expected = work.net(), work.net()
    for each in (model, expected):
        each.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9)), "mse")
    state = hvd.elastic.KerasState(model)
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[Save()])
    state.restore()
    expected.fit(x[:16], y[:16], batch_size=8, shuffle=False, verbose=0)
    for of in (lambda m: m.weights, lambda m: m.optimizer.variables):
        for mine, right in zip(of(model), of(expected), strict=True):
            assert np.array_equal(*map(keras.ops.convert_to_numpy, (mine, right))), mine.path


@on_ranks(2)
def values_travel() -> None:
    rank = hvd.rank()
    assert hvd.allreduce(rank + 1.0) == 1.5
    assert hvd.allreduce(np.arange(3) + rank, op=hvd.Sum).tolist() == [1, 3, 5]
    assert hvd.allreduce(np.float32(rank), op=hvd.Max) == 1.0
    half = hvd.allreduce(np.full(2, rank + 0.5, "float32"), compression=hvd.Compression.fp16)
    assert half.dtype == np.float32
    assert half.tolist() == [1.0, 1.0]
    tensor = keras.ops.convert_to_tensor(np.full((1 + rank, 2), rank, "float32"))
    assert hvd.allgather(tensor).tolist() == [[0, 0], [1, 1], [1, 1]]
    assert hvd.allgather(np.empty((0, 2), "float32")).shape == (0, 2)
    assert hvd.broadcast(np.array([rank, 7]), 1).tolist() == [1, 7]
    assert hvd.reducescatter(np.arange(3.0) + rank, op=hvd.Sum).tolist() == [[1, 3], [5]][rank]
    with raises(hvd.HorovodInternalError, "x"):
        hvd.allreduce(np.zeros(1 + rank), "x")
    with raises(ValueError, "complex"):
        hvd.allreduce(np.zeros(1, "complex64"))
    assert hvd.allreduce(np.zeros(0)).shape == (0,)
