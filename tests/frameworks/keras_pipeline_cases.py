"""farandole.keras.Pipeline: what Keras' fit gives in one process, from stages on several ranks."""

from __future__ import annotations

import doctest
import gc
import importlib
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
from keras_work import hvd, keras
from rank_cases import numerics, on_ranks, raises, told

import farandole as fd
from farandole.common._objects import allgather_object

CLOSE = 2e-5
EAGER: dict[str, Any] = {"run_eagerly": True}  # where no program is worth its compilation
_rng = np.random.default_rng(0)
X = _rng.normal(size=(50, 6)).astype("float32")
Y = (X[:, :1] * 2 - X[:, 1:2]).astype("float32")
W = _rng.uniform(0.5, 2, size=50).astype("float32")


def chain() -> Any:
    keras.utils.set_random_seed(1)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="tanh", kernel_regularizer="l2"),
            layers.Dense(7),
            layers.Activation("relu"),
            layers.Dense(5, activation="tanh"),
            layers.Dense(1, kernel_regularizer="l2"),
        ]
    )


def branches() -> Any:
    """Cut anywhere, several tensors go over."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    x = keras.Input((6,))
    a = layers.Dense(5, activation="tanh", name="a")(x)
    b = layers.Dense(5, activation="relu", name="b")(a)
    c = layers.Add(name="c")([a, b])
    d = layers.Concatenate(name="d")([c, b, x])
    return keras.Model(x, layers.Dense(1)(d))


def compiled(model: Any, **options: Any) -> Any:
    optimizer = keras.optimizers.Adam(0.02, global_clipnorm=0.5)
    given = {"optimizer": optimizer, "loss": "mse", "metrics": ["mae"]} | options
    given["optimizer"] = type(given["optimizer"]).from_config(given["optimizer"].get_config())
    model.compile(**given)
    return model


def check(make: Any, data: dict[str, Any] | None = None, **options: Any) -> Any:
    """Against Keras' own fit, on rank 0."""
    how, callbacks = options.pop("compile", {}), options.pop("callbacks", list)
    start = make().get_weights()
    pipeline = compiled(hvd.Pipeline(make(), **options), **how)
    pipeline.set_weights(start)
    given = {
        "x": X, "y": Y, "sample_weight": W, "batch_size": 16, "epochs": 2, "shuffle": False,
        "verbose": 0, "validation_data": (X[:20], Y[:20]),
    } | (data or {})  # fmt: skip
    history = pipeline.fit(**given, callbacks=callbacks()).history
    weights = pipeline.get_weights()
    evaluated = pipeline.evaluate(given["x"], given["y"], batch_size=16, return_dict=True)
    outputs = pipeline.predict(given["x"], batch_size=16)
    assert allgather_object((history, evaluated)) == [(history, evaluated)] * hvd.size()
    if hvd.rank() > 0:
        return pipeline
    reference = compiled(make(), **how)
    reference.set_weights(start)
    right = reference.fit(**given, callbacks=callbacks()).history
    same_logs(history, right)
    for got, wanted in zip(weights, reference.get_weights(), strict=True):
        np.testing.assert_allclose(got, wanted, atol=CLOSE)
    wanted = reference.evaluate(given["x"], given["y"], batch_size=16, verbose=0, return_dict=True)
    same_logs(evaluated, wanted)
    keras.tree.map_structure(
        lambda got, right: np.testing.assert_allclose(got, right, atol=CLOSE),
        outputs, reference.predict(given["x"], batch_size=16, verbose=0),
    )  # fmt: skip
    return pipeline


def same_logs(got: dict[str, Any], right: dict[str, Any]) -> None:
    assert list(got) == list(right), (got, right)
    for name, values in right.items():
        assert got[name] == pytest.approx(values, abs=CLOSE, rel=1e-4), (name, got, right)


@on_ranks(1)
def examples_in_docstrings() -> None:
    results = doctest.testmod(importlib.import_module("farandole.keras.pipeline"))
    assert results.failed == 0
    assert results.attempted > 0


@on_ranks(2)
def a_chain_learns_as_in_one_process() -> None:
    """The batches divide evenly, so that few programs are compiled."""
    data = {"x": X[:32], "y": Y[:32], "sample_weight": W[:32], "validation_data": (X[:32], Y[:32])}
    check(chain, data, micro_batches=4)


@on_ranks(4)
def replicas_share_batches() -> None:
    pipeline = check(chain, stages=2, micro_batches=3)
    told = pipeline.report()
    assert (told.stages, told.replicas) == (2, hvd.size() // 2)
    assert told.steps == 2 * 4 - 1
    assert 0 < told.idle < 1
    assert [row.in_flight for row in told.ranks][:2] == [2, 1]


@on_ranks(3)
def several_tensors_go_between_stages() -> None:
    check(branches, micro_batches=3, schedule="gpipe", split=["b", "d"], compile=EAGER)


def two_outputs() -> Any:
    """One is made in the first stage."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    x = keras.Input((6,))
    a = layers.Dense(5, activation="tanh", name="a")(x)
    early = layers.Dense(1, name="early")(a)
    return keras.Model(x, {"early": early, "late": layers.Dense(1, name="late")(a)})


@on_ranks(2)
def outputs_reductions_and_callbacks_are_as_in_one_process() -> None:
    def callbacks() -> list[Any]:
        return [
            keras.callbacks.EarlyStopping("val_loss", patience=0, restore_best_weights=True),
            keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=0, min_delta=10),
        ]

    total = {"reduction": "sum"}
    losses = {"early": keras.losses.MeanSquaredError(**total)}
    losses["late"] = keras.losses.MeanAbsoluteError(**total)
    targets = {"early": Y, "late": -Y}
    held_out = X[:9], {name: y[:9] for name, y in targets.items()}
    check(
        two_outputs,
        {"y": targets, "sample_weight": None, "validation_data": held_out, "epochs": 3},
        callbacks=callbacks, split=["late"], micro_batches=2,
        compile={"loss": losses, "metrics": None, "optimizer": keras.optimizers.SGD(0.02)} | EAGER,
    )  # fmt: skip


@on_ranks(2)
def lists_of_several_outputs_are_in_keras_order() -> None:
    how = {
        "loss": {"early": "mse", "late": "mae"}, "loss_weights": {"early": 0.25, "late": 2.0},
        "metrics": {"early": ["mae"], "late": ["mse"]},
    } | EAGER  # fmt: skip
    reference = compiled(two_outputs(), **how)
    pipeline = compiled(hvd.Pipeline(two_outputs(), split=["late"], micro_batches=3), **how)
    targets = {"early": Y[:9], "late": -2 * Y[:9]}
    for call in ("train_on_batch", "test_on_batch", "evaluate"):
        quiet = {"verbose": 0} if call == "evaluate" else {}
        got = getattr(pipeline, call)(X[:9], targets, **quiet)
        wanted = [float(each) for each in getattr(reference, call)(X[:9], targets, **quiet)]
        assert len(set(wanted)) == len(wanted), "or their order would not show"
        assert got == pytest.approx(wanted, abs=CLOSE), call


@on_ranks(2)
def single_batches_and_weights() -> None:
    reference = compiled(branches(), **EAGER)
    pipeline = compiled(hvd.Pipeline(branches(), micro_batches=3), **EAGER)
    right = reference.get_weights()
    assert (pipeline.get_weights() == []) == (hvd.rank() > 0)
    if hvd.rank() == 0:
        for got, wanted in zip(pipeline.get_weights(root_rank=0), right, strict=True):
            np.testing.assert_array_equal(got, wanted)
    else:
        pipeline.get_weights(root_rank=0)
    for call in ("train_on_batch", "test_on_batch"):
        got = getattr(pipeline, call)(X[:9], Y[:9], return_dict=True)
        wanted = getattr(reference, call)(X[:9], Y[:9], return_dict=True)
        wanted = {name: float(value) for name, value in wanted.items()}
        assert got == pytest.approx(wanted, abs=CLOSE), call
    with raises(fd.InvalidArgument, "set_weights(): 1 weights, and the model has 6"):
        pipeline.set_weights(right[:1])
    with raises(fd.InvalidArgument, "root_rank is 7"):
        pipeline.get_weights(root_rank=7)


@on_ranks(3)
def optimizers_go_on_with_other_stages_and_in_one_process() -> None:
    def batch(model: Any) -> Any:
        return model.train_on_batch(X[:9], Y[:9], return_dict=True)

    adam = keras.optimizers.Adam(0.02, amsgrad=True, use_ema=True)
    reference = compiled(branches(), optimizer=adam, **EAGER)
    pipeline = compiled(hvd.Pipeline(branches(), micro_batches=3), optimizer=adam, **EAGER)
    batch(reference), batch(pipeline)
    state = pipeline.get_optimizer_state(root_rank=None)
    weights = pipeline.get_weights(root_rank=None)
    right = dict[str, Any]()
    reference.optimizer.save_own_variables(right)
    assert list(state) == list(right)
    for name, value in right.items():
        np.testing.assert_allclose(state[name], value, atol=CLOSE, err_msg=name)
    assert (pipeline.get_optimizer_state() == {}) == (hvd.rank() > 0)

    other = compiled(hvd.Pipeline(branches(), stages=3, split=["b", "d"]), optimizer=adam, **EAGER)
    other.set_weights(weights)
    other.set_optimizer_state(state)
    reference.set_weights(weights)
    reference.optimizer.load_own_variables(state)
    assert batch(other) == pytest.approx(batch(reference), abs=CLOSE)
    for name, value in other.get_optimizer_state(root_rank=None).items():
        np.testing.assert_allclose(
            value, reference.optimizer.variables[int(name)].numpy(), atol=CLOSE, err_msg=name
        )
    for wrong, words in [
        ([1.0], "it is a dictionary of arrays"),
        ({"0": 1}, "the state has 1 variables, and the optimizer of the whole model has 26"),
        (dict.fromkeys(state, np.ones(77)), "has the shape (77,)"),
    ]:
        with raises(fd.InvalidArgument, words):
            other.set_optimizer_state(wrong)
    several = compiled(hvd.Pipeline(branches()), optimizer=keras.optimizers.Muon(), **EAGER)
    with raises(fd.InvalidArgument, "do not say which variable"):
        several.get_optimizer_state()


@on_ranks(2)
def masks_go_to_the_layers_that_use_them() -> None:
    words = np.random.default_rng(3).integers(0, 5, size=(9, 4))

    def net() -> Any:
        keras.utils.set_random_seed(1)
        layers = keras.layers
        return keras.Sequential(
            [
                keras.Input((4,), dtype="int32"),
                layers.Embedding(5, 3, mask_zero=True),
                layers.Dense(4, name="wide"),
                layers.GlobalAveragePooling1D(name="mean"),
                layers.Dense(1),
            ]
        )

    sgd = {"optimizer": keras.optimizers.SGD(0.1)} | EAGER
    reference = compiled(net(), **sgd)
    start = reference.get_weights()
    right = [float(each) for each in reference.train_on_batch(words, Y[:9])]
    for first in ("wide", "mean"):
        pipeline = compiled(hvd.Pipeline(net(), split=[first], micro_batches=3), **sgd)
        pipeline.set_weights(start)
        assert pipeline.train_on_batch(words, Y[:9]) == pytest.approx(right, abs=CLOSE)
        weights = pipeline.get_weights(root_rank=None)
        for got, wanted in zip(weights, reference.get_weights(), strict=True):
            np.testing.assert_allclose(got, wanted, atol=CLOSE)


@on_ranks(2)
def a_function_makes_the_model_and_a_rank_its_stage_alone() -> None:
    made: list[Any] = []

    def build() -> Any:
        made.append(chain())  # which sets the seed
        made[-1].layers[1].set_weights([np.full((8, 7), 0.5), np.ones(7)])
        return made[-1]

    pipeline = hvd.Pipeline(build, split=[3], micro_batches=2)
    right = chain().get_weights()
    right[2:4] = [np.full((8, 7), 0.5, "float32"), np.ones(7, "float32")]
    for got, wanted in zip(pipeline.get_weights(root_rank=None), right, strict=True):
        np.testing.assert_array_equal(got, wanted)
    has = [[v._value is not None for v in layer.variables] for layer in made[0].layers]
    assert [all(each) for each in has if each] == [
        [True, True, False, False],
        [False, False, True, True],
    ][pipeline.stage]
    compiled(pipeline, **EAGER)
    pipeline.fit(X, Y, batch_size=16, verbose=0)
    keras.StatelessScope().__enter__().__exit__()  # in which Keras gives values to what waits
    assert not any(v._value is not None for v in made[0].layers[-1 - 4 * pipeline.stage].variables)


@on_ranks(2)
def batches_of_tf_data_and_weights_of_classes() -> None:
    import tensorflow as tf

    labels = (Y[:, 0] > 0).astype("int32")

    def net() -> Any:
        model = chain()
        return keras.Model(model.inputs[0], keras.layers.Dense(2)(model.outputs[0]))

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    how = {"loss": loss, "metrics": ["accuracy"], "weighted_metrics": ["accuracy"]} | EAGER
    reference, pipeline = compiled(net(), **how), compiled(hvd.Pipeline(net()), **how)
    pipeline.set_weights(reference.get_weights())

    def data() -> Any:
        return tf.data.Dataset.from_tensor_slices((X, labels)).batch(16)

    given = {"epochs": 2, "verbose": 0, "class_weight": {0: 1.0, 1: 3.0}}
    same_logs(pipeline.fit(data(), **given).history, reference.fit(data(), **given).history)


@on_ranks(2)
def a_rank_keeps_its_own_layers_alone() -> None:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((6,)), *layers])
    alive = [weakref.ref(each) for each in layers]
    pipeline = compiled(hvd.Pipeline(model, split=[2], micro_batches=2), **EAGER)
    del model, layers
    gc.collect()
    assert [each() is not None for each in alive] == [[True, True, False], [False, False, True]][
        pipeline.stage
    ]
    told = pipeline.report().ranks
    assert [row.parameter_bytes for row in told] == [4 * (6 * 4 + 4 + 4 * 4), 4 * 5]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipeline.fit(X, Y, batch_size=16, verbose=0)
    said = [str(each.message) for each in caught if "each micro-batch" in str(each.message)]
    assert len(said) == (pipeline.stage == 0), said
    assert all("which has 8 samples" in each for each in said)


# ---- what goes wrong ----


@on_ranks(2)
def what_is_wrong_is_named_on_every_rank() -> None:
    layers, make = keras.layers, hvd.Pipeline
    twice = layers.Dense(6)
    x = keras.Input((6,))
    shared = keras.Model(x, twice(layers.Dense(6)(twice(x))))
    masked = keras.Sequential([keras.Input((3,)), layers.Embedding(4, 2, mask_zero=True)])
    masked.add(layers.Dense(1, name="tags"))
    good = chain()
    for call, *words in [
        (lambda: make(3), "model is 3; it is a sequential or a functional"),
        (lambda: make(keras.Sequential([layers.Dense(1)])), "begin it with keras.Input"),
        (lambda: make(masked), "output 'tags' has a mask"),
        (lambda: make(lambda: 3), "model is 3; it is a sequential or a functional"),
        (lambda: make(shared, split=[2]), "of stage 1 has a weight of", "of stage 0"),
        (lambda: make(good, split=["nothing"]), "split names a layer 'nothing'; the model has"),
        (lambda: make(good, split="time"), "split is 'time'"),
        (lambda: make(good, split=[9]), "the numbers rise"),
        (lambda: make(good, stages=3), "stages=3 in a world of 2 ranks"),
        (lambda: make(good, micro_batches=hvd.rank()), "micro_batches is 0"),
    ]:
        with raises(fd.InvalidArgument, *words):
            call()
    with raises(fd.Mismatch, "micro_batches=2; rank 1: micro_batches=3"):
        make(good, micro_batches=2 + hvd.rank())
    pipeline = make(good, micro_batches=2)
    with raises(fd.InvalidArgument, "fit(): the model is not compiled"):
        pipeline.fit(X, Y)
    sums = keras.losses.MeanSquaredError
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    for options, words in [
        ({"loss": sums(reduction="mean_with_sample_weight")}, "whose divisor a micro-batch"),
        ({"loss": [sums(reduction="sum"), "mse"]}, "in a Pipeline all have one"),
        ({"optimizer": scaled}, "LossScaleOptimizer"),
    ]:
        with raises(fd.InvalidArgument, words):
            compiled(pipeline, **options)
    compiled(pipeline)
    with raises(fd.InvalidArgument, "ModelCheckpoint would save this rank's stage alone"):
        pipeline.fit(X, Y, callbacks=[keras.callbacks.ModelCheckpoint("x.keras")])
    with raises(fd.Mismatch, "50 samples; rank 1: 49 samples"):
        pipeline.fit(X[: 50 - hvd.rank()], Y[: 50 - hvd.rank()], verbose=0)


class Largest(keras.metrics.Metric):  # type: ignore[misc]  # Keras has no types
    """Its state is no sum."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.most = self.add_weight(name="most", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        del y_true, sample_weight
        self.most.assign(keras.ops.maximum(self.most, keras.ops.max(y_pred)))

    def result(self) -> Any:
        return self.most * 1.0  # no view, which would go on changing


class Seen(Largest):
    """Says that its state is a sum, which it is."""

    state_is_sum = True

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        del y_pred, sample_weight
        self.most.assign_add(keras.ops.cast(keras.ops.shape(y_true)[0], "float32"))


def dice(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.sum(y_true * y_pred) / keras.ops.sum(y_true * y_true + y_pred * y_pred)


def of_pairs(y_true: Any, y_pred: Any) -> Any:
    apart = keras.ops.softmax(keras.ops.transpose(y_pred))
    return keras.ops.mean(keras.ops.square(keras.ops.transpose(apart) - y_true), axis=-1)


def of_some(y_true: Any, y_pred: Any) -> Any:
    classes = keras.ops.softmax(keras.ops.concatenate([y_pred, -y_pred], -1))
    labels = keras.ops.cast(y_true[:, 0] > 0, "int32")
    return keras.losses.sparse_categorical_crossentropy(labels, classes, ignore_class=0)


@on_ranks(2)
def losses_and_metrics_of_the_whole_batch_are_refused() -> None:
    """A micro-batch knows a part of it."""
    pipeline = hvd.Pipeline(chain(), split=[3], micro_batches=2)
    for metric in Largest(), Largest:
        with raises(fd.InvalidArgument, "metric Largest has an update_state() of its own"):
            compiled(pipeline, metrics=["mae", metric])
    for options, words in [
        ({"loss": dice}, "loss dice is of the whole batch"),
        ({"loss": of_pairs}, "loss of_pairs is of the whole batch"),
        ({"loss": of_some}, "loss of_some leaves samples out"),
        ({"metrics": [dice]}, "metric dice gives one number for all samples"),
    ]:
        compiled(pipeline, **options)
        error = fd.InvalidArgument if hvd.rank() else fd.RemoteError
        with raises(error, words):
            pipeline.train_on_batch(X, Y)
    compiled(pipeline, metrics=[Seen()])
    assert pipeline.train_on_batch(X, Y)[1] == len(X)


@on_ranks(2)
def whole_batches_have_losses_and_metrics_of_one_process() -> None:
    """With one micro-batch on one replica nothing is cut."""
    check(chain, micro_batches=1, split=[3], compile={"loss": dice, "metrics": [Largest(), dice]})


@on_ranks(2)
def a_stage_that_raises_is_named() -> None:
    class Trap(keras.layers.Layer):
        armed = False

        def call(self, x: Any) -> Any:
            if Trap.armed and hvd.rank() == 1:
                raise ZeroDivisionError("by design")
            return x * 1.0

    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3), Trap()])
    model.add(keras.layers.Dense(1))
    pipeline = compiled(hvd.Pipeline(model, split=[1], micro_batches=2), run_eagerly=True)
    for armed in (False, True, False):
        Trap.armed = armed
        if not armed:
            assert pipeline.train_on_batch(X, Y)[0] > 0
            assert all(np.isfinite(w).all() for w in pipeline.get_weights())
        elif hvd.rank():
            with raises(ZeroDivisionError, "by design"):
                pipeline.train_on_batch(X, Y)
        else:
            with raises(fd.RemoteError, "rank 1 (stage 1 of 2) failed in the forward of micro"):
                pipeline.train_on_batch(X, Y)


@on_ranks(2, 4)
def a_gradient_that_is_not_finite_is_told_on_all_ranks() -> None:
    """By the last sample, which the last replica has."""
    bad, first = Y.copy(), hvd.size() - 2
    bad[-1] = np.nan
    for how in "warn", "error":
        with numerics(how):
            if hvd.rank() == 0:
                chain()  # later models have other names than elsewhere
            pipeline = compiled(hvd.Pipeline(chain(), stages=2, split=[4]))
        before = fd.nonfinite_steps()
        pipeline.train_on_batch(X, Y)
        assert fd.nonfinite_steps() == before
        words = f"rank {first} has a gradient that is NaN: '"
        if how == "warn":
            with told(int(hvd.rank() in (0, first, first + 1))) as texts:
                pipeline.train_on_batch(X, bad)
            assert all(words in text for text in texts)
        else:
            with raises(fd.NumericsError, words):
                pipeline.train_on_batch(X, bad)
            assert all(np.isfinite(w).all() for w in pipeline.get_weights())
        assert fd.nonfinite_steps() == before + 1
