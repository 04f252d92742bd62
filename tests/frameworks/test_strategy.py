"""farandole.strategy against one process: Keras' fit, loops of one's own, and every call of
tf.distribute whose values can be said.

The reference is plain Keras or numpy on rank 0, to which the other ranks are equal in every bit.
"""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import keras_metric_cases as metric_cases
import keras_model_cases as model_cases
import keras_work as work
import numpy as np
import pytest
from keras_model_cases import BATCH, CLOSE, N, X, Y, assert_close, assert_same_bits, compiled, net
from keras_work import Late, keras
from rank_cases import checking_weights, make_tests, needs, on_ranks, raises, told

import farandole as fd
import grid
from farandole.common._labels import without_numbers
from farandole.common._objects import broadcast_object

needs("tensorflow", "keras")

tf: Any = Late("tensorflow")
strategies: Any = Late("farandole.strategy")
RANKS = (1, 2, 3, 4) if grid.full() else (3,)


def mirrored(**options: Any) -> Any:
    return strategies.MirroredStrategy(**options)


def in_scope(strategy: Any, build: Callable[[], Any], **options: Any) -> Any:
    """A model that would begin differently on every rank but the first."""
    with strategy.scope():
        model = compiled(build(), **options)
    if fd.rank() != 0:
        for variable in model.trainable_variables:
            variable.assign(variable + 1.0)
    return model


def batches(batch: int = BATCH, **shuffle: Any) -> Any:
    """33 samples: after whole batches one is left, and most ranks have no sample."""
    dataset = tf.data.Dataset.from_tensor_slices((X, Y))
    return (dataset.shuffle(N, seed=3) if shuffle else dataset).batch(batch)


def assert_as_alone(
    mine: Any, alone: Any, logs: Any, right: Callable[[], Any], close: float = CLOSE
) -> None:
    work.assert_same_on_all_ranks(mine)
    assert_same_bits(model_cases.numbers(logs), "logs")
    if fd.rank() == 0:
        assert_close(logs, right(), "logs", close)
        for i, (a, b) in enumerate(zip(work.values(mine), work.values(alone), strict=True)):
            assert np.abs(a - b).max() <= close, f"weight {i}"


def folder_of_all() -> Path:
    return Path(broadcast_object(tempfile.mkdtemp(), 0, "folder"))


# ---- Keras ----


@on_ranks(*RANKS)
def fit_evaluate_predict_save_and_load_are_those_of_one_process() -> None:
    strategy = mirrored()

    def options() -> dict[str, Any]:
        metrics = ["accuracy", keras.metrics.AUC(20, name="auc")]
        return {"metrics": metrics, "weighted_metrics": None}

    with strategy.scope():
        ours = options()
    model, alone = in_scope(strategy, net, **ours), compiled(net(), **options())

    def all_of(model: Any) -> dict[str, Any]:
        history = model.fit(
            batches(shuffle=True), epochs=2, verbose=0,
            validation_data=(X[:13], Y[:13]), validation_batch_size=5,
        )  # fmt: skip
        scores = model.evaluate(X[:29], Y[:29], batch_size=6, verbose=0, return_dict=True)
        outputs = model.predict(X[:22], batch_size=7, verbose=0)
        return history.history | {f"test {k}": v for k, v in scores.items()} | {"out": outputs}

    logs = all_of(model)
    assert_as_alone(model, alone, logs, lambda: all_of(alone))
    path = folder_of_all() / "model.keras"
    model.save(path)
    with strategy.scope():
        again = keras.models.load_model(path)
    scores = model.evaluate(X, Y, verbose=0)
    assert again.evaluate(X, Y, verbose=0) == scores
    if fd.rank() == 0:
        assert keras.models.load_model(path).evaluate(X, Y, verbose=0) == pytest.approx(scores)
    again.fit(batches(), verbose=0)
    work.assert_same_on_all_ranks(again)


@on_ranks(3)
def metrics_of_ones_own_are_told_the_whole_batch() -> None:
    strategy = mirrored()
    with strategy.scope():
        ours = metric_cases.measured()
    model, alone = in_scope(strategy, net, **ours), compiled(net(), **metric_cases.measured())
    logs = metric_cases.fit_and_evaluate(model, False)
    assert_as_alone(model, alone, logs, lambda: metric_cases.fit_and_evaluate(alone, True))


@on_ranks(3)
def arrays_single_batches_and_callbacks() -> None:
    strategy, folder = strategies.CentralStorageStrategy(), folder_of_all()
    optimizer = {"optimizer": "sgd", "metrics": ["accuracy"], "weighted_metrics": None}
    model, alone = in_scope(strategy, net, **optimizer), compiled(net(), **optimizer)
    rates: list[float] = []

    class Looks(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
            scores = self.model.evaluate(X, Y, verbose=0, return_dict=True)
            rates.append(scores["loss"])
            self.model.save_weights(folder / f"{epoch}.weights.h5")

    def all_of(model: Any) -> dict[str, Any]:
        rates.clear()
        history = model.fit(
            X, Y, batch_size=BATCH, epochs=3, shuffle=False, verbose=0, class_weight={0: 0.5},
            callbacks=[
                keras.callbacks.ModelCheckpoint(folder / "best.weights.h5", save_weights_only=True),
                keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1)),
                keras.callbacks.EarlyStopping("loss", restore_best_weights=True),
                Looks(),
            ],
        )  # fmt: skip
        logs = history.history | {"looked": list(rates)}
        for n in (7, 1):
            logs |= {
                f"{k} of {n}": v
                for k, v in model.train_on_batch(X[:n], Y[:n], return_dict=True).items()
            }
        batches_of_keras = model_cases.Batches.make(X, Y, BATCH)
        return logs | {
            "of batches": model.evaluate(batches_of_keras, verbose=0),
            "of a generator": model.evaluate(model_cases.generated(), steps=4, verbose=0),
            "outputs": model.predict_on_batch(X[:5]),
        }

    logs = all_of(model)
    before = work.values(model)
    assert_as_alone(model, alone, logs, lambda: all_of(alone))
    model.load_weights(folder / "2.weights.h5")
    model.set_weights([v + fd.rank() for v in before])  # rank 0's are taken
    model.evaluate(X, Y, verbose=0)
    work.assert_same_on_all_ranks(model)


@on_ranks(3)
def synchronized_layers_see_the_samples_of_all_replicas() -> None:
    def build() -> Any:
        keras.utils.set_random_seed(1)
        return keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(4),
                keras.layers.BatchNormalization(synchronized=fd.size() > 1 and here()),
                keras.layers.Dense(1, activation="sigmoid"),
            ]
        )

    def here() -> bool:
        return bool(tf.distribute.has_strategy())

    clipped = {"class_name": "SGD", "config": {"learning_rate": 0.5, "global_clipnorm": 0.1}}
    options = {"optimizer": clipped, "metrics": None, "weighted_metrics": None}
    packs = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=100)
    strategy = strategies.MultiWorkerMirroredStrategy(communication_options=packs)
    model, alone = in_scope(strategy, build, **options), compiled(build(), **options)

    def fit(model: Any) -> Any:
        return model.fit(batches(31), epochs=3, verbose=0).history

    logs = fit(model)
    assert_as_alone(model, alone, logs, lambda: fit(alone))
    from farandole.keras._wrapped import state_of

    groups = state_of(model.optimizer).reduction.groups
    assert [sum(v.value.shape.num_elements() for v in group) for group in groups] == [24, 17]


@on_ranks(2)
def losses_are_scaled_as_in_one_process() -> None:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:

        def options() -> dict[str, Any]:
            sgd = keras.optimizers.SGD(0.01)
            scaled = keras.optimizers.LossScaleOptimizer(sgd, initial_scale=8.0)
            return {"optimizer": scaled, "metrics": None, "weighted_metrics": None}

        strategy = mirrored()
        with strategy.scope():
            ours = options()
        model, alone = in_scope(strategy, net, **ours), compiled(net(), **options())

        def fit(model: Any) -> Any:
            return model.fit(batches(), verbose=0).history

        logs = fit(model)
        assert_as_alone(model, alone, logs, lambda: fit(alone), 2e-3)
        assert model.optimizer.inner_optimizer.iterations.numpy() == 5
    finally:
        keras.config.set_dtype_policy(before)


@on_ranks(3)
def gradients_are_accumulated_as_in_one_process() -> None:
    accumulating = {
        "class_name": "SGD",
        "config": {"learning_rate": 0.5, "gradient_accumulation_steps": 2, "global_clipnorm": 0.1},
    }
    options = {"optimizer": accumulating, "metrics": None, "weighted_metrics": None}
    model, alone = in_scope(mirrored(), net, **options), compiled(net(), **options)

    def fit(model: Any) -> Any:  # 5 batches an epoch: one window lies in two
        return model.fit(batches(), epochs=2, verbose=0).history

    logs = fit(model)
    assert_as_alone(model, alone, logs, lambda: fit(alone))


@on_ranks(3)
def losses_that_are_no_means_are_those_of_one_process() -> None:
    def build() -> Any:
        keras.utils.set_random_seed(1)
        x = keras.Input((6,))
        names = ("summed", "number", "mean")
        return keras.Model(x, {n: keras.layers.Dense(1, name=n)(x) for n in names})

    def one_number(y: Any, out: Any) -> Any:
        return tf.reduce_sum(tf.abs(y - out)) / BATCH

    options: dict[str, Any] = {
        "optimizer": {"class_name": "SGD", "config": {"learning_rate": 0.01}},
        "loss": {
            "summed": keras.losses.MeanSquaredError(reduction="sum"),
            "number": one_number,
            "mean": "mse",
        },
        "metrics": None,
        "weighted_metrics": None,
    }
    model, alone = in_scope(mirrored(), build, **options), compiled(build(), **options)
    targets = dict.fromkeys(("summed", "number", "mean"), Y)

    def all_of(model: Any) -> Any:
        history = model.fit(X, targets, batch_size=BATCH, shuffle=False, verbose=0).history
        tested = model.evaluate(X, targets, batch_size=7, verbose=0, return_dict=True)
        return history | {f"test {key}": value for key, value in tested.items()}

    logs = all_of(model)
    assert_as_alone(model, alone, logs, lambda: all_of(alone))


@on_ranks(3)
def training_steps_of_ones_own_may_compute_their_loss_in_any_way() -> None:
    """Parts have different lengths, and each kind of loss has its own optimizer."""

    class Own(keras.Model):  # type: ignore[misc, name-defined]
        def compile(self, **options: Any) -> None:
            super().compile(**options)
            self.others = [keras.optimizers.SGD(0.1) for _ in range(4)]
            self.seen = keras.metrics.Mean(name="seen")

        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape(persistent=True) as tape:
                outputs = self(x, training=True)
                each = [tf.reduce_mean(tf.square(y - out), -1) for out in outputs]
                replicas = self.distribute_strategy.num_replicas_in_sync
                losses = [
                    self.optimizer.scale_loss(tf.reduce_mean(each[0])),
                    keras.losses.MeanSquaredError()(y, outputs[1]),
                    tf.nn.compute_average_loss(each[2], global_batch_size=BATCH),
                    tf.nn.compute_average_loss(each[3]),
                    tf.reduce_mean(each[4]) / replicas,
                ]
            for layer, loss, optimizer in zip(
                self.layers[1:], losses, [self.optimizer, *self.others], strict=True
            ):
                weights = layer.trainable_variables
                optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            self.seen.update_state(losses[0])
            return {"seen": self.seen.result()}

    def build() -> Any:
        keras.utils.set_random_seed(1)
        x = keras.Input((6,))
        return Own(x, [keras.layers.Dense(1)(x) for _ in range(5)])

    options: dict[str, Any] = {
        "optimizer": {"class_name": "SGD", "config": {"learning_rate": 0.1}},
        "loss": None,
        "metrics": None,
        "weighted_metrics": None,
    }
    model, alone = in_scope(mirrored(), build, **options), compiled(build(), **options)

    def fit(model: Any) -> Any:
        return model.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history

    logs = fit(model)
    assert_as_alone(model, alone, logs, lambda: fit(alone))


@on_ranks(2, 3)
def a_stateful_layer_goes_on_with_the_states_of_its_replicas_samples() -> None:
    """Three replicas have 3, 3 and 2 of 8 samples."""
    x = np.random.default_rng(1).normal(size=(24, 5, 3)).astype("float32")
    y = x[:, 0, :1]

    def build() -> Any:
        keras.utils.set_random_seed(1)
        layers = [keras.Input(batch_shape=(8, 5, 3)), keras.layers.GRU(4, stateful=True)]
        return keras.Sequential([*layers, keras.layers.Dense(1)])

    def all_of(model: Any) -> Any:
        logs = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
        tested = model.evaluate(x, y, batch_size=8, verbose=0)
        return logs | {"test": tested, "out": model.predict(x, batch_size=8, verbose=0)}

    options = {"optimizer": "sgd", "loss": "mse", "metrics": None, "weighted_metrics": None}
    for strategy in (mirrored(), strategies.CentralStorageStrategy()):
        model, alone = in_scope(strategy, build, **options), compiled(build(), **options)
        logs = all_of(model)
        right = all_of(alone) if fd.rank() == 0 else {}
        assert_as_alone(model, alone, logs, lambda: right)  # noqa: B023


@on_ranks(2)
def a_loss_that_may_be_a_sum_is_told_of() -> None:
    """Nobody sees how a function combines samples, nor which weight a loss of pairs needs."""

    class Own(keras.Model):  # type: ignore[misc, name-defined]
        loss_of: Any = None

        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = type(self).loss_of(self, y, self(x, training=True))
            weights = self.trainable_variables
            gradients = tape.gradient(loss, weights)
            self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
            return {"loss": loss}

    def said(loss_of: Any) -> str:
        Own.loss_of = staticmethod(loss_of)

        def build() -> Any:
            x = keras.Input((6,))
            return Own(x, keras.layers.Dense(1)(x))

        model = in_scope(mirrored(), build, optimizer="sgd", loss="mse")
        with contextlib.redirect_stderr(io.StringIO()) as told:
            model.fit(X, Y, batch_size=BATCH, epochs=2, verbose=0)
        return told.getvalue()

    each = lambda y, out: tf.reduce_mean(tf.square(y - out), -1)  # noqa: E731
    hidden = tf.function(lambda y, out: tf.reduce_sum(each(y, out)) / BATCH)
    pairs = lambda y, out: tf.reduce_mean(tf.matmul(y - out, y - out, transpose_b=True))  # noqa: E731
    for unknown in (hidden, pairs):
        told = said(lambda _, y, out, unknown=unknown: unknown(y, out))
        assert told.count("is taken for a mean") == (fd.rank() == 0)
    for known in (
        lambda model, y, out: model.optimizer.scale_loss(tf.reduce_mean(each(y, out))),
        lambda model, y, out: model.compute_loss(y=y, y_pred=out),
        lambda _, y, out: tf.reduce_sum(each(y, out)) / BATCH,
        lambda _, y, out: tf.reduce_mean(each(y, out)),
        lambda _, y, out: keras.losses.MeanSquaredError()(y, out),
        lambda _, y, out: tf.nn.compute_average_loss(each(y, out), global_batch_size=BATCH),
    ):
        assert "is taken for a mean" not in said(known)


@on_ranks(2)
def what_is_made_outside_a_scope_is_refused() -> None:
    strategy = mirrored()
    outside = compiled(net())
    with strategy.scope(), raises(fd.InvalidArgument, "was not made in the scope"):
        outside.fit(X, Y, verbose=0)
    metric = keras.metrics.AUC()
    model = in_scope(strategy, net, metrics=[metric])
    with raises(fd.InvalidArgument, "was not created in the scope"):
        model.fit(X, Y, verbose=0)
    variable = tf.Variable(0.0)
    with raises(fd.InvalidArgument, "was not created in the scope of this MirroredStrategy"):
        strategy.run(
            lambda: strategy.extended.update(variable, lambda v, x: v.assign(x), args=(1.0,))
        )
    with strategy.scope():
        inside = net()
    for optimizer in (
        keras.optimizers.Adam(),
        keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()),
    ):
        with raises(fd.InvalidArgument, "compile(): optimizer 'adam", "not created in the scope"):
            inside.compile(optimizer, "mse")
    uncompiled = in_scope(strategy, net)
    uncompiled.compiled = False
    with raises(Exception, "compile"):
        uncompiled.fit(X, Y, verbose=0)


# ---- loops ----


class Loop:
    """The loop of TensorFlow's tutorial, with a metric and an optimizer of Keras."""

    def __init__(self, strategy: Any, batch: int) -> None:
        self.strategy, self.batch = strategy, batch
        with strategy.scope():
            self.model = net()
            self.optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
            self.seen = keras.metrics.MeanSquaredError()
            self.loss = keras.losses.BinaryCrossentropy(reduction="none")

    def step(self, inputs: Any) -> Any:
        x, y = inputs
        with tf.GradientTape() as tape:
            outputs = self.model(x, training=True)
            each = self.loss(y, outputs)
            loss = tf.nn.compute_average_loss(each, global_batch_size=self.batch)
        gradients = tape.gradient(loss, self.model.trainable_variables)
        pairs = zip(gradients, self.model.trainable_variables, strict=True)
        self.optimizer.apply_gradients(pairs)
        self.seen.update_state(y, outputs)
        return loss

    def epochs(self, how: str, number: int) -> dict[str, Any]:
        one = tf.function(self.step) if how == "function in run" else self.step

        def reduced(inputs: Any) -> Any:
            return self.strategy.reduce("SUM", self.strategy.run(one, args=(inputs,)), axis=None)

        train = tf.function(reduced) if how == "run in function" else reduced
        dataset = self.strategy.experimental_distribute_dataset(batches(self.batch, shuffle=True))
        losses = []
        for _ in range(number):
            losses += [float(train(inputs)) for inputs in dataset]
        return {"losses": losses, "seen": float(self.seen.result())}


def compare_loops(how: str, epochs: int = 2) -> None:
    mine = Loop(mirrored(), BATCH)
    logs = mine.epochs(how, epochs)
    alone = Loop(tf.distribute.get_strategy(), BATCH)

    def right() -> Any:
        return alone.epochs("run in function", epochs)

    assert int(mine.optimizer.iterations.numpy()) == 5 * epochs
    assert_as_alone(mine.model, alone.model, logs, right)


@on_ranks(*RANKS)
def a_loop_of_ones_own_is_that_of_one_process() -> None:
    compare_loops("run in function")


def differ_in_a_loop(how: str) -> None:
    with checking_weights("1"):
        loop = Loop(mirrored(), BATCH)
        loop.epochs(how, 1)
        kernel = loop.model.trainable_variables[0]
        kernel.assign(kernel + fd.rank())
        with pytest.raises(Exception, match="weights have come apart") as caught:
            loop.epochs(how, 1)
    named = without_numbers(kernel.path)  # ranks may have made other models before
    assert f"'{named}' has checksum" in str(caught.value)
    assert "mended by the same assign() on every replica" in str(caught.value)


@on_ranks(2)
def a_loop_compares_weights() -> None:
    differ_in_a_loop("run in function")


@on_ranks(2)
def a_loop_compares_weights_eagerly() -> None:
    differ_in_a_loop("run")


@on_ranks(2)
def a_loop_skips_a_step_on_all_replicas_if_one_overflows() -> None:
    """By a sample of the second replica's; the inner optimizer clips the sum."""
    samples = np.ones((3, 4), "float32")
    samples[1, 2] = 1e30  # of the second step, and of the second replica

    def scales(strategy: Any) -> tuple[list[float], Any]:
        with strategy.scope():
            weight = keras.Variable(np.float32(1.0))
            inner = keras.optimizers.SGD(1.0, global_clipnorm=0.5)
            optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=1e10)
            optimizer.build([weight])

        def step(x: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(x * weight.value) / 4
                scaled = optimizer.scale_loss(loss)
            optimizer.apply(tape.gradient(scaled, [weight.value]), [weight])

        train = tf.function(lambda x: strategy.run(step, args=(x,)))
        dataset = tf.data.Dataset.from_tensor_slices(samples.ravel()).batch(4)
        seen = []
        for x in strategy.experimental_distribute_dataset(dataset):
            train(x)
            seen += [float(optimizer.dynamic_scale.numpy()), float(weight.numpy())]
        return seen, int(inner.iterations.numpy())

    mine = scales(mirrored())
    assert_same_bits(mine, "scales and weights")
    assert mine == scales(tf.distribute.get_strategy()) == ([1e10, 0.5, 5e9, 0.5, 5e9, 0.0], 2)


class Gan:
    """TensorFlow's tutorial: two models, two tapes and two optimizers in one step."""

    def __init__(self, strategy: Any) -> None:
        keras.utils.set_random_seed(1)
        layers = keras.layers
        self.generator = keras.Sequential([keras.Input((3,)), layers.Dense(6, "tanh")])
        self.discriminator = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
        self.models = (self.generator, self.discriminator)
        optimizers = [keras.optimizers.Adam(0.01, epsilon=1e-3) for _ in self.models]
        entropy = keras.losses.BinaryCrossentropy(from_logits=True, reduction=None)

        def mean_of(loss: Any) -> Any:
            return tf.nn.compute_average_loss(loss, global_batch_size=BATCH)

        def step(noise: Any, real: Any) -> Any:
            with tf.GradientTape() as for_generator, tf.GradientTape() as for_discriminator:
                true = self.discriminator(real, training=True)
                false = self.discriminator(self.generator(noise, training=True), training=True)
                good = mean_of(entropy(tf.ones_like(false), false))
                fooled = entropy(tf.ones_like(true), true) + entropy(tf.zeros_like(false), false)
                losses = [good, mean_of(fooled)]
            tapes = (for_generator, for_discriminator)
            for model, tape, loss, by in zip(self.models, tapes, losses, optimizers, strict=True):
                weights = model.trainable_variables
                by.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            return losses

        def step_of_all(batch: Any) -> Any:
            return [strategy.reduce("SUM", x, axis=None) for x in strategy.run(step, args=batch)]

        self.step = tf.function(step_of_all)

    def train(self, batches: Any) -> dict[str, Any]:
        losses = [self.step(batch) for _ in range(2) for batch in batches]
        return {"losses": [[float(x) for x in each] for each in losses]}


@on_ranks(2, 3)
def a_loop_with_two_tapes_and_two_optimizers_is_that_of_one_process() -> None:
    noise = np.random.default_rng(2).normal(size=(N, 3)).astype("float32")
    dataset = tf.data.Dataset.from_tensor_slices((noise, X)).batch(BATCH)
    strategy = mirrored()
    with strategy.scope():
        gan = Gan(strategy)
    alone = Gan(tf.distribute.get_strategy())
    logs = gan.train(strategy.experimental_distribute_dataset(dataset))
    right = alone.train(dataset) if fd.rank() == 0 else {}
    for mine, its in zip(gan.models, alone.models, strict=True):
        assert_as_alone(mine, its, logs, lambda: right)


@on_ranks(3)
def steps_run_eagerly_and_as_functions() -> None:
    compare_loops("run", 1)
    compare_loops("function in run", 1)


def normalized(strategy: Any, how: str, layer: Callable[[], Any]) -> Any:
    """The weights after a batch with one sample, which one replica has."""
    keras.utils.set_random_seed(3)
    with strategy.scope():
        layers = [keras.Input((4,)), keras.layers.Dense(3), layer(), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)

    def step(x: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(model(x, training=True) - 1.0)) / 6
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    one = tf.function(step) if how == "function in run" else step

    def run(x: Any) -> None:
        strategy.run(one, args=(x,))

    train = tf.function(run) if how == "run in function" else run
    samples = np.random.default_rng(3).normal(size=(7, 4)).astype("float32")
    dataset = tf.data.Dataset.from_tensor_slices(samples).batch(6)
    for _ in range(2):
        for x in strategy.experimental_distribute_dataset(dataset):
            train(x)
    return model


@on_ranks(2, 3)
def synchronized_layers_are_right_where_a_replica_has_no_samples() -> None:
    """In a function each rank traces for the shape of its part, and an empty part has none. So its
    tape alone had a gradient of the count, for which this rank waited for ever."""
    import farandole.tensorflow as hvd

    plain = keras.layers.BatchNormalization
    alone = normalized(tf.distribute.get_strategy(), "run in function", plain)
    for layer in (lambda: plain(synchronized=True), hvd.SyncBatchNormalization):
        for how in ("run in function", "function in run", "run"):
            mine = normalized(mirrored(), how, layer)
            work.assert_same_on_all_ranks(mine)
            for a, b in zip(mine.get_weights(), alone.get_weights(), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=how)


def dense(**options: Any) -> Any:
    return keras.layers.Dense(
        2, kernel_initializer=keras.initializers.Orthogonal(2.0, 1), **options
    )


WRITES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "constraint": lambda: (
        dense(kernel_constraint=keras.constraints.MaxNorm(0.5)),
        keras.optimizers.SGD(0.2),
    ),
    "averages": lambda: (dense(), keras.optimizers.SGD(0.2, use_ema=True, ema_momentum=0.5)),
    "Nadam": lambda: (dense(), keras.optimizers.Nadam(0.1)),
    "scales": lambda: (
        dense(),
        keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=8.0, dynamic_growth_steps=2
        ),
    ),
    "spectral": lambda: (
        keras.layers.SpectralNormalization(dense()),
        keras.optimizers.SGD(0.1),
    ),
    "sums": lambda: (dense(), keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)),
    "counts": lambda: (counting(), keras.optimizers.SGD(0.1)),
}


def counting() -> Any:
    class Counted(keras.layers.Dense):  # type: ignore[misc]
        """Its outputs depend on how many steps there were."""

        def build(self, shape: Any) -> None:
            super().build(shape)
            self.steps = self.add_weight(
                shape=(), dtype="int32", initializer="zeros", trainable=False
            )

        def call(self, inputs: Any) -> Any:
            self.steps.assign(self.steps + 1)
            return super().call(inputs) * keras.ops.cast(self.steps, "float32")

    return Counted(2, kernel_initializer="ones")


def looped(strategy: Any, case: str, first: int) -> Any:
    """The weights after batches of `first` samples, of 4, and of the last one of five."""
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).uniform(0.5, 1.5, (5, 2)).astype("float32")
    y = np.full((5, 2), 3.0, "float32")
    with strategy.scope():
        layer, optimizer = WRITES[case]()
        model = keras.Sequential([keras.Input((2,)), layer])
        optimizer.build(model.trainable_variables)

    def step(batch: Any) -> None:
        with tf.GradientTape() as tape:
            each = tf.reduce_mean(tf.square(model(batch[0], training=True) - batch[1]), -1)
            loss = tf.nn.compute_average_loss(each, global_batch_size=4)
            scaled = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    @tf.function
    def train(batch: Any) -> None:
        strategy.run(step, args=(batch,))

    data, others = (
        tf.data.Dataset.from_tensor_slices((x[rows], y[rows])).batch(4)
        for rows in (slice(first), slice(first, None))
    )
    for _ in range(3):
        for batch in strategy.experimental_distribute_dataset(data.concatenate(others)):
            train(batch)
    optimizer.finalize_variable_values(model.trainable_variables)
    return model


@on_ranks(2)
def what_is_written_alike_stays_where_a_replica_has_no_samples() -> None:
    for case in WRITES:
        for first in (4, 1) if case == "sums" else (4,):
            mine = looped(mirrored(), case, first)
            work.assert_same_on_all_ranks(mine)
            alone = looped(tf.distribute.get_strategy(), case, first)
            for a, b in zip(mine.get_weights(), alone.get_weights(), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=case)


@on_ranks(2)
def gradients_of_a_replica_without_samples_count_nowhere() -> None:
    """Not in those of a sum either, which are summed, too."""
    weight = tf.constant([[1.0, 2.0], [3.0, 4.0]])

    def step(x: Any) -> Any:
        context = tf.distribute.get_replica_context()
        with tf.GradientTape() as tape:
            tape.watch(weight)
            outputs = x @ weight + 1.0
            sums = context.all_reduce("SUM", [tf.reduce_sum(outputs, 0), outputs[0]])
            loss = tf.reduce_sum(tf.square(outputs) * sums[0] * sums[1])
        return context.all_reduce("SUM", tape.gradient(loss, weight))

    def outcome(run: Any) -> Any:
        return run(step, (tf.ones([1 - fd.rank(), 2]),)).numpy().tolist()

    strategy = mirrored()
    # The loss is y⁴ for y = [5, 7], so its gradient is 4 y³. What is returned is zero here, too.
    right = [[500.0, 1372.0] if fd.rank() == 0 else [0.0, 0.0]] * 2
    assert outcome(strategy.run) == outcome(tf.function(strategy.run)) == right


@on_ranks(3)
def a_mean_is_that_of_the_replicas_that_have_samples() -> None:
    """Also of steps that run eagerly, where only this replica knows that it has none."""

    def step(x: Any) -> Any:
        context = tf.distribute.get_replica_context()
        whole = context.all_reduce("MEAN", tf.cast(x[0], tf.int32))
        return context.all_reduce("MEAN", tf.reduce_sum(x)), whole

    strategy, me = mirrored(), fd.rank()
    x = tf.ones([2 - me]) * (me + 1.0)  # sums of 2, 2 and none
    for run in (strategy.run, tf.function(strategy.run)):
        mean, whole = run(step, (x,))
        assert (float(mean), int(whole)) == ((2.0, 1) if me < 2 else (0.0, 0))


# ---- single calls ----


@on_ranks(3)
def values_are_reduced_and_gathered() -> None:
    strategy, me = mirrored(), fd.rank()
    mine = tf.constant([[1.0, 2.0]]) * (me + 1)
    rows = tf.repeat(mine, me + 1, axis=0)  # 1, 2, 3 rows
    assert strategy.reduce("SUM", mine, axis=None).numpy().tolist() == [[6.0, 12.0]]
    mean = tf.distribute.ReduceOp.MEAN
    assert strategy.reduce(mean, mine, axis=None).numpy().tolist() == [[2.0, 4.0]]
    assert strategy.reduce("SUM", rows, axis=0).numpy().tolist() == [14.0, 28.0]
    assert strategy.reduce(mean, rows, axis=0).numpy().tolist() == pytest.approx([7 / 3, 14 / 3])
    assert int(strategy.reduce("SUM", tf.constant(me), axis=None)) == 3
    assert int(strategy.reduce("MEAN", tf.constant([me]), axis=None)[0]) == 1
    tree = strategy.reduce("SUM", {"a": mine, "b": tf.constant(1.0)}, axis=None)
    assert float(tree["b"]) == 3.0
    whole = np.concatenate([np.full((r + 1, 2), [r + 1, 2 * r + 2]) for r in range(3)])
    assert strategy.gather(rows, axis=0).numpy().tolist() == whole.tolist()
    turned = strategy.gather(tf.transpose(rows), axis=1)
    assert turned.numpy().tolist() == whole.T.tolist()
    assert strategy.experimental_local_results(mine)[0] is mine
    values = strategy.experimental_distribute_values_from_function(
        lambda context: context.replica_id_in_sync_group * 10 + context.num_replicas_in_sync
    )
    assert strategy.experimental_local_results(values) == (me * 10 + 3,)
    assert int(strategy.run(lambda v: tf.constant(v) + 1, args=(values,))) == me * 10 + 4
    for wrong in ("PRODUCT", tf.float32):
        with raises(Exception, "PRODUCT" if wrong == "PRODUCT" else ""):
            strategy.reduce(wrong, mine, axis=None)
    words = tf.constant([["a", "", "\u00e9"][me], ["bc", "d", "\x00"][me]])
    for gather in (strategy.gather, tf.function(strategy.gather)):
        texts = gather(words[:, None], 1).numpy().tolist()
        assert texts == [[b"a", b"", "\u00e9".encode()], [b"bc", b"d", b"\x00"]]
    with raises(fd.InvalidArgument, "cannot be gathered"):
        strategy.gather(tf.constant(1.0), axis=0)
    with raises(fd.InvalidArgument, "axis is 2"):
        strategy.gather(rows, axis=2)


def missing_names(whole: Any, part: Any) -> list[str]:
    """Names that our module and the modules in it lack."""
    names = [n for n in dir(whole) if not n.startswith("_")]
    missing = [f"{whole.__name__}.{n}" for n in names if not hasattr(part, n)]
    for n in names:
        if isinstance(getattr(whole, n), ModuleType) and hasattr(part, n):
            missing += missing_names(getattr(whole, n), getattr(part, n))
    return missing


@on_ranks(2)
def every_public_name_of_tf_distribute_is_there() -> None:
    """So that an import is all that a program changes."""
    theirs = tf.distribute
    assert missing_names(theirs, strategies) == []
    assert not [n for n in dir(theirs.experimental) if not hasattr(strategies, n) and n[0] != "_"]
    assert strategies.ReduceOp is theirs.ReduceOp
    for name in ("MirroredStrategy", "MultiWorkerMirroredStrategy", "ParameterServerStrategy"):
        assert getattr(strategies, name) is not getattr(theirs, name)


@on_ranks(3)
def a_replica_asks_and_is_asked() -> None:
    strategy, me = mirrored(), fd.rank()
    options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=20)

    def step(x: Any) -> Any:
        context = tf.distribute.get_replica_context()
        assert context.num_replicas_in_sync == 3
        assert tf.distribute.get_strategy() is strategy
        listed = [x, x * 2, tf.zeros([7])]
        sums = context.all_reduce("SUM", listed, options=options)
        means = context.all_reduce(tf.distribute.ReduceOp.MEAN, {"x": x})
        gathered = context.all_gather(tf.reshape(x, [1, -1]), axis=0)
        crossed = context.merge_call(
            lambda s, v: s.extended.reduce_to("SUM", v, destinations=v), args=(x,)
        )
        rows = tf.IndexedSlices(x[None], tf.constant([me // 2]), tf.constant([2, 3]))
        slices = context.all_reduce("SUM", rows)
        return sums, means, gathered, crossed, slices, context.replica_id_in_sync_group

    x = tf.constant([1.0, 2.0, 3.0]) * (me + 1)
    for run in (strategy.run, tf.function(strategy.run)):
        sums, means, gathered, crossed, slices, number = run(step, (x,))
        assert [each.numpy().tolist() for each in sums] == [[6, 12, 18], [12, 24, 36], [0] * 7]
        assert means["x"].numpy().tolist() == [2.0, 4.0, 6.0]
        assert gathered.numpy().tolist() == [[1, 2, 3], [2, 4, 6], [3, 6, 9]]
        assert crossed.numpy().tolist() == [6.0, 12.0, 18.0]
        assert tf.convert_to_tensor(slices).numpy().tolist() == [[3, 6, 9], [3, 6, 9]]
        assert int(number) == me

    def squared(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            context = tf.distribute.get_replica_context()
            y = tf.reduce_sum(context.all_reduce("SUM", x) ** 2) / 3
        return tape.gradient(y, x)

    gradient = strategy.run(squared, args=(x,))  # of the sum of what all replicas have as y
    assert gradient.numpy().tolist() == pytest.approx([12.0, 24.0, 36.0])
    with raises(fd.InvalidArgument, "timeout_seconds=3"):
        timed = tf.distribute.experimental.CommunicationOptions(timeout_seconds=3)
        strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", x, timed))
    with raises(RuntimeError, "replica context"):
        strategy.run(lambda: strategy.gather(x, axis=0))


@on_ranks(3)
def variables_are_what_their_synchronization_says() -> None:
    strategy, me = mirrored(), fd.rank()
    kinds, ways = tf.VariableAggregation, tf.VariableSynchronization
    with strategy.scope():
        assert tf.Variable(float(me)).numpy() == 0.0  # replica 0's
        summed = tf.Variable(0.0, aggregation=kinds.SUM)
        mean = tf.Variable(0.0, aggregation=kinds.MEAN)
        first = tf.Variable(5.0, aggregation=kinds.ONLY_FIRST_REPLICA)
        count = tf.Variable(0, aggregation=kinds.ONLY_FIRST_REPLICA)
        own = tf.Variable(0.0, synchronization=ways.ON_READ, aggregation=kinds.SUM)
        owns_mean = tf.Variable(0.0, synchronization=ways.ON_READ, aggregation=kinds.MEAN)
        later: list[Any] = []

    @tf.function
    def step() -> Any:
        value = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
        summed.assign_add(value)
        mean.assign(value)
        first.assign(value + 1.0)
        count.assign_add(1)
        own.assign_add(value)
        owns_mean.assign(value)
        if not later:
            later.append(tf.Variable(lambda: tf.random.uniform([])))  # unlike on each rank
        return own.read_value()

    with strategy.scope():
        assert float(strategy.run(step)) == me
        assert float(keras.optimizers.SGD(0.25).learning_rate) == 0.25
    assert [v.numpy() for v in (summed, mean, first, count)] == [3.0, 1.0, 1.0, 1]
    assert (float(mean), int(count), float(own)) == (1.0, 1, 3.0)
    assert float(own.read_value()) == 3.0
    assert float(owns_mean.read_value()) == 1.0
    own.assign(6.0)  # 2 on each
    assert float(strategy.experimental_local_results(own)[0]) == 2.0
    assert np.array(own) == np.asarray(own, np.float64) == 6.0
    with strategy.scope():
        rows = tf.Variable([1.0, 2.0], synchronization=ways.ON_READ, aggregation=kinds.SUM)
    assert tf.gather(rows, [1]).numpy() == [6.0]
    assert tf.gather_nd(rows, [[1]]).numpy() == [6.0]
    assert len(set(strategy.gather(tf.reshape(later[0], [1]), axis=0).numpy().tolist())) == 1
    with raises(ValueError, "NONE"), strategy.scope():
        tf.Variable(0.0, synchronization=ways.NONE)


@on_ranks(3)
def every_cross_device_op_is_right_for_an_odd_number() -> None:
    ops = tf.distribute
    for cross in (
        ops.NcclAllReduce(num_packs=2), ops.HierarchicalCopyAllReduce(), ops.ReductionToOneDevice()
    ):  # fmt: skip
        strategy = mirrored(cross_device_ops=cross)
        values = [tf.constant(fd.rank() + 1.0), tf.ones([3])]

        def step(values: Any = values) -> Any:
            return tf.distribute.get_replica_context().all_reduce("SUM", values)

        total, ones = strategy.run(step)
        assert float(total) == 6.0
        assert ones.numpy().tolist() == [3.0] * 3
    central = strategies.CentralStorageStrategy()
    assert float(central.reduce("SUM", central.run(lambda: tf.constant(1.0)), axis=None)) == 3.0


@on_ranks(3)
def a_replica_without_samples_computes_on_one() -> None:
    """However a function is traced: for the shape of the part, or for any."""
    strategy = mirrored()

    def step(x: Any) -> Any:
        tf.debugging.assert_positive(tf.shape(x)[0])  # oneDNN aborts the process on none
        return tf.reduce_sum(x)

    def reduced(x: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(step, args=(x,)), axis=None)

    @tf.function
    def all_of(dataset: Any) -> Any:
        sums = tf.TensorArray(tf.int64, 0, dynamic_size=True, infer_shape=False)
        for x in dataset:
            sums = sums.write(sums.size(), reduced(x))
        return sums.stack()

    dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.range(7).batch(6))
    for call in (reduced, tf.function(reduced), tf.function(reduced, reduce_retracing=True)):
        assert [int(call(x)) for x in dataset] == [15, 6]
    assert all_of(dataset).numpy().tolist() == [15, 6]


@on_ranks(2)
def what_else_programs_touch_of_a_strategy() -> None:
    strategy, me = mirrored(), fd.rank()
    options = tf.distribute.InputOptions(
        experimental_fetch_to_device=False, experimental_per_replica_buffer_size=2
    )
    numbers = tf.data.Dataset.range(6).batch(4)
    dataset = strategy.experimental_distribute_dataset(numbers, options)
    assert isinstance(dataset, tf.distribute.DistributedDataset)
    parts = [[0, 1], [4]] if me == 0 else [[2, 3], [5]]
    iterator = iter(dataset)
    assert isinstance(iterator, tf.distribute.DistributedIterator)
    assert iterator.get_next().numpy().tolist() == parts[0]
    assert iterator.get_next_as_optional().get_value().numpy().tolist() == parts[1]
    assert not bool(iterator.get_next_as_optional().has_value())
    with raises(tf.errors.OutOfRangeError):
        iterator.get_next()

    extended = strategy.extended
    with strategy.scope():
        variable = tf.Variable(1.0)
    with strategy.scope(), extended.colocate_vars_with(variable):
        beside = tf.Variable(2.0)
    extended.update(variable, lambda v, x: v.assign_add(x), args=(tf.constant(3.0),))
    assert (variable.numpy(), beside.numpy(), float(extended.read_var(variable))) == (4, 2, 4)
    assert float(extended.reduce_to("SUM", tf.constant(1.0), variable)) == 2.0
    pairs = [(tf.constant(2.0), variable), (tf.constant(float(me)), variable)]
    assert [float(each) for each in extended.batch_reduce_to("MEAN", pairs)] == [2.0, 0.5]
    assert float(extended.broadcast_to(tf.constant(float(me)), variable)) == 0.0
    assert extended.variable_created_in_scope(variable)
    assert not extended.variable_created_in_scope(tf.Variable(1.0))
    assert extended.worker_devices == extended.parameter_devices
    assert extended.should_checkpoint == extended.should_save_summary == (me == 0)
    whole = strategy.run(lambda: tf.nn.scale_regularization_loss(tf.constant(4.0)))
    assert float(strategy.reduce("SUM", whole, axis=None)) == 4.0

    assert copy.copy(strategy) is copy.deepcopy(strategy) is strategy
    with raises(fd.InvalidArgument, "is not pickled"):
        pickle.dumps(strategy)


@on_ranks(2)
def datasets_are_split_or_made_by_each_rank() -> None:
    strategy, me = mirrored(), fd.rank()
    told = []

    def make(context: Any) -> Any:
        told.append((context.num_input_pipelines, context.input_pipeline_id))
        with raises(ValueError, "not divisible"):
            context.get_per_replica_batch_size(5)
        size = context.get_per_replica_batch_size(6)
        own = tf.data.Dataset.range(12).shard(2, context.input_pipeline_id)
        return own.batch(size)

    mine = [part.numpy().tolist() for part in strategy.distribute_datasets_from_function(make)]
    assert told == [(2, me)]
    assert mine == [[me, me + 2, me + 4], [me + 6, me + 8, me + 10]]

    ragged = tf.data.Dataset.range(8).batch(3)  # the last batch has 2
    dist = strategy.experimental_distribute_dataset(ragged)
    parts = [part.numpy().tolist() for part in dist]
    assert parts == ([[0, 1], [3, 4], [6]] if me == 0 else [[2], [5], [7]])
    assert int(dist.cardinality) == 3
    full = strategy.experimental_distribute_dataset(ragged.take(2).unbatch().batch(3, True))
    assert full.element_spec.shape.as_list() == [2 - me]

    @tf.function
    def total(dataset: Any) -> Any:
        result = tf.constant(0, tf.int64)
        for part in dataset:
            each = strategy.run(lambda p: tf.reduce_sum(p), args=(part,))
            result += strategy.reduce("SUM", each, axis=None)
        return result

    assert int(total(dist)) == sum(range(8))


@on_ranks(2)
def loops_over_a_shuffle_below_a_repeat_read_the_same_on_all_ranks() -> None:
    """Though how far is read ahead, and so how many orders are drawn, differs."""
    strategy = mirrored()
    data = tf.data.Dataset.range(6).shuffle(6, seed=3).repeat().batch(2)
    dist = strategy.experimental_distribute_dataset(data.prefetch(2 + 20 * fd.rank()))
    seen = []
    for _ in range(4):
        for batch, x in enumerate(dist, 1):
            seen.append(strategy.gather(x, axis=0).numpy().tolist())
            if batch == 2:
                time.sleep(0.05)  # for what is read ahead
                break
    assert len({tuple(each) for each in seen}) > 4, seen
    for first, second in zip(seen[::2], seen[1::2], strict=True):
        assert len({*first, *second}) == 4  # of one pass


@on_ranks(2)
def wrong_data_and_options_are_refused() -> None:
    strategy = mirrored()
    plain = tf.data.Dataset.range(8)
    with raises(fd.InvalidArgument, "not batched", "dataset.batch(B)"):
        strategy.experimental_distribute_dataset(plain)
    with raises(fd.InvalidArgument, "takes a tf.data.Dataset, not a list"):
        strategy.experimental_distribute_dataset([1])
    off = tf.data.Options()
    off.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    with raises(fd.InvalidArgument, "AutoShardPolicy.OFF"):
        strategy.experimental_distribute_dataset(plain.batch(2).with_options(off))
    with strategy.scope():
        for other in (mirrored(), tf.distribute.OneDeviceStrategy("/cpu:0")):
            with raises(RuntimeError, "" if other.num_replicas_in_sync == 1 else "do not nest"):
                other.scope().__enter__()
    options = tf.distribute.experimental.CommunicationOptions
    workers = strategies.MultiWorkerMirroredStrategy
    with raises(fd.InvalidArgument, "NCCL", "leave out implementation"):
        workers(communication_options=options(implementation="NCCL"))
    with raises(fd.InvalidArgument, "FARANDOLE_TIMEOUT=5"):  # the ranks have met already
        workers(communication_options=options(timeout_seconds=5))
    with raises(fd.InvalidArgument, "farandole run -np 2"):
        mirrored(devices=["GPU:0", "GPU:1"])
    with raises(fd.InvalidArgument, "cross_device_ops is a str"):
        mirrored(cross_device_ops="nccl")
    with raises(fd.InvalidArgument, "accumulation_fn"):
        mirrored(cross_device_ops=tf.distribute.ReductionToOneDevice(accumulation_fn=max))
    central = strategies.CentralStorageStrategy
    with raises(fd.InvalidArgument, "parameter_device is 'GPU:0'", "CPU:0"):
        central(parameter_device="GPU:0")
    with raises(fd.InvalidArgument, "parameter_device is 0", "the name of a device"):
        central(parameter_device=0)
    with raises(fd.InvalidArgument, "finds no TPU here"):
        strategies.TPUStrategy()
    assert strategies.OneDeviceStrategy is tf.distribute.OneDeviceStrategy

    # Ranks that read different batches.
    tf.random.set_seed(fd.rank())
    mixed = strategy.experimental_distribute_dataset(plain.shuffle(8).batch(8))
    with raises(fd.Mismatch, "seed=42", "distribute_datasets_from_function"):
        for part in mixed:
            strategy.run(lambda p: p, args=(part,))


@on_ranks(2)
def ranks_with_different_variables_are_told() -> None:
    strategy = mirrored()
    with raises(Exception, "Mismatch", "(3,)", "(2,)"), strategy.scope():
        tf.Variable(tf.zeros([2 + fd.rank()]), name="v")


@on_ranks(2)
def checkpoints_are_written_once_and_restored() -> None:
    strategy, folder = mirrored(), folder_of_all()
    with strategy.scope():
        variable = tf.Variable(1.0)
        own = tf.Variable(
            1.0, synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )  # fmt: skip
    own.assign(8.0)
    checkpoint = tf.train.Checkpoint(variable=variable, own=own)
    manager = tf.train.CheckpointManager(checkpoint, str(folder), max_to_keep=2)
    paths = [manager.save() for _ in range(3)]
    assert tf.train.latest_checkpoint(str(folder)) == paths[-1] == manager.latest_checkpoint
    fd.barrier()
    assert len(list(folder.glob("*.index"))) == 2
    variable.assign(0.0)
    checkpoint.restore(paths[-1])
    assert (variable.numpy(), float(own.read_value())) == (1.0, 8.0)
    plain = tf.Variable(0.0), tf.Variable(0.0)
    tf.train.Checkpoint(variable=plain[0], own=plain[1]).restore(paths[-1])
    assert [float(v) for v in plain] == [1.0, 8.0]
    module = tf.Module()
    module.of_all, module.own = variable, own
    module.call = tf.function(
        lambda x: x * module.of_all, input_signature=[tf.TensorSpec([None], tf.float32)]
    )
    tf.saved_model.save(module, str(folder / "module"))  # by all to one place
    saved = tf.saved_model.load(str(folder / "module"))
    assert saved.call(tf.constant([3.0])).numpy().tolist() == [3.0]
    assert float(saved.own.read_value()) == 8.0
    later = tf.train.CheckpointOptions(experimental_enable_async_checkpoint=True)
    with raises(fd.InvalidArgument, "experimental_enable_async_checkpoint"):
        checkpoint.save(str(folder / "later"), options=later)
    missing: type[Exception] = Exception if fd.rank() == 0 else fd.InvalidArgument
    with raises(missing):
        checkpoint.write("/proc/none/checkpoint")


@on_ranks(2)
def a_gradient_that_is_not_finite_is_told_in_a_loop() -> None:
    strategy = mirrored()
    ways = {"plain": {}, "clips": {"clipnorm": 1.0}, "sums": {"gradient_accumulation_steps": 2}}
    for name, how in ways.items():
        with strategy.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name=name)])
            optimizer = keras.optimizers.SGD(0.01, **how)
        step = step_of(strategy, model, optimizer)
        before = fd.nonfinite_steps()
        step(tf.ones((2, 2)))
        step(tf.ones((2, 2)))
        assert fd.nonfinite_steps() == before
        with told(1) as texts:
            for _ in range(2):  # of which one updates, where two accumulate
                step(tf.fill((2, 2), np.float32(np.nan if fd.rank() == 1 else 1.0)))
        assert fd.nonfinite_steps() == before + (1 if name == "sums" else 2), name
        assert f"rank 1 has a gradient that is NaN: 'sequential/{name}/kernel'" in texts[0]


def step_of(strategy: Any, model: Any, optimizer: Any) -> Any:
    def replica(x: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x))
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    return tf.function(lambda x: strategy.run(replica, args=(x,)))


test_on_ranks = make_tests(
    __name__, "keras on tensorflow", only_sizes=() if grid.full() else (2, 3)
)
