"""ParameterServerStrategy and ClusterCoordinator: with one worker the loop is that of one process,
with more every closure counts once, even if ranks die, and errors come to the program on all ranks.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from keras_work import Late, data, keras
from rank_cases import needs, raises

import farandole as fd
import harness
from harness import World

needs("tensorflow", "keras")

tf: Any = Late("tensorflow")
strategies: Any = Late("farandole.strategy")
Spawn = Callable[..., World]
Body = Callable[[Any, Any], Any]
ON = "keras on tensorflow"


def program(body: Body, **options: Any) -> Any:
    """The program of each rank; a server returns "served"."""
    try:
        strategy = strategies.ParameterServerStrategy(**options)
    except SystemExit as left:
        return "served" if left.code == 0 else left.code
    try:
        return body(strategy, strategies.ClusterCoordinator(strategy))
    finally:  # if it has failed, the others hear of it
        fd.shutdown()


# ---- one worker ----


class Training:
    """TensorFlow's custom loop: the model, the optimizer, a metric, and a step of them."""

    def __init__(self, strategy: Any, seed: int) -> None:
        keras.utils.set_random_seed(seed)
        self.model = keras.Sequential(
            [keras.Input((8,)), keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(1)]
        )
        self.optimizer = keras.optimizers.Adam(0.02)
        self.mae = keras.metrics.MeanAbsoluteError()

        def replica_fn(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                out = self.model(x, training=True)
                loss = tf.nn.compute_average_loss(tf.reduce_mean((out - y) ** 2, axis=1))
            gradients = tape.gradient(loss, self.model.trainable_variables)
            self.optimizer.apply_gradients(
                zip(gradients, self.model.trainable_variables, strict=True)
            )
            self.mae.update_state(y, out)
            return loss

        def step(iterator: Any) -> Any:
            return strategy.reduce("SUM", strategy.run(replica_fn, args=next(iterator)), axis=None)

        self.step = tf.function(step)

    @property
    def weights(self) -> list[np.ndarray]:
        return [np.array(each) for each in self.model.get_weights()]


def batches(_: Any = None) -> Any:
    return tf.data.Dataset.from_tensor_slices(data()).batch(12).repeat()


def loop(strategy: Any, coordinator: Any, folder: Path) -> Any:
    with strategy.scope():
        ours = Training(strategy, seed=1 + fd.rank())
    dataset = coordinator.create_per_worker_dataset(
        tf.function(lambda: strategy.distribute_datasets_from_function(batches))
    )
    iterator = iter(dataset)
    read = tf.function(lambda: [tf.identity(v.value) for v in ours.model.trainable_variables])
    first = coordinator.schedule(read).fetch()
    for mine, its in zip(ours.weights, first, strict=True):  # the chief's, on workers too
        np.testing.assert_array_equal(mine, its)
    with raises(fd.InvalidArgument, "farandole.keras.ParameterServer"):
        ours.model.fit(*data())
    right: dict[str, Any] = {}
    if fd.rank() == 0:
        plain = tf.distribute.get_strategy()
        alone, own = Training(plain, seed=1), iter(batches())
    for epoch in range(2):
        ours.mae.reset_state()
        remote = [coordinator.schedule(ours.step, args=(iterator,)) for _ in range(6)]
        coordinator.join()
        losses = coordinator.fetch(remote)
        assert coordinator.done()
        if fd.rank() == 0:
            alone.mae.reset_state()
            right[f"losses {epoch}"] = losses, [float(alone.step(own)) for _ in range(6)]
            right[f"mae {epoch}"] = float(ours.mae.result()), float(alone.mae.result())
    if fd.rank() == 0:
        for mine, its in zip(ours.weights, alone.weights, strict=True):
            np.testing.assert_allclose(mine, its, rtol=1e-4, atol=1e-5)
        for name, (mine, its) in right.items():
            np.testing.assert_allclose(mine, its, rtol=1e-4, err_msg=name)
    trained, count = ours.weights, int(ours.optimizer.iterations)
    # Changes by the program itself: by a checkpoint, and by methods.
    checkpoint = tf.train.Checkpoint(model=ours.model, optimizer=ours.optimizer)
    manager = tf.train.CheckpointManager(checkpoint, folder / f"of-{fd.rank()}", max_to_keep=2)
    manager.save()
    ours.model.set_weights([np.zeros_like(each) for each in trained])
    ours.model.save(folder / f"model-of-{fd.rank()}.keras")
    zeros = coordinator.schedule(read).fetch()
    assert not any(each.any() for each in zeros)
    coordinator.join()
    if fd.rank() == 0:  # what a worker's program sets would not count
        checkpoint.restore(manager.latest_checkpoint).assert_consumed()
    again = coordinator.schedule(read).get()
    assert all((np.array(a) == b).all() for a, b in zip(again, trained, strict=True))
    return trained, count


def in_a_folder(folder: str) -> Any:
    return program(lambda strategy, coordinator: loop(strategy, coordinator, Path(folder)))


def test_one_worker_is_as_alone(spawn: Spawn, tmp_path: Path) -> None:
    chief, worker, server = spawn(3, ON).run(in_a_folder, str(tmp_path))
    assert server == "served"
    for mine, its in zip(chief[0], worker[0], strict=True):
        assert (mine == its).all()
    assert chief[1] == worker[1] == 12
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model-of-0.keras", "of-0"]


# ---- several ----


def counting(strategy: Any, coordinator: Any) -> Any:
    """Counts in whole numbers, so that sums are exact in any order."""
    with strategy.scope():
        added = tf.Variable(tf.zeros((), tf.int64))
        read_and_set = keras.Variable(0.0, name="as Keras counts")
        table = tf.Variable(tf.zeros((300, 80)), name="table")
        last = tf.Variable(0.0, name="last")
        half = tf.Variable(tf.zeros(3, tf.bool), name="flags")
        mean = keras.metrics.Mean()

    @tf.function
    def step(number: Any) -> Any:
        added.assign_add(1)
        read_and_set.assign_add(1.0)  # which Keras reads, and sets
        table.scatter_add(tf.IndexedSlices(tf.ones((2, 80)), tf.stack([number, number + 1])))
        if number > 10:
            last.assign(7.0)  # set, not read: it is 7, however often
        half.assign(tf.ones(3, tf.bool))
        mean.reset_state()  # set, and then counted: it is of one closure, whichever was last
        mean.update_state(5.0)
        return number * 2

    def eagerly(number: int) -> int:
        added.assign_add(number)
        return fd.rank()

    remote = [coordinator.schedule(step, args=(tf.constant(n),)) for n in range(40)]
    ranks = [coordinator.schedule(eagerly, kwargs={"number": 100}) for _ in range(10)]
    with raises(fd.InvalidArgument, "as fetch() returns it"):
        coordinator.schedule(step, args=(remote[0],))
    while not coordinator.done():
        assert 0 <= float(read_and_set) <= 40
    assert int(added) == 1040 or fd.rank() != 0
    coordinator.join()
    assert coordinator.fetch(remote) == [2 * n for n in range(40)]
    assert set(coordinator.fetch(ranks)) <= {1, 2}
    assert (float(mean.total), float(mean.count)) == (5, 1)
    rows = table.numpy()
    assert (rows[1:40] == 2).all()
    assert (rows[[0, 40]] == 1).all()
    assert not rows[41:].any()
    placed = strategy.extended.store._worker._on_server
    parts = [[name for name, _ in each if name.endswith("table:0")] for each in placed]
    return int(added), float(read_and_set), float(last), half.numpy().all(), list(map(len, parts))


def sharding(strategy: Any, coordinator: Any) -> Any:
    """Each worker reads its part of the numbers, and knows which worker it is."""
    index = strategies.coordinator.experimental_get_current_worker_index
    with raises(fd.InvalidArgument, "no function of a worker runs here"):
        index()

    def part(_: Any) -> Any:
        return tf.data.Dataset.range(10).shard(2, index()).repeat()

    dataset = coordinator.create_per_worker_dataset(
        tf.function(lambda: strategy.distribute_datasets_from_function(part))
    )

    @tf.function
    def step(iterator: Any) -> Any:
        return index(), next(iterator)

    iterator = iter(dataset)
    eager = [coordinator.schedule(lambda: (int(index()), fd.rank())) for _ in range(8)]
    traced = [coordinator.schedule(step, args=(iterator,)) for _ in range(8)]
    coordinator.join()
    assert all(number == rank - 1 for number, rank in coordinator.fetch(eager))
    for number, read in coordinator.fetch(traced):
        assert read % 2 == number
    return sorted({int(number) for number, _ in coordinator.fetch(traced)})


def in_shards() -> Any:
    return program(sharding)


def test_a_worker_knows_which_one_it_is(spawn: Spawn) -> None:
    chief, *workers, server = spawn(4, ON).run(in_shards)
    assert server == "served"
    assert set(chief) <= {0, 1}
    assert workers == [chief, chief]


def by_a_cluster(parts: int) -> Any:
    cut = tf.distribute.experimental.partitioners.FixedShardsPartitioner(parts)
    return program(counting, variable_partitioner=cut)


@pytest.mark.parametrize("parts", [1, 2])
def test_every_closure_counts_once(spawn: Spawn, parts: int) -> None:
    roles = [("chief", 0), ("worker", 0), ("worker", 1), ("ps", 0), ("ps", 1)]
    cluster: dict[str, list[str]] = {}
    for at, (role, _) in enumerate(roles):
        cluster.setdefault(role, []).append(f"localhost:{23460 + at}")
    each = [
        {
            "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": role, "index": n}}),
            **dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")),
            "FARANDOLE_RUN_ID": None,
        }
        for role, n in roles
    ]
    *others, one, two = spawn(5, ON, each=each).run(by_a_cluster, parts)
    assert one == two == "served"
    for added, as_keras, last, flags, placed in others:
        assert (added, as_keras, last, flags) == (1040, 40, 7, True)
        assert sorted(placed) == ([0, 1] if parts == 1 else [1, 1])


def dying(strategy: Any, coordinator: Any) -> Any:
    with strategy.scope():
        count = tf.Variable(0.0)
    began: list[bool] = []

    def step() -> None:
        count.assign_add(1.0)
        if not began:
            began.append(True)
            harness.tell("holds one")
            harness.listen()

    for _ in range(6):
        coordinator.schedule(step)
    coordinator.join()
    return float(count)


def one_dies() -> Any:
    return program(dying)


def test_a_closure_of_a_dead_worker_is_run_by_another(spawn: Spawn) -> None:
    world = spawn(4, ON)
    world.start(one_dies)
    assert world.hear_all([1, 2]) == ["holds one"] * 2
    world.signal(2, signal.SIGKILL)
    world.say(1, "go on")
    assert [world.outcome(rank).value for rank in (0, 1, 3)] == [6.0, 6.0, "served"]
    assert "0 of 2" not in world.output(0)
    assert "1 of 2 workers go on; closure" in world.output(0)


# ---- errors ----


def ask_until_done(coordinator: Any) -> None:
    while not coordinator.done():
        pass


def failing(strategy: Any, coordinator: Any) -> Any:
    with strategy.scope():
        count = tf.Variable(0)

    def wait() -> None:
        harness.listen()

    @tf.function
    def step(number: Any) -> None:
        tf.debugging.assert_less(number, 3, "too much")
        count.assign_add(1)

    def refuse() -> None:
        raise KeyError("no")

    remote = [coordinator.schedule(wait)]
    remote += [coordinator.schedule(step, args=(tf.constant(n),)) for n in range(6)]
    if fd.rank() == 0:
        harness.tell("scheduled")
    with pytest.raises(tf.errors.InvalidArgumentError, match="too much") as caught:
        coordinator.join()
    assert "closure 4 (step) on rank 1:\nTraceback" in str(caught.value.__cause__)
    coordinator.fetch(remote[:4])
    with pytest.raises(tf.errors.InvalidArgumentError):
        remote[4].fetch()
    with pytest.raises(tf.errors.CancelledError, match=r"closure 5 .* cancelled, as closure 4"):
        coordinator.fetch(remote[5])
    coordinator.schedule(refuse)
    with pytest.raises(KeyError):
        ask_until_done(coordinator)
    coordinator.schedule(step, args=(tf.constant(0),))
    coordinator.join()
    assert int(count) == 4

    with raises(fd.InvalidArgument, "a ParameterServerStrategy already"):
        strategies.ParameterServerStrategy()
    with raises(fd.InvalidArgument, "it is a function"):
        coordinator.schedule(3)
    with raises(fd.InvalidArgument, "args=(iterator,)"):
        coordinator.schedule(step, args=3)
    with raises(fd.InvalidArgument, "ParameterServerStrategy"):
        strategies.ClusterCoordinator(tf.distribute.get_strategy())
    with raises(fd.InvalidArgument, "a function that returns one"):
        coordinator.create_per_worker_dataset(lambda: 3)
    with raises(fd.InvalidArgument, "in closures only"):
        next(iter(coordinator.create_per_worker_dataset(batches())))
    with strategy.scope(), raises(fd.InvalidArgument, "servers have numbers"):
        tf.Variable("text")
    outside = tf.Variable(1.0, name="outside")
    with raises(fd.InvalidArgument, "closure 9 (<lambda>) uses variable 'outside:0'"):
        coordinator.schedule(tf.function(lambda: outside * 2))
    assert strategies.ClusterCoordinator(strategy) is coordinator
    if fd.rank() == 0:
        assert coordinator.done()
    else:
        with raises(fd.Mismatch, "rank 0 asks after", "rank 1 joins after"):
            coordinator.join()
    return "through"


def cluster_of(**tasks: int) -> Any:
    cluster = {role: [f"host:{role}{n}" for n in range(count)] for role, count in tasks.items()}
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), task_type=next(iter(tasks)), task_id=0
    )


def with_errors() -> Any:
    with raises(fd.InvalidArgument, "farandole run -np 4 or more"):
        strategies.ParameterServerStrategy(servers=2)
    with raises(fd.InvalidArgument, "no chief and no ps; it has worker"):
        strategies.ParameterServerStrategy(cluster_of(worker=2))
    with raises(fd.InvalidArgument, "the task 'evaluator' number 0"):
        strategies.ParameterServerStrategy(cluster_of(evaluator=1, chief=1, worker=1, ps=1))
    with raises(fd.InvalidArgument, "servers is 3; the cluster has 1 ps"):
        strategies.ParameterServerStrategy(cluster_of(chief=1, worker=1, ps=1), servers=3)
    with raises(fd.InvalidArgument, "rank 0 of the cluster's 4 tasks, and the launcher made it"):
        strategies.ParameterServerStrategy(cluster_of(chief=1, worker=2, ps=1))
    with raises(fd.InvalidArgument, "servers is 0"):
        strategies.ParameterServerStrategy(servers=0)
    with raises(fd.InvalidArgument, "variable_partitioner is 3"):
        strategies.ParameterServerStrategy(variable_partitioner=3)
    return program(failing)


def test_errors_come_to_the_program_on_all_ranks(spawn: Spawn) -> None:
    world = spawn(3, ON)
    world.start(with_errors)
    assert world.hear(0) == "scheduled"
    world.say(1, "go on")
    assert [each.value or each.trace for each in world.outcomes()] == ["through"] * 2 + ["served"]
