"""farandole.tensorflow.elastic: functions that were traced in one world run in the next ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow")

import tensorflow as tf
from rank_cases import raises

import elastic_worlds
import farandole as fd
import farandole.tensorflow as hvd
from elastic_worlds import Changes, Worlds
from harness import World

Rows = list[list[Any]]


def join(elastic: bool = True) -> None:
    tf.config.threading.set_inter_op_parallelism_threads(2)
    elastic_worlds.begin(elastic)
    hvd.init()


def gradients_of(x: Any, ours: Sequence[Any], **options: Any) -> list[Any]:
    """Gradients of a dense variable, of rows that ranks share in part, and of a local variable."""
    dense, rows, own = ours
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(dense * x) + own * tf.reduce_sum(x)
        loss += tf.reduce_sum(tf.gather(rows, [0, 0, hvd.rank_op()])) * x[0]
    tape = hvd.DistributedGradientTape(tape, **options)
    tape.register_local_source(own)
    return [tf.convert_to_tensor(each) for each in tape.gradient(loss, ours)]


def derivative_of(function: Callable[[Any], Any]) -> Any:
    def call(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        return tape.gradient(y, x)

    return tf.function(call)


def in_worlds(present: Sequence[int]) -> list[tuple[int, int, Rows]]:
    """Rank, size, and results of the same functions, in as many worlds."""
    join()
    ours = [tf.Variable([1.0, 2.0]), tf.Variable(tf.zeros([3, 1])), tf.Variable(1.0)]
    plain = tf.function(lambda x: gradients_of(x, ours))
    divided = tf.function(lambda x: gradients_of(x, ours, gradient_predivide_factor=2.0))
    others = [
        derivative_of(lambda x: tf.cast(tf.range(2 * hvd.size_op()), x.dtype) * hvd.allgather(x)),
        derivative_of(lambda x: hvd.broadcast(x, 0)),
        derivative_of(lambda x: hvd.reducescatter(x, op=hvd.Sum)),
    ]
    found = []
    for number in present:
        if number != present[0]:
            hvd.shutdown()
            hvd.init()
        x = tf.fill([2], hvd.rank() + 1.0)
        # The first function that runs in a world compares the ranks' variables. In later worlds
        # that is another function.
        functions = [plain, divided] if number < 3 else [divided, plain]
        of_tapes = [f(x) for f in (*functions, lambda x: gradients_of(x, ours))]
        results: Rows = [[each.numpy().tolist() for each in row] for row in of_tapes]
        results.append([f(x).numpy().tolist() for f in others])
        found.append((hvd.rank(), hvd.size(), results))
    hvd.shutdown()
    return found


def right(rank: int, size: int) -> Rows:
    mean = (size + 1) / 2  # of what ranks have for x
    rows = [[(r + 1) / size] if r < size else [0.0] for r in range(3)]
    rows[0][0] += 2 * mean
    of_tape = [[mean, mean], rows, 2 * (rank + 1) / size]
    root = [1.0, 1.0] if rank == 0 else [0.0, 0.0]
    return [of_tape] * 3 + [[[2.0 * rank, 2.0 * rank + 1], root, [float(size)] * 2]]


def test_functions_go_on_in_worlds_of_other_sizes(spawn: Callable[..., World]) -> None:
    ranks = spawn(4, "tensorflow")
    worlds = Worlds(ranks)
    members = [[0, 1, 2], [1, 2], [2], [2, 3]]
    for rank in range(4):
        present = [number for number, those in enumerate(members) if rank in those]
        ranks.start(in_worlds, present, ranks=[rank])
    for those in members:
        worlds.form(*those)
    for outcome in ranks.outcomes():
        assert outcome.error is None, outcome.trace
        for place, size, results in outcome.value:
            for mine, expected in zip(results, right(place, size), strict=True):
                for value, wanted in zip(mine, expected, strict=True):
                    np.testing.assert_allclose(value, wanted, rtol=1e-6)


STEPS = 8


def batch(step: int) -> tuple[Any, Any]:
    """Six samples, of which each rank has its share."""
    x = np.random.default_rng(step).normal(size=(6, 3)).astype("float32")
    return x, x[:, :1] - x[:, 1:2]


class Training:
    """Two models, which programs of one's own train: by a tape, and by an optimizer's gradients."""

    def __init__(self, seed: int, wraps: bool) -> None:
        tf.keras.utils.set_random_seed(seed)
        self.models = [
            tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(1)]) for _ in range(2)
        ]
        self.optimizers: Any = [tf.keras.optimizers.Adam(0.1) for _ in range(2)]
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            optimizer.build(model.trainable_variables)
        self._wraps = wraps
        if wraps:
            hvd.DistributedOptimizer(self.optimizers[1])
        self.step = tf.function(self._step)

    def _step(self, x: Any, y: Any) -> None:
        for i, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - y) ** 2)
            tape = hvd.DistributedGradientTape(tape) if self._wraps and i == 0 else tape
            variables = model.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)

    def variables(self) -> list[Any]:
        of_models = [w.value for model in self.models for w in model.weights]
        return of_models + [v.value for each in self.optimizers for v in each.variables]

    def values(self) -> list[Any]:
        return [v.numpy() for v in self.variables()]


def trained(own: int) -> tuple[list[int], list[Any], list[Any]]:
    join()
    training = Training(1 if own == 0 else 7, wraps=True)
    state = hvd.elastic.TensorFlowState(training.variables(), step=0, sizes=[])

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.step < STEPS:
            if own in (1, 2) and state.step == 3:
                elastic_worlds.die()
            share = 6 // hvd.size()
            x, y = (e[hvd.rank() * share : (hvd.rank() + 1) * share] for e in batch(state.step))
            training.step(tf.constant(x), tf.constant(y))
            state.step += 1
            state.sizes.append(hvd.size())
            if hvd.size() == 1 and state.step == 5:
                elastic_worlds.hear(Changes(wanted=True, only_fewer=False))
            state.commit()

    train(state)
    alone = Training(1, wraps=False)
    for step in range(STEPS):
        alone.step(*map(tf.constant, batch(step)))
    return state.sizes, training.values(), alone.values()


def test_a_function_that_trains_goes_on(spawn: Callable[..., World]) -> None:
    """With one rank that is left, and then with one more."""
    ranks = spawn(4, "tensorflow")
    for rank in range(4):
        ranks.start(trained, rank, ranks=[rank])
    worlds = Worlds(ranks)
    worlds.form(0, 1, 2)
    worlds.form(0)
    worlds.form(0, 3)
    for rank in (0, 3):
        outcome = ranks.outcome(rank)
        assert outcome.error is None, outcome.trace
        sizes, mine, expected = outcome.value
        assert sizes == [3] * 3 + [1] * 2 + [2] * 3
        for value, wanted in zip(mine, expected, strict=True):
            np.testing.assert_allclose(value, wanted, atol=1e-5)
        assert "AutoGraph could not" not in ranks.output(rank)


def states_keep_what_they_are_given() -> None:
    join(elastic=False)
    me = float(hvd.rank() + 1)
    model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
    model.compile(tf.keras.optimizers.SGD(0.1, momentum=0.9))
    state = hvd.elastic.TensorFlowKerasState(model, epoch=int(me))
    assert model.optimizer.built
    model.layers[0].bias.assign([me])
    state.sync()
    assert (model.layers[0].bias.numpy().tolist(), state.epoch) == ([1.0], 1)
    model.layers[0].bias.assign([5.0])
    state.epoch = 5
    state.restore()
    assert (model.layers[0].bias.numpy().tolist(), state.epoch) == ([1.0], 1)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        v = tf.compat.v1.get_variable("v", initializer=tf.constant([0.0, me]))
        session.run(v.initializer)
        state = hvd.elastic.TensorFlowState(session=session, step=0)
        session.run(v.assign([3.0, 3.0]))
        state.restore()
        assert session.run(v).tolist() == [0.0, me]
        state.sync()
        assert session.run(v).tolist() == [0.0, 1.0]
    with raises(fd.InvalidArgument, "has no variables"):
        hvd.elastic.TensorFlowState()
    with raises(fd.InvalidArgument, "not a model of Keras"):
        hvd.elastic.TensorFlowKerasState(3)


def what_is_of_one_world_is_refused() -> None:
    from farandole import keras, parameter_server, strategy

    join()

    @tf.function
    def adasum(x: Any) -> Any:
        return hvd.allreduce(x, op=hvd.Adasum)

    one = hvd.add_process_set([0])
    on_set = tf.function(lambda x: hvd.allreduce(x, process_set=one))
    model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1)), "mse")
    x = tf.ones((4, 2))
    for call, words in (
        (lambda: adasum(x), "made for one number of ranks"),
        (lambda: on_set(x), "ends with its world"),
        (lambda: model.fit(x, x[:, :1], verbose=0), "a step of DistributedSGD outside of elastic"),
        (lambda: keras.Model(model), "farandole.keras.Model in an elastic job"),
        (lambda: keras.Pipeline(model), "Pipeline in an elastic job"),
        (lambda: keras.ParameterServer(), "ParameterServer in an elastic job"),
        (lambda: strategy.MirroredStrategy(), "a strategy of tf.distribute in an elastic job"),
        (lambda: strategy.ParameterServerStrategy(), "ServerStrategy in an elastic job"),
        (lambda: parameter_server.join({}, parameter_server.SGD(0.1)), "a parameter server in an"),
    ):
        with raises(fd.InvalidArgument, words):
            call()


@pytest.mark.parametrize("case", [states_keep_what_they_are_given, what_is_of_one_world_is_refused])
def test_on_two_ranks(case: Callable[[], None], spawn: Callable[..., World]) -> None:
    ranks = spawn(2, "tensorflow")
    ranks.start(case)
    Worlds(ranks).form(0, 1)
    for outcome in ranks.outcomes():
        assert outcome.error is None, outcome.trace
