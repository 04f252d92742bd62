"""Training with a DistributedGradientTape: N ranks against one process on the joined batch."""

from __future__ import annotations

import functools
import importlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

import keras
import tensorflow as tf
from rank_cases import begin_tensorflow, make_tests, on_ranks, refused

import farandole as fd
import farandole.horovod
import farandole.tensorflow as hvd

ROWS = 12  # of the joined batch: 1, 2, 3 and 4 ranks divide it
STEPS = 6


def prepare() -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    two = [tf.config.LogicalDeviceConfiguration() for _ in range(2)]
    tf.config.set_logical_device_configuration(cpu, two)  # two replicas of tf.distribute
    begin_tensorflow()


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(step)
    x = random.normal(size=(ROWS, 5)).astype(np.float32)
    return x, np.tanh(x @ np.ones((5, 2), np.float32))


def net(seed: int = 1) -> tuple[list[tf.Variable], Callable[[Any], Any]]:
    random = np.random.default_rng(seed)
    shapes = {"first": (5, 7), "bias": (7,), "second": (7, 2)}
    ws = [tf.Variable(random.normal(size=s).astype(np.float32), name=n) for n, s in shapes.items()]
    return ws, lambda x: tf.tanh(x @ ws[0] + ws[1]) @ ws[2]


def train(*, distributed: bool, graph: bool, **options: Any) -> list[np.ndarray]:
    """The weights after some steps of SGD."""
    variables, model = net()

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        if distributed:
            tape = hvd.DistributedGradientTape(tape, **options)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.3 * gradient)
        return loss

    run = tf.function(step) if graph else step
    for i in range(STEPS):
        x, y = batch(i)
        mine = slice(hvd.rank(), None, hvd.size()) if distributed else slice(None)
        run(tf.constant(x[mine]), tf.constant(y[mine]))
    return [v.numpy() for v in variables]


@on_ranks(1, 2, 3)
def ranks_together_train_as_one_process_does() -> None:
    alone = train(distributed=False, graph=True)
    variables = net()[0]
    for graph in (True, False):
        for options, tolerance in (
            ({}, 1e-5),
            ({"num_groups": 2}, 1e-5),
            ({"gradient_predivide_factor": 2.0}, 1e-5),
            ({"compression": hvd.Compression.fp16}, 1e-2),
            ({"compression": hvd.Compression.bf16}, 5e-2),
        ):
            together = train(distributed=True, graph=graph, **options)
            for mine, right in zip(together, alone, strict=True):
                np.testing.assert_allclose(mine, right, atol=tolerance)
            everybody = hvd.allgather_object([w.tobytes() for w in together])
            assert all(weights == everybody[0] for weights in everybody), "bits differ"
    del variables


@on_ranks(2)
def groups_are_lists_of_variables_too() -> None:
    variables = [tf.Variable([1.0]), tf.Variable([2.0]), tf.Variable([3.0])]

    @tf.function
    def gradients() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.add_n([v * (i + 1.0 + hvd.rank()) for i, v in enumerate(variables)])
        tape = hvd.DistributedGradientTape(tape, groups=[[variables[2], variables[0]]], op=hvd.Sum)
        return tape.gradient(loss, variables)

    assert [g.numpy().item() for g in gradients()] == [3.0, 5.0, 7.0]


@on_ranks(2)
def embeddings_and_structures_and_unused_variables() -> None:
    table = tf.Variable(np.zeros((6, 2), np.float32), name="table")
    weight = tf.Variable([2.0], name="weight")
    unused = tf.Variable([0.0], name="unused")

    def gradients(rows: tf.Tensor, as_dense: bool = False) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_sum(tf.gather(table, rows)) + weight * (1.0 + hvd.rank())
        tape = hvd.DistributedGradientTape(tape, sparse_as_dense=as_dense)
        return tape.gradient(loss, {"table": table, "rest": [weight, unused]})

    for run in (gradients, tf.function(gradients)):
        rows = tf.constant([hvd.rank(), 2])
        found = run(rows)
        assert found["rest"][1] is None
        assert found["rest"][0].numpy().tolist() == [1.5]
        assert isinstance(found["table"], tf.IndexedSlices)
        dense = tf.convert_to_tensor(found["table"])
        assert dense.numpy()[:, 0].tolist() == [0.5, 0.5, 1.0, 0.0, 0.0, 0.0]
        as_dense = run(rows, True)["table"]
        assert not isinstance(as_dense, tf.IndexedSlices)
        assert np.array_equal(as_dense.numpy(), dense.numpy())


@on_ranks(2)
def local_sources_keep_their_own_gradients() -> None:
    shared, local = tf.Variable([1.0]), tf.Variable([1.0])
    for scaled in (True, False):
        with tf.GradientTape() as tape:
            loss = (shared + local) * (1.0 + hvd.rank())
        tape = hvd.DistributedGradientTape(tape, scale_local_gradients=scaled)
        tape.register_local_source(local)
        ours, theirs = tape.get_local_and_global_gradients(loss, [shared, local])
        assert theirs[0][0] is shared
        assert theirs[0][1].numpy().tolist() == [1.5]
        assert ours[0][0] is local
        assert ours[0][1].numpy().item() == (1.0 + hvd.rank()) / (2 if scaled else 1)
    layer = keras.layers.Dense(1)
    layer.build((None, 1))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.ones([1, 1]))) * (1.0 + hvd.rank())
    tape = hvd.PartialDistributedGradientTape(
        tape, local_layers=[layer], scale_local_gradients=False
    )
    kernel, _ = tape.gradient(loss, [w.value for w in layer.trainable_weights])
    assert kernel.numpy().item() == 1.0 + hvd.rank(), "of their values, too"
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.ones([1, 1]))) * (1.0 + hvd.rank())
    tape = hvd.PartialDistributedGradientTape(tape, local_layers=layer, scale_local_gradients=False)
    kernel, _ = tape.gradient(loss, layer.trainable_weights)
    assert kernel.numpy().item() == 1.0 + hvd.rank()


def fails_on_all_ranks(call: Callable[[], Any], pattern: str) -> None:
    for run in (call, tf.function(call)):
        with pytest.raises(tf.errors.FailedPreconditionError, match=pattern):
            run()
        total = hvd.allreduce(tf.ones(1), op=hvd.Sum, name="after")
        assert total.numpy().item() == hvd.size()


@on_ranks(2, 3)
def what_differs_between_models_is_named() -> None:
    rank = hvd.rank()
    a, b, c = (tf.Variable([1.0], name=n) for n in "abc")
    wide = tf.Variable(tf.ones(2 if rank == 1 else 1), name="wide")

    def gradient(*variables: tf.Variable, used: int = 9) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(v * 2.0) for v in variables[:used]])
        return hvd.DistributedGradientTape(tape).gradient(loss, list(variables))

    # The same model, and rank 1's loss does not depend on b.
    fails_on_all_ranks(
        lambda: gradient(a, b, c, used=1 if rank == 1 else 3),
        r"(?s)ranks disagree on the entry 1.*'b' float32 \(1,\).*'b' without a gradient on rank 1",
    )
    fails_on_all_ranks(
        lambda: gradient(*([a, b] if rank == 1 else [a, b, c])),
        r"(?s)the entry 2.*'c' float32 \(1,\).*nothing on rank 1",
    )
    fails_on_all_ranks(lambda: gradient(a, wide), r"(?s)entry 1.*'wide'.*\(2,\) on rank 1")

    def mixed() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(a, [0]) if rank == 1 else a * 1.0)
        return hvd.DistributedGradientTape(tape).gradient(loss, [a])

    fails_on_all_ranks(mixed, r"(?s)entry 0.*'a' float32 \(1,\).*'a' float32 slices on rank 1")


@on_ranks(2)
def bad_arguments_are_refused() -> None:
    def not_wrapped(words: str, **options: Any) -> None:
        tape = tf.GradientTape()
        call = functools.partial(hvd.DistributedGradientTape, tape, **options)
        refused(call, words, kind=tf.errors.InvalidArgumentError)
        assert type(tape) is tf.GradientTape

    not_wrapped("op=Average only", op=hvd.Sum, gradient_predivide_factor=2.0)
    not_wrapped("op=Average only", op=hvd.Adasum, gradient_predivide_factor=2.0)
    not_wrapped("compression=3", compression=3)
    not_wrapped("groups is a str; pass a number, or a list of lists", groups="ab")
    not_wrapped("groups[0] is a ResourceVariable, not a list", groups=[tf.Variable(1.0)])
    not_wrapped("gradient_predivide_factor is 0", gradient_predivide_factor=0.0)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"not a tf.GradientTape"):
        hvd.DistributedGradientTape(object())
    tape = hvd.DistributedGradientTape(tf.GradientTape())
    with pytest.raises(tf.errors.InvalidArgumentError, match="already"):
        hvd.DistributedGradientTape(tape)


@on_ranks(2, 3)
def variables_and_objects_are_broadcast() -> None:
    root = hvd.size() - 1

    def fresh() -> list[tf.Variable]:
        return [
            tf.Variable(np.full((3, 2), hvd.rank()), name="a", dtype=tf.float32),
            tf.Variable(hvd.rank(), name="b", dtype=tf.int64),
            tf.Variable([hvd.rank() > 0], name="c"),
        ]

    variables = fresh()
    hvd.broadcast_variables(variables, root_rank=root)
    assert variables[0].numpy().tolist() == [[root, root]] * 3
    assert variables[1].numpy() == root
    assert variables[2].numpy().tolist() == [root > 0]
    variables = fresh()
    tf.function(lambda: hvd.broadcast_variables(variables, root_rank=0))()
    assert variables[1].numpy() == 0
    variables = fresh()
    hvd.broadcast_(variables[:1], root, name="in place")
    assert variables[0].numpy().tolist() == [[root, root]] * 3
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    optimizer = keras.optimizers.Adam(0.1 * (hvd.rank() + 1))
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables([*model.variables, *optimizer.variables], root_rank=0)
    kernels = hvd.allgather_object(model.get_weights()[0].tolist())
    assert all(kernel == kernels[0] for kernel in kernels)
    assert float(optimizer.learning_rate) == pytest.approx(0.1)
    with pytest.raises(tf.errors.FailedPreconditionError, match=r"(?s)entry 1.*nothing on rank 0"):
        hvd.broadcast_variables(variables[: 1 if hvd.rank() == 0 else 2], root_rank=0)
    with pytest.raises(tf.errors.FailedPreconditionError, match=r"(?s)entry 0.*nothing on rank 0"):
        hvd.broadcast_variables([] if hvd.rank() == 0 else variables, root_rank=0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="variable 'words' is of string"):
        hvd.broadcast_variables([tf.Variable("a", name="words")], root_rank=0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="not a variable"):
        hvd.broadcast_variables([tf.constant(1.0)], root_rank=0)

    assert hvd.broadcast_object({"rank": hvd.rank()}, root) == {"rank": root}
    assert hvd.broadcast_object_fn(root)([hvd.rank()]) == [root]
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        assert hvd.broadcast_object_fn(root, session=session)([hvd.rank()]) == [root]
        assert hvd.allgather_object(hvd.rank(), session) == list(range(hvd.size()))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"inside tf\.function"):
        tf.function(lambda: hvd.broadcast_object(1))()
    assert hvd.allgather_object("x" * hvd.rank()) == ["x" * r for r in range(hvd.size())]


@on_ranks(2, 3)
def batch_normalization_is_over_the_joined_batch() -> None:
    random = np.random.default_rng(0)
    whole = random.normal(3.0, 2.0, (9, 4, 3)).astype(np.float32)
    lengths = [9 - 2 * (hvd.size() - 1)] + [2] * (hvd.size() - 1)
    begin = sum(lengths[: hvd.rank()])
    mine = whole[begin : begin + lengths[hvd.rank()]]
    weights = random.normal(size=whole.shape).astype(np.float32)

    def run(layer: Any, x: np.ndarray, w: np.ndarray) -> tuple[Any, Any]:
        t = tf.convert_to_tensor(x)
        with tf.GradientTape() as tape:
            tape.watch(t)
            y = layer(t, training=True)
            loss = tf.reduce_sum(y * w)
        return y, tape.gradient(loss, t)

    plain, synchronized = keras.layers.BatchNormalization(), hvd.SyncBatchNormalization()
    right, right_gradient = run(plain, whole, weights)
    for call in (run, lambda *a: tf.function(run)(*a)):
        y, gradient = call(synchronized, mine, weights[begin : begin + len(mine)])
        np.testing.assert_allclose(y, right[begin : begin + len(mine)], atol=1e-4)
        np.testing.assert_allclose(gradient, right_gradient[begin : begin + len(mine)], atol=1e-4)
    run(plain, whole, weights)
    np.testing.assert_allclose(synchronized.moving_mean, plain.moving_mean, atol=1e-5)
    np.testing.assert_allclose(synchronized.moving_variance, plain.moving_variance, atol=1e-5)
    with pytest.raises(ValueError, match="fused=True"):
        hvd.SyncBatchNormalization(fused=True)


@on_ranks(2)
def a_loop_with_an_optimizer_of_keras_learns_alike_everywhere() -> None:
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential(
        [keras.Input((5,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)]
    )
    optimizer = keras.optimizers.Adam(0.02)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables(model.variables, root_rank=0)
    hvd.broadcast_variables(optimizer.variables, root_rank=0)
    losses = []
    for i in range(40):
        x, y = batch(i)
        losses.append(float(step(x[hvd.rank() :: 2], y[hvd.rank() :: 2])))
    assert losses[-1] < losses[0] / 3
    weights = hvd.allgather_object([w.tolist() for w in model.get_weights()])
    assert weights[0] == weights[1]


@on_ranks(2)
def models_may_have_other_automatic_numbers() -> None:
    if hvd.rank() == 0:
        keras.layers.Dense(3).build((None, 2))  # any model made before
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2), keras.layers.Dense(1)])
    hvd.broadcast_variables(model.variables, root_rank=0)
    weights = hvd.allgather_object([w.tolist() for w in model.get_weights()])
    assert weights[0] == weights[1]
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(tf.ones([1, 2]) * (hvd.rank() + 1.0)))
    by_bias = hvd.DistributedGradientTape(tape, op=hvd.Sum).gradient(
        loss, model.trainable_variables
    )[-1]
    np.testing.assert_array_equal(by_bias, [2.0])


@on_ranks(2)
def local_layers_must_have_been_built() -> None:
    model = keras.Sequential([keras.layers.Dense(1)])
    with (
        tf.GradientTape() as tape,
        pytest.raises(
            tf.errors.InvalidArgumentError, match="has no variables yet; build the model"
        ),
    ):
        hvd.PartialDistributedGradientTape(tape, local_layers=model.layers)


@on_ranks(2)
def strategies_of_one_replica_change_nothing() -> None:
    for strategy in (
        tf.distribute.get_strategy(),
        tf.distribute.OneDeviceStrategy("/cpu:0"),
        tf.distribute.MirroredStrategy(["/cpu:0"]),
    ):
        with strategy.scope():
            w = tf.Variable([1.0 + hvd.rank()])
            hvd.broadcast_variables([w], 1)

            @tf.function
            def step(w: tf.Variable = w) -> None:
                with tf.GradientTape() as tape:
                    loss = w * (1.0 + hvd.rank())
                w.assign_sub(hvd.DistributedGradientTape(tape).gradient(loss, [w])[0])

            strategy.run(step)
            assert w.numpy().item() == 0.5
            model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
            model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.5)), "mse")
        model.set_weights([np.zeros((1, 1), np.float32)])
        model.fit(np.ones((1, 1)), np.full((1, 1), 1.0 + hvd.rank()), verbose=0)
        assert model.get_weights()[0].item() == 1.5


@on_ranks(2)
def strategies_of_several_replicas_are_told_what_to_use() -> None:
    strategy = tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])
    pattern = r"MirroredStrategy \(2 replicas\).*\n.*farandole run -np 2"
    with strategy.scope():
        with pytest.raises(tf.errors.InvalidArgumentError, match=pattern):
            hvd.allreduce(tf.ones(2))
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.5)), "mse")
        with pytest.raises(fd.InvalidArgument, match=pattern):
            model.fit(np.ones((2, 1)), np.ones((2, 1)), verbose=0)


# ---- as Horovod's examples for TensorFlow 2 do it, in which Keras was 2 ----


def pictures() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(hvd.rank())
    return random.normal(size=(16, 6, 6, 1)).astype(np.float32), random.integers(0, 10, 16)


def layers(keras_2: Any) -> Any:
    """They make their variables in the first batch."""
    return keras_2.Sequential(
        [
            keras_2.layers.Conv2D(2, [3, 3], activation="relu"),
            keras_2.layers.MaxPooling2D(pool_size=(2, 2)),
            keras_2.layers.Dropout(0.25),
            keras_2.layers.Flatten(),
            keras_2.layers.Dense(10, activation="softmax"),
        ]
    )


def assert_alike(weights: list[np.ndarray]) -> None:
    theirs = hvd.allgather_object([w.tobytes() for w in weights])
    assert all(each == theirs[0] for each in theirs)


@on_ranks(2)
def horovods_examples_with_fit_run_as_they_are() -> None:
    farandole.horovod.install()
    hvd = importlib.import_module("horovod.tensorflow.keras")
    hvd.init()
    for gpu in tf.config.experimental.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)
    data = tf.data.Dataset.from_tensor_slices(pictures()).repeat().shuffle(16).batch(4)
    rate = 0.001 * hvd.size()
    model = layers(tf.keras)
    optimizer = hvd.DistributedOptimizer(
        tf.optimizers.Adam(rate), backward_passes_per_step=1, average_aggregated_gradients=True
    )
    model.compile(
        loss=tf.losses.SparseCategoricalCrossentropy(),
        optimizer=optimizer,
        metrics=["accuracy"],
        experimental_run_tf_function=False,
    )
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=rate, warmup_epochs=1, verbose=1),
    ]
    with tempfile.TemporaryDirectory() as folder:
        if hvd.rank() == 0:
            callbacks.append(tf.keras.callbacks.ModelCheckpoint(folder + "/checkpoint-{epoch}.h5"))
        model.fit(data, steps_per_epoch=2, callbacks=callbacks, epochs=2, verbose=0)
        if hvd.rank() == 0:
            saved = sorted(path.name for path in Path(folder).iterdir())
            assert saved == ["checkpoint-1.h5", "checkpoint-2.h5"]
    assert_alike(model.get_weights())
    assert len(optimizer.variables()) == len(optimizer.variables) == 2 + 2 * 4


@on_ranks(2)
def horovods_examples_with_a_tape_run_as_they_are() -> None:
    farandole.horovod.install()
    hvd = importlib.import_module("horovod.tensorflow")
    hvd.init()
    model, optimizer = layers(tf.keras), tf.optimizers.SGD(lr=0.01 * hvd.size())
    loss_of = tf.losses.SparseCategoricalCrossentropy()
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)

    @tf.function
    def training_step(images: tf.Tensor, labels: tf.Tensor, first_batch: bool) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape, compression=hvd.Compression.fp16)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        if first_batch:
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(optimizer.variables(), root_rank=0)
        return loss

    data = tf.data.Dataset.from_tensor_slices(pictures()).repeat().shuffle(16).batch(4)
    with tf.device("CPU"):
        for batch, (images, labels) in enumerate(data.take(6 // hvd.size())):
            training_step(images, labels, batch == 0)
    assert float(optimizer.learning_rate) == np.float32(0.02)
    assert_alike(model.get_weights())
    if hvd.rank() == 0:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint.save(folder + "/checkpoints")


test_on_ranks = make_tests(__name__, "tensorflow", prepare=prepare)
