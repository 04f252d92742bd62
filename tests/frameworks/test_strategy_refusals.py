"""farandole.strategy with wrong arguments, wrong data, and ranks that differ: an error of ours on
every rank, after which the strategy goes on."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from keras_work import Late, keras
from rank_cases import make_tests, needs, on_ranks, raises

import farandole as fd
from wrong_arguments import problems_in, problems_of

needs("tensorflow", "keras")

tf: Any = Late("tensorflow")
strategies: Any = Late("farandole.strategy")
# Called with what a strategy passes, it raises an error of its own.
OWN = ("a_function",)


def problems(function: Callable[..., Any], like: Any, right: dict[str, Any]) -> list[str]:
    """Calls of `function` whose wrong argument has no proper error. `like` has its signature."""
    found = problems_of(function, inspect.signature(like), right)
    return [each for each in found if each.partition("=")[2].partition(":")[0] not in OWN]


@on_ranks(1)
def a_wrong_argument_is_an_error_of_ours() -> None:
    theirs = [vars(tf.distribute), vars(tf.distribute.experimental)]
    named = [(n, getattr(strategies, n)) for n in strategies.__all__]
    own = [n for n, value in named if any(value is each.get(n) for each in theirs)]
    apart = [*own, "ParameterServerStrategy"]
    right: dict[str, Any] = {"strategy": strategies.MirroredStrategy}
    assert problems_in(strategies, right, apart=apart) == []
    strategy = strategies.MirroredStrategy()
    dataset = tf.data.Dataset.range(8).batch(4)

    def step(*_: Any, **__: Any) -> Any:
        return tf.constant(1.0)

    def make(_: Any) -> Any:
        return dataset

    right = {
        "fn": lambda: step, "merge_fn": lambda: step, "reduce_op": "SUM", "axis": 0,
        "value": lambda: tf.constant([1.0]), "dataset": lambda: dataset, "dataset_fn": lambda: make,
        "value_fn": lambda: make,
    }  # fmt: skip
    for name in (
        "run", "reduce", "gather", "experimental_distribute_dataset", "experimental_local_results",
        "distribute_datasets_from_function", "experimental_distribute_values_from_function",
    ):  # fmt: skip
        method = getattr(strategy, name)
        assert problems(method, method, right) == [], name

    def in_a_replica(name: str) -> Callable[..., Any]:
        def call(**arguments: Any) -> Any:
            return strategy.run(
                lambda: getattr(tf.distribute.get_replica_context(), name)(**arguments)
            )

        return call

    for name in ("all_reduce", "all_gather", "merge_call"):
        method = getattr(strategy.run(tf.distribute.get_replica_context), name)
        assert problems(in_a_replica(name), method, right) == [], name


@on_ranks(1)
def what_is_wrong_is_named() -> None:
    strategy = strategies.MirroredStrategy()
    rows = tf.ones([2, 3])
    for call, *words in [
        (lambda: strategy.run(3), "run(): fn is 3; it is a function"),
        (lambda: strategy.run(len, 3), "run(): args is 3", "args=(batch,)"),
        (lambda: strategy.run(len, (), [1]), "run(): kwargs is [1]"),
        (lambda: strategy.reduce("PRODUCT", rows), "reduce_op is 'PRODUCT'; it is SUM or MEAN"),
        (lambda: strategy.reduce("SUM", rows, 2), "axis is 2; the value has the dimensions 0 to 1"),
        (lambda: strategy.reduce("MEAN", tf.constant(1.0), 0), "axis is 0", "no dimension"),
        (lambda: strategy.reduce("SUM", rows, "0"), "axis is '0'; it is a whole number, or None"),
        (lambda: strategy.reduce("SUM", "a", None), "of string, which is not supported"),
        (lambda: strategy.distribute_datasets_from_function(lambda _: [1]), "returned a list"),
        (lambda: strategies.MirroredStrategy(["GPU:7"]), "devices is ['GPU:7']", "has here CPU:0"),
        (lambda: strategies.MirroredStrategy("abc"), "devices is 'abc'", "has here CPU:0"),
        (lambda: strategies.MultiWorkerMirroredStrategy("a:1"), "cluster_resolver is 'a:1'"),
        (lambda: strategies.MultiWorkerMirroredStrategy(None, "x"), "options are 'x'"),
    ]:  # fmt: skip
        with raises(fd.InvalidArgument, *words):
            call()
    assert float(strategy.reduce("SUM", rows, axis=(0, 1))) == 6.0


@on_ranks(1)
def variables_of_a_step_that_runs_eagerly_are_the_strategys() -> None:
    strategy = strategies.MirroredStrategy()
    kinds = []

    def step() -> Any:
        assert tf.distribute.get_strategy() is strategy
        kinds.append(tf.Variable(2.0, aggregation=tf.VariableAggregation.SUM))
        return tf.distribute.get_replica_context().merge_call(
            lambda s: s.run(lambda: kinds[-1] * 2)  # a step inside of another's
        )

    assert float(strategy.run(step)) == 4.0
    with strategy.scope():
        assert float(strategy.run(step)) == 4.0
    assert not tf.distribute.has_strategy()
    assert all(v.distribute_strategy is strategy for v in kinds)
    tf.distribute.experimental_set_strategy(strategy)
    assert tf.distribute.get_strategy() is strategy
    assert float(strategy.run(step)) == 4.0
    tf.distribute.experimental_set_strategy(None)
    with raises(ZeroDivisionError):
        strategy.run(lambda: 1 / 0)
    with raises(RuntimeError):
        strategy.run(lambda: strategy.run(step))
    other = tf.distribute.OneDeviceStrategy("/cpu:0")
    with other.scope(), raises(RuntimeError):
        strategy.run(step)
    assert float(strategy.run(step)) == 4.0


def values_with(first: int, more: int) -> Any:
    """Below 20; from the first on, others on another rank."""
    values = np.arange(20)
    return tf.data.Dataset.from_tensor_slices(np.where(values >= first, values + more, values))


@on_ranks(3)
def data_of_ranks_that_differ_are_a_mismatch() -> None:
    strategy, me = strategies.MirroredStrategy(), fd.rank()
    numbers = tf.data.Dataset.range(20)

    def read(dataset: Any) -> list[float]:
        sums = []
        for part in strategy.experimental_distribute_dataset(dataset):
            mine = strategy.run(lambda x: tf.reduce_sum(x), args=(part,))
            sums.append(float(strategy.reduce("SUM", mine, axis=None)))
        return sums

    for dataset, *words in [
        (numbers.take(20 - 4 * me).batch(4), "rank 0: 5 batches", "rank 2: 3 batches"),
        (numbers.batch(4 + me), "batches"),
        (numbers.shuffle(20, seed=me).batch(4), "seed=42"),
        (values_with(8, me).batch(4), "batch 3 ", "ranks 1, 2"),
        (numbers.map(lambda i: i + me).batch(4), "batch 1 ", "ranks 1, 2"),  # another map
    ]:
        with raises(fd.Mismatch, *words):
            read(dataset)
    assert read(numbers.take(5).batch(2)) == [1.0, 5.0, 4.0]  # some ranks have no sample
    assert read(numbers.batch(7)) == [21.0, 70.0, 99.0]


@on_ranks(2)
def data_that_differ_are_found_wherever_a_loop_is() -> None:
    """Also where Python has no part in it, and later than in the first batches."""
    strategy, me = strategies.MirroredStrategy(), fd.rank()
    numbers = tf.data.Dataset.range(20)

    def total(part: Any) -> Any:
        mine = strategy.run(lambda x: tf.reduce_sum(x), args=(part,))
        return strategy.reduce("SUM", mine, axis=None)

    @tf.function
    def whole(dataset: Any) -> Any:
        result = tf.constant(0, tf.int64)
        for part in dataset:
            result += total(part)
        return result

    @tf.function
    def two(iterator: Any, other: Any) -> Any:
        return total(next(iterator)) + total(next(other)) + total(next(iterator))

    def distributed(dataset: Any) -> Any:
        return strategy.experimental_distribute_dataset(dataset)

    late = values_with(12, me).batch(2)
    for dataset, *words in [
        (numbers.shuffle(20, seed=me).batch(4), "farandole.Mismatch: ranks read", "seed=42"),
        (late, "batch 7 of pass 1"),
        (late.filter(lambda _: True), "batch 7 of pass 1"),
    ]:
        with raises(Exception, *words):
            whole(distributed(dataset))
    inner = tf.function(total)
    with raises(fd.Mismatch, "batch 7 of pass 1"):
        [inner(part) for part in distributed(late)]
    same = distributed(numbers.shuffle(20, seed=3).batch(3))
    assert [int(whole(same)) for _ in range(2)] == [190, 190]
    again = distributed(numbers.batch(2))
    assert int(two(iter(again), iter(same))) > 0
    with raises(Exception, "ranks read different batches"):
        two(iter(distributed(numbers.shuffle(20, seed=me).batch(2))), iter(again))
    shorter = numbers.take(20 - 4 * me).filter(lambda _: True).batch(4)  # nobody knows its length
    with raises(fd.Mismatch, "rank 0: the end of the data, after 5", "rank 1: the end of the data"):
        list(distributed(shorter))


@on_ranks(2)
def what_a_replica_writes_is_of_the_scope() -> None:
    strategy = strategies.MirroredStrategy()
    variable, count = tf.Variable(1.0, name="outside"), tf.Variable(0)
    metric, model = keras.metrics.Mean("mine"), keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")

    def write() -> Any:
        return variable.assign_add(variable * 2.0)

    for call in (write, lambda: metric.update_state(1.0)):
        words = "variable 'outside:0'" if call is write else "variable 'mine/total:0'"
        with raises(fd.InvalidArgument, words):
            strategy.run(call)
        with raises(Exception, "InvalidArgument", words):  # AutoGraph's, of the same text
            tf.function(strategy.run)(call)
    assert float(strategy.run(lambda: variable * 2.0)) == 2.0
    assert int(strategy.run(lambda: count.assign_add(1))) == 1
    assert float(write()) == 3.0  # where no replica is
    x = np.ones((4, 2), "float32")
    with pytest.warns(UserWarning, match="each rank trains it alone"):
        model.fit(x, x[:, :1], verbose=0)


@on_ranks(2)
def models_in_a_scope_say_what_is_wrong_on_every_rank() -> None:
    strategy, fewer = strategies.MirroredStrategy(), 9 - fd.rank()
    x, y = np.ones((9, 2), "float32"), np.ones((9, 1), "float32")
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with raises(fd.InvalidArgument, "not compiled"):
        model.fit(x, y)
    model.compile("sgd", "mse")
    unbatched = tf.data.Dataset.from_tensor_slices((x, y))
    for error, words, call in [
        (fd.InvalidArgument, "not batched", lambda: model.fit(unbatched)),
        (fd.InvalidArgument, "batch_size is 0", lambda: model.fit(x, y, batch_size=0)),
        (fd.Mismatch, "rank 1: 8 samples", lambda: model.fit(x[:fewer], y[:fewer])),
        (fd.Mismatch, "epochs 2", lambda: model.fit(x, y, epochs=1 + fd.rank())),
        (fd.InvalidArgument, "rank 1" if fd.rank() == 0 else "batch_size is -1",
         lambda: model.evaluate(x, y, batch_size=4 - 5 * fd.rank())),
        (fd.InvalidArgument, "which is a str", lambda: model.predict("x")),
    ]:  # fmt: skip
        with raises(error, words):
            call()
    logs = model.fit(x, y, batch_size=1, verbose=0).history  # less than there are ranks
    assert len(logs["loss"]) == 1


test_on_ranks = make_tests(__name__, "keras on tensorflow")
