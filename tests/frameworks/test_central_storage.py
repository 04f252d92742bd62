"""CentralStorageStrategy: variables once per host, optimizers' state on rank 0 alone, and the
results of one process."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import keras_work as work
import numpy as np
from keras_model_cases import BATCH, X, Y, assert_same_bits, compiled
from keras_work import Late, keras
from rank_cases import make_tests, needs, on_ranks, raises
from test_strategy import Loop, assert_as_alone, batches, folder_of_all, in_scope

import farandole as fd
import grid
from farandole.common._objects import broadcast_object

needs("tensorflow", "keras")

tf: Any = Late("tensorflow")
strategies: Any = Late("farandole.strategy")
RANKS = (1, 2, 3) if grid.full() else (3,)


def central() -> Any:
    return strategies.CentralStorageStrategy(parameter_device="/cpu:0")


def component(variable: Any) -> Any:
    """This process' TensorFlow variable."""
    return variable.value.values[0]


def has(variable: Any) -> bool:
    return type(component(variable)).__name__ != "AbsentVariable"


def assert_once_per_host(strategy: Any, model: Any, optimizer: Any) -> None:
    """Weights are in memory of all ranks: what one process writes there, all of them read."""
    state = [v for v in optimizer.variables if v.shape.rank]
    assert [has(v) for v in state] == [fd.rank() == 0] * len(state) != []
    weights = model.trainable_weights
    memory = strategy.extended.memory
    if fd.rank() == 0:
        assert memory.buffers() <= 2 * len(weights)  # of this step, and of the one before
    before = work.values(model)
    fd.barrier()
    if fd.rank() == 0:
        for weight in weights:
            words = bytes_of(weight)
            words += 1.0
    fd.barrier()
    for weight, value in zip(weights, before, strict=False):
        assert np.abs(weight.numpy() - value).min() > 0.5, weight.path
    fd.barrier()
    if fd.rank() == 0:
        for weight, value in zip(weights, before, strict=False):
            bytes_of(weight)[...] = value
    fd.barrier()


def bytes_of(variable: Any) -> Any:
    """Where the variable has its value."""
    words = component(variable).read_value()._numpy()
    address = words.ctypes.data
    return np.ctypeslib.as_array((ctypes.c_float * words.size).from_address(address)).reshape(
        words.shape
    )


def small() -> Any:
    keras.utils.set_random_seed(1)
    dense = keras.layers.Dense
    return keras.Sequential([keras.Input((6,)), dense(4, "tanh"), dense(1, "sigmoid")])


def compare_fit(options: Callable[[], dict[str, Any]]) -> tuple[Any, Any]:
    strategy = central()
    with strategy.scope():
        ours = options()
    plain = {"metrics": None, "weighted_metrics": None}
    model = in_scope(strategy, small, **plain, **ours)
    alone = compiled(small(), **plain, **options())

    def fit(model: Any) -> Any:
        return model.fit(batches(), epochs=2, verbose=0).history

    logs = fit(model)
    assert_as_alone(model, alone, logs, lambda: fit(alone))
    return strategy, model


@on_ranks(*RANKS)
def fit_is_that_of_one_process_and_stores_once() -> None:
    strategy, model = compare_fit(lambda: {"optimizer": keras.optimizers.Adam(0.01)})
    if fd.size() > 1:
        assert_once_per_host(strategy, model, model.optimizer)
    path = folder_of_all() / "model.keras"
    scores, outputs = model.evaluate(X, Y, verbose=0), model.predict(X, verbose=0)
    model.save(path)
    with strategy.scope():
        again = keras.models.load_model(path)
    assert again.evaluate(X, Y, verbose=0) == scores
    assert again.predict(X, verbose=0).tolist() == outputs.tolist()
    losses = [m.fit(batches(), verbose=0).history["loss"] for m in (model, again)]
    assert losses[0] == losses[1]  # the optimizer's state was loaded
    if fd.size() > 1:
        work.assert_same_on_all_ranks(again)


@on_ranks(2)
def what_optimizers_do_besides_is_that_of_one_process() -> None:
    sgd = keras.optimizers.SGD
    compare_fit(lambda: {"optimizer": sgd(0.1, momentum=0.9, use_ema=True, weight_decay=0.01)})
    compare_fit(lambda: {"optimizer": sgd(0.5, gradient_accumulation_steps=2, clipnorm=0.1)})
    compare_fit(lambda: {"optimizer": keras.optimizers.Adafactor(0.01)})

    def scaled() -> dict[str, Any]:
        return {"optimizer": keras.optimizers.LossScaleOptimizer(sgd(0.1, momentum=0.9))}

    compare_fit(scaled)


@on_ranks(*RANKS)
def loops_are_those_of_one_process() -> None:
    for how in ("run in function", "run"):
        strategy = central()
        mine = Loop(strategy, BATCH)
        logs = mine.epochs(how, 1)
        alone = Loop(tf.distribute.get_strategy(), BATCH)
        right = alone.epochs
        assert int(mine.optimizer.iterations.numpy()) == 5
        assert_as_alone(mine.model, alone.model, logs, lambda right=right: right("run", 1))
        if fd.size() > 1:
            assert_once_per_host(strategy, mine.model, mine.optimizer)


@on_ranks(2)
def what_was_read_stays_as_it_was() -> None:
    """New values never replace what any rank still has."""
    strategy = central()
    with strategy.scope():
        variable = tf.Variable([0.0, 0.0], name="v")
    held = []
    for step in range(5):
        mine = fd.rank() == step % 2
        if mine:
            held.append((step, variable.read_value()))
        strategy.run(lambda: variable.assign_add([1.0, 2.0]))
    assert variable.numpy().tolist() == [5.0, 10.0]
    for step, value in held:
        assert value.numpy().tolist() == [step, 2.0 * step]
    buffers = strategy.extended.memory.buffers
    assert buffers() == (6 if fd.rank() == 0 else 0)
    del held[:], value
    fd.barrier()
    strategy.run(lambda: variable.assign_add([1.0, 2.0]))
    assert buffers() == (2 if fd.rank() == 0 else 0)


@on_ranks(2)
def a_rank_that_is_late_to_read_has_the_value_of_its_step() -> None:
    from farandole.strategy._host_memory import HostMemory

    strategy = central()
    with strategy.scope():
        variable = tf.Variable([0.0], name="v")
    held = []
    array = HostMemory.array

    def late(*args: Any) -> Any:
        time.sleep(0.2 * fd.rank())
        return array(*args)

    with mock.patch.object(HostMemory, "array", late):
        for _ in range(4):
            strategy.run(lambda: variable.assign_add([1.0]))
            if fd.rank() == 1:
                held.append(variable.read_value())
    assert [float(value[0]) for value in held] == [1.0, 2.0, 3.0, 4.0][: len(held)]
    assert len(held) == 4 * fd.rank()


@on_ranks(3)
def steps_write_for_all_ranks() -> None:
    strategy = central()
    kinds = tf.VariableAggregation
    with strategy.scope():
        plain = tf.Variable([1.0])
        summed = tf.Variable([1.0], aggregation=kinds.SUM)
        mean = tf.Variable([1.0], aggregation=kinds.MEAN)
        own = tf.Variable([0.0], trainable=False)
        halves = [tf.Variable([1.0], dtype=d) for d in (tf.float16, tf.bfloat16)]

    @tf.function
    def step() -> None:
        context = tf.distribute.get_replica_context()
        value = tf.cast([context.replica_id_in_sync_group + 1], tf.float32)
        plain.assign_sub(context.all_reduce("SUM", value))
        summed.assign_add(value)
        mean.assign(value)
        own.assign(value)
        for half in halves:
            half.assign_add(tf.cast([0.5], half.dtype))

    strategy.run(step)
    strategy.run(step)
    assert [float(v[0]) for v in halves] == [2.0, 2.0]
    assert [float(v[0]) for v in (plain, summed, mean)] == [-11.0, 13.0, 2.0]
    assert float(own[0]) == fd.rank() + 1  # not trained: the replica's
    plain.assign([4.0])  # outside of steps all ranks assign, as in MirroredStrategy
    strategy.run(step)
    assert float(plain[0]) == -2.0


@on_ranks(2)
def checkpoints_have_the_state_and_restore_it() -> None:
    folder = folder_of_all()

    def made() -> tuple[Any, Any]:
        loop = Loop(central(), BATCH)
        parts = {"model": loop.model, "optimizer": loop.optimizer}
        return loop, tf.train.Checkpoint(**parts)

    loop, checkpoint = made()
    loop.epochs("run in function", 1)
    path = checkpoint.save(str(folder / "c"))
    expected = loop.epochs("run in function", 1)["losses"]
    again, other = made()
    other.restore(path)
    assert again.epochs("run in function", 1)["losses"] == expected
    state = next(v for v in loop.optimizer.variables if v.shape.rank)
    if fd.rank() == 0:
        assert np.abs(state.numpy()).max() > 0
    else:
        with raises(fd.InvalidArgument, "on rank 0 alone", "this is rank 1"):
            state.numpy()
        assert "on rank 0" in repr(component(state))


@on_ranks(2)
def callbacks_and_weights_are_those_of_all_ranks() -> None:
    strategy = central()
    with strategy.scope():
        schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5)
        optimizer = keras.optimizers.SGD(schedule, momentum=0.9)
    model = in_scope(strategy, small, optimizer=optimizer, metrics=None, weighted_metrics=None)
    stops = keras.callbacks.EarlyStopping(
        "loss", patience=0, min_delta=10.0, restore_best_weights=True, start_from_epoch=1
    )
    model.fit(batches(), epochs=5, verbose=0, callbacks=[stops])
    assert stops.stopped_epoch == 2
    assert_same_bits(model.get_weights(), "weights")
    model.set_weights([w + fd.rank() for w in model.get_weights()])  # rank 0's are taken
    model.evaluate(X, Y, verbose=0)
    work.assert_same_on_all_ranks(model)
    assert_once_per_host(strategy, model, model.optimizer)


@on_ranks(2)
def values_of_any_size_find_a_place() -> None:
    from farandole.strategy import _host_memory

    with mock.patch.object(_host_memory, "_MAP", 1 << 16):  # larger values have maps of their own
        memory = _host_memory.HostMemory()
        lengths = [10, 60_000, 9_000, 200_000, 65_536, 100]
        values = [np.full(n, i + 1, np.uint8) for i, n in enumerate(lengths)]
        written = [memory.write(i, v) for i, v in enumerate(values)] if fd.rank() == 0 else None
        places = broadcast_object(written, 0, "places")
        arrays = [memory.array(at, n) for at, n in zip(places, lengths, strict=True)]
        for array, value in zip(arrays, values, strict=True):
            assert np.array_equal(array, value)
        fd.barrier()
        if fd.rank() == 0:
            other = memory.write(1, values[1])  # which rank 1 still reads
            assert other not in places
            memory.leave(1, lengths[1])
            assert memory.buffers() == 5
        fd.barrier()
        del arrays, array
        fd.barrier()
        if fd.rank() == 0:
            assert memory.write(7, values[1]) == places[1]


@on_ranks(2)
def several_hosts_are_refused() -> None:
    with (
        mock.patch("farandole._world.local_size", return_value=1),
        raises(fd.InvalidArgument, "2 ranks are on several hosts", "MultiWorkerMirroredStrategy"),
    ):
        central()


@on_ranks(2)
def memory_that_a_rank_cannot_open_is_an_error_on_all() -> None:
    strategy = central()
    with (
        mock.patch("os.open", side_effect=PermissionError("no")),
        strategy.scope(),
        raises(fd.InvalidArgument, "rank 1 cannot open the memory of rank 0", "one container"),
    ):
        tf.Variable([1.0])


test_on_ranks = make_tests(__name__, "keras on tensorflow")
