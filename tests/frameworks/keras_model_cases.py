"""farandole.keras.Model on ranks against plain Keras in one process: weights, losses, metrics,
evaluate and predict, for kinds of data, batches that do not divide, and ranks without samples.

The reference is plain Keras on rank 0; the other ranks are equal to it in every bit.
"""

from __future__ import annotations

import contextlib
import copy
import csv
import io
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras_work as work
import numpy as np
from keras_work import hvd, keras
from rank_cases import on_ranks, raises

import farandole as fd
from farandole.common._objects import broadcast_object
from farandole.data import split_dataset

N, BATCH, EPOCHS = 33, 8, 3  # a last batch of 1, which leaves ranks without samples
RANKS = (1, 2, 3, 4)
CLOSE = 1e-5
_rng = np.random.default_rng(5)
X = _rng.normal(size=(N, 6)).astype("float32")
Y = (X[:, :1] - X[:, 1:2] > 0).astype("float32")
W = _rng.uniform(0.2, 2.0, size=N).astype("float32")


def net() -> Any:
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="tanh", kernel_regularizer="l2"),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )


UNMEASURED: dict[str, Any] = {"metrics": None, "weighted_metrics": None}


def compiled(model: Any, **options: Any) -> Any:
    settings: dict[str, Any] = {
        "optimizer": keras.optimizers.Adam(0.01),
        "loss": "binary_crossentropy",
        "metrics": ["accuracy", keras.metrics.AUC(name="auc"), keras.metrics.Precision(name="p")],
        "weighted_metrics": [keras.metrics.MeanSquaredError(name="wmse")],
    }
    model.compile(**(settings | options))
    return model


def shared(build: Callable[[], Any] = net, data_policy: Any = "auto", **options: Any) -> Any:
    """A model that begins differently on every rank but the first."""
    inner = build()
    if hvd.rank() != 0 and inner.built:
        for variable in inner.trainable_variables:
            variable.assign(variable + 1.0)
    return compiled(hvd.Model(inner, data_policy=data_policy), **options)


def numbers(logs: Any) -> dict[str, list[float]]:
    return {
        key: np.ravel(np.asarray(value, "float64")).tolist() for key, value in dict(logs).items()
    }


def assert_close(mine: Any, right: Any, what: str, close: float) -> None:
    for name, values in numbers(mine).items():
        theirs = numbers(right)[name]
        apart = np.abs(np.subtract(values, theirs)) / np.maximum(np.abs(theirs), 1.0)
        assert apart.max() <= close, f"{what}: {name} is {values}, not {theirs}"
    assert set(numbers(mine)) == set(numbers(right)), (what, sorted(mine), sorted(right))


def assert_same_bits(value: Any, what: str) -> None:
    theirs = broadcast_object(value, 0, what)
    assert repr(value) == repr(theirs), f"{what}: {value} is not rank 0's {theirs}"


def compare(
    mine: Any,
    fit: Callable[[Any, bool], Any],
    *,
    build: Callable[[], Any] = net,
    then: Callable[[Any, bool], dict[str, Any]] | None = None,
    close: float = CLOSE,
    **options: Any,
) -> None:
    """`fit(model, serial)` of this world's model and of plain Keras, and what comes `then`."""
    history = fit(mine, False)
    logs = history if isinstance(history, dict) else history.history
    results = then(mine, False) if then is not None else {}
    assert_same_bits(numbers(logs), "history")
    assert_same_bits({k: np.asarray(v).tobytes() for k, v in results.items()}, "results")
    work.assert_same_on_all_ranks(mine.model)
    if hvd.rank() != 0:
        return
    alone = compiled(build(), **options)
    right = fit(alone, True)
    assert_close(logs, right if isinstance(right, dict) else right.history, "history", close)
    if then is not None:
        assert_close(results, then(alone, True), "results", close)
    for i, (a, b) in enumerate(zip(work.values(mine.model), work.values(alone), strict=True)):
        worst = np.abs(a - b).max()
        assert worst <= close, f"weight {i} differs from one process by {worst}"


def evaluated(model: Any, _: bool) -> dict[str, Any]:
    """With batches of their own, that do not divide either."""
    x, y, w = X[:29], Y[:29], W[:29]
    scores = model.evaluate(x, y, sample_weight=w, batch_size=6, verbose=0, return_dict=True)
    outputs = model.predict(X[:22], batch_size=7, verbose=0)
    listed = model.evaluate(x, y, batch_size=5, verbose=0)
    assert isinstance(listed, list)
    return scores | {"outputs": outputs, "listed": listed}


# ---- arrays ----


@on_ranks(*RANKS)
def arrays_with_weights_and_held_out_data() -> None:
    def fit(model: Any, _: bool) -> Any:
        return model.fit(
            X, Y, sample_weight=W, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0,
            validation_data=(X[:13], Y[:13], W[:13]), validation_batch_size=5, validation_freq=2,
        )  # fmt: skip

    compare(shared(), fit, then=evaluated)


@on_ranks(3)
def arrays_split_by_keras_own_rules_with_class_weights() -> None:
    def fit(model: Any, _: bool) -> Any:
        return model.fit(
            X, Y, class_weight={0: 0.5, 1: 2.0}, epochs=4, initial_epoch=1, shuffle=False,
            verbose=0, validation_split=0.3,
        )  # fmt: skip

    compare(shared(), fit)


@on_ranks(1, 3)
def shuffled_arrays_have_one_order_whatever_the_number_of_ranks() -> None:
    from farandole.data._order import shuffled

    def fit(model: Any, serial: bool) -> Any:
        if not serial:
            return model.fit(X, Y, batch_size=BATCH, epochs=2, verbose=0)
        losses: list[float] = []
        for epoch in range(2):
            rows = shuffled(N, 42, epoch)
            history = model.fit(X[rows], Y[rows], batch_size=BATCH, shuffle=False, verbose=0)
            losses += history.history["loss"]
        return {"loss": losses}

    compare(shared(**UNMEASURED), fit, **UNMEASURED)


# ---- losses and outputs ----


@on_ranks(2, 3)
def steps_of_arrays_are_those_of_keras() -> None:
    """Data that end within an epoch end it, and the next one begins them anew."""

    def fit(model: Any, _: bool) -> Any:
        given = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
        checked = {"validation_data": (X[:13], Y[:13]), "validation_batch_size": 5}
        few = model.fit(
            X[:20], Y[:20], steps_per_epoch=2, epochs=4, validation_steps=2, **given, **checked
        )
        many = model.fit(X[:20], Y[:20], steps_per_epoch=4, epochs=2, **given)
        return few.history | {f"many {key}": value for key, value in many.history.items()}

    def then(model: Any, _: bool) -> dict[str, Any]:
        scores = model.evaluate(X, Y, batch_size=10, steps=6, verbose=0, return_dict=True)
        return scores | {
            f"outputs {steps}": model.predict(X, batch_size=BATCH, steps=steps, verbose=0)
            for steps in (2, 9)
        }

    right: list[bytes] = []
    for policy in ("index", "slice", "leader"):
        compare(shared(data_policy=policy), fit, then=then)
        shuffled = shared(data_policy=policy)
        shuffled.fit(X, Y, batch_size=BATCH, steps_per_epoch=3, epochs=4, verbose=0)
        weights = [value.tobytes() for value in work.values(shuffled.model)]
        right = right or weights
        assert weights == right, policy


def two_outputs() -> Any:
    """One has a mask, which is of another size on each rank."""
    keras.utils.set_random_seed(2)
    words = keras.Input((5,), dtype="int32", name="words")
    more = keras.Input((3,), name="more")
    embedded = keras.layers.Embedding(11, 4, mask_zero=True)(words)
    tags = keras.layers.Dense(3, activation="softmax", name="tags")(embedded)
    pooled = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(11, 3)(words))
    score = keras.layers.Dense(1, name="score")(keras.layers.Concatenate()([pooled, more]))
    return keras.Model({"words": words, "more": more}, {"tags": tags, "score": score})


def masked_data(n: int = 21) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(8)
    words = rng.integers(0, 11, (n, 5)).astype("int32")
    words[:3] = 0  # a rank may have no word at all
    more = rng.normal(size=(n, 3)).astype("float32")
    tags = rng.integers(0, 3, (n, 5)).astype("int32")
    score = more[:, :1] * 2
    weights = {"tags": rng.uniform(0, 1, (n, 5)).astype("float32"), "score": W[:n]}
    return {"words": words, "more": more}, {"tags": tags, "score": score}, weights


@on_ranks(2, 4)
def masks_outputs_and_reductions_are_those_of_the_whole_batch() -> None:
    x, y, weights = masked_data()
    for of_tags, of_score, given in (
        ("sum_over_batch_size", "sum", None),
        ("mean_with_sample_weight", "mean", weights),
        ("sum", "mean_with_sample_weight", weights),
    ):

        def options(of_tags: str = of_tags, of_score: str = of_score) -> dict[str, Any]:
            return {
                "optimizer": keras.optimizers.SGD(0.01),
                "loss": {
                    "tags": keras.losses.SparseCategoricalCrossentropy(reduction=of_tags),
                    "score": keras.losses.MeanSquaredError(reduction=of_score),
                },
                "loss_weights": {"tags": 0.7, "score": 0.1},
                "metrics": {"tags": ["accuracy"], "score": ["mae"]},
                "weighted_metrics": {"tags": ["accuracy"], "score": ["mse"]},
            }

        def fit(model: Any, _: bool, given: Any = given) -> Any:
            return model.fit(
                x, y, sample_weight=given, batch_size=BATCH, epochs=2, shuffle=False, verbose=0
            )

        def then(model: Any, _: bool) -> dict[str, Any]:
            outputs = model.predict(x, batch_size=5, verbose=0)
            return {f"output {k}": v for k, v in outputs.items()}

        mine = shared(two_outputs, **options())
        compare(mine, fit, build=two_outputs, then=then, **options())


@on_ranks(3)
def losses_of_one_number_are_those_of_the_whole_batch() -> None:
    """No mean, no sum; the last batch leaves ranks without samples."""

    def one_number(y: Any, out: Any) -> Any:
        ops = keras.ops
        dice = 1 - 2 * ops.sum(y * out) / (ops.sum(y) + ops.sum(out) + 1.0)
        return dice + ops.mean(ops.square(y - out)) + ops.sum(ops.abs(y - out)) / BATCH

    options: dict[str, Any] = {"optimizer": "sgd", "loss": one_number, **UNMEASURED}

    def fit(model: Any, _: bool) -> Any:
        return model.fit(
            X, Y, sample_weight=W, batch_size=BATCH, epochs=2, shuffle=False, verbose=0
        )

    def then(model: Any, _: bool) -> dict[str, Any]:
        return {"loss": model.evaluate(X, Y, batch_size=7, verbose=0)}

    compare(shared(**options), fit, then=then, **options)


@on_ranks(2, 3)
def losses_that_look_at_other_samples_are_those_of_the_whole_batch() -> None:
    """They give a value for each sample, or for some."""
    ops, backend = keras.ops, keras.backend.backend()

    def pairs(y: Any, out: Any) -> Any:
        near = ops.log_softmax(ops.matmul(out, ops.transpose(out)), axis=0)
        return -ops.diagonal(near) * ops.mean(y, axis=-1)

    def of_those_that_are_there(y: Any, out: Any) -> Any:
        there, each = y[:, 0] > 0.5, ops.mean(ops.square(y - out), axis=-1)
        if backend == "torch":
            return each[there]
        import tensorflow as tf

        return tf.boolean_mask(each, there)

    def unlike(y: Any, out: Any) -> Any:
        return ops.mean(ops.square(y - out), axis=-1) + ops.var(out)

    y = np.sort(Y, axis=0)  # whose first batches have none that is there, but one
    y[::BATCH] = 1.0
    losses = [(pairs, W), (unlike, None), (keras.losses.Circle(), None)]
    losses.append((keras.losses.CosineSimilarity(axis=0), None))
    if backend != "jax":  # whose programs know how many there are
        losses.append((of_those_that_are_there, None))
    for loss, weights in losses:

        def options(loss: Any = loss) -> dict[str, Any]:
            return {"optimizer": keras.optimizers.SGD(0.03), "loss": loss, **UNMEASURED}

        def fit(model: Any, _: bool, weights: Any = weights) -> Any:
            return model.fit(
                X, y, sample_weight=weights, batch_size=BATCH, epochs=2, shuffle=False, verbose=0
            )

        compare(shared(**options()), fit, **options())


@on_ranks(3)
def metrics_whose_result_is_their_state_are_of_all_ranks() -> None:
    """And what a callback decides by them: all ranks go on at the same rate."""

    class Counted(keras.metrics.Metric):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__(name="counted")
            self.seen = self.add_variable((), "zeros", name="seen")

        def update_state(self, y: Any, *_: Any, **__: Any) -> None:
            self.seen.assign_add(keras.ops.sum(keras.ops.ones_like(y)))

        def result(self) -> Any:
            return self.seen.value

    def options() -> dict[str, Any]:
        own = keras.metrics
        metrics = [own.TruePositives(name="tp"), own.FalsePositives([0.3, 0.6], name="fp")]
        return UNMEASURED | {"optimizer": "sgd", "metrics": [*metrics, Counted()]}

    def fit(model: Any, _: bool) -> Any:
        plateau = keras.callbacks.ReduceLROnPlateau("tp", mode="max", patience=1, min_delta=1e3)
        history = model.fit(
            X, Y, batch_size=BATCH, epochs=3, shuffle=False, verbose=0, callbacks=[plateau]
        )
        tested = model.test_on_batch(X, Y, return_dict=True)
        return history.history | {f"test {key}": value for key, value in tested.items()}

    compare(shared(**options()), fit, **options())


# ---- other kinds of data ----


class Batches:
    """A keras.utils.PyDataset, made where Keras is imported."""

    @staticmethod
    def make(x: Any, y: Any, batch: int, **options: Any) -> Any:
        class OfArrays(keras.utils.PyDataset):  # type: ignore[misc, name-defined]
            def __len__(self) -> int:
                return -(-len(x) // batch)

            def __getitem__(self, i: int) -> Any:
                rows = slice(i * batch, min((i + 1) * batch, len(x)))
                return x[rows], y[rows]

        return OfArrays(**options)


def generated() -> Iterator[Any]:
    while True:
        for begin in range(0, N, BATCH):
            yield X[begin : begin + BATCH], Y[begin : begin + BATCH]


@on_ranks(1, 3)
def datasets_of_keras_and_generators() -> None:
    def fit(model: Any, _: bool) -> Any:
        return model.fit(
            Batches.make(X, Y, BATCH), epochs=EPOCHS, shuffle=False, verbose=0,
            validation_data=Batches.make(X[:13], Y[:13], 5), class_weight={0: 0.5, 1: 2.0},
        )  # fmt: skip

    def then(model: Any, _: bool) -> dict[str, Any]:
        scores = model.evaluate(Batches.make(X, Y, 7, workers=2), verbose=0, return_dict=True)
        return scores | {"outputs": model.predict(Batches.make(X, Y, 7), verbose=0)}

    compare(shared(), fit, then=then)

    def fit_generated(model: Any, _: bool) -> Any:
        return model.fit(generated(), steps_per_epoch=5, epochs=2, shuffle=False, verbose=0)

    compare(shared(), fit_generated)


@on_ranks(1, 3)
def batches_that_rank_0_alone_has() -> None:
    from farandole.data import FromRank0

    listed = list(Batches.make(X, Y, BATCH))

    def dealt(batches: Any) -> Any:
        return FromRank0(batches) if hvd.rank() == 0 else FromRank0()

    def fit(model: Any, serial: bool) -> Any:
        if serial:
            return model.fit(
                Batches.make(X, Y, BATCH), epochs=2, shuffle=False, verbose=0,
                validation_data=(X[:13], Y[:13]), validation_batch_size=5,
                class_weight={0: 0.5, 1: 2.0},
            )  # fmt: skip
        return model.fit(
            dealt(listed), epochs=2, verbose=0, class_weight={0: 0.5, 1: 2.0},
            validation_data=dealt(list(Batches.make(X[:13], Y[:13], 5))),
        )  # fmt: skip

    def then(model: Any, serial: bool) -> dict[str, Any]:
        some = generated() if serial else dealt(generated())
        scores = model.evaluate(some, steps=4, verbose=0, return_dict=True)
        outputs = model.predict(X[:32] if serial else dealt([x for x, _ in listed[:4]]), verbose=0)
        return scores | {"outputs": outputs}

    compare(shared(), fit, then=then)

    def fit_endless(model: Any, serial: bool) -> Any:
        some = generated() if serial else dealt(generated())
        return model.fit(some, steps_per_epoch=3, epochs=3, shuffle=False, verbose=0)

    mine = shared()
    compare(mine, fit_endless)

    def fails() -> Iterator[Any]:
        yield listed[0]
        raise OSError("the disk is gone")

    with raises(fd.InvalidArgument, "steps_per_epoch"):
        mine.fit(dealt(fails()), verbose=0)
    kind: type[Exception] = OSError if hvd.rank() == 0 else fd.InvalidArgument
    if work.backend() == "tensorflow":
        kind = Exception  # what TensorFlow makes of a reader's
    with raises(kind, "the disk is gone"):
        mine.fit(dealt(fails()), steps_per_epoch=3, verbose=0)


@on_ranks(1, 3)
def rank_0_reads_any_data_for_all() -> None:
    def on_rank_0(data: Any, serial: bool) -> Any:
        return data if serial or hvd.rank() == 0 else None

    def fit(model: Any, serial: bool) -> Any:
        first, then = (
            model.fit(
                on_rank_0(x, serial), on_rank_0(y, serial), epochs=2, shuffle=False, verbose=0,
                batch_size=size, class_weight={0: 0.5, 1: 2.0},
                validation_data=on_rank_0((X[:13], Y[:13]), serial), validation_batch_size=5,
            ).history
            for x, y, size in ((X, Y, BATCH), (Batches.make(X, Y, BATCH), None, None))
        )  # fmt: skip
        return first | {f"then {key}": value for key, value in then.items()}

    def then(model: Any, serial: bool) -> dict[str, Any]:
        some = on_rank_0(generated(), serial)
        scores = model.evaluate(some, steps=4, verbose=0, return_dict=True)
        outputs = model.predict(on_rank_0(X[:22], serial), batch_size=7, verbose=0)
        ends = model.fit(
            on_rank_0(X, serial), on_rank_0(Y, serial), steps_per_epoch=2, epochs=3, shuffle=False,
            verbose=0,
        )  # fmt: skip
        return scores | {"outputs": outputs, "steps": ends.history["loss"]}

    mine = shared(data_policy="leader")
    compare(mine, fit, then=then)
    with raises(fd.InvalidArgument, "validation_split=0.5 with data_policy='leader'"):
        mine.fit(X, Y, validation_split=0.5, verbose=0)
    with raises(fd.InvalidArgument, "arrays of different lengths"):
        mine.fit(X, Y[:-1], verbose=0)
    with raises(fd.InvalidArgument, "x is None on rank 0"):
        mine.fit(None, verbose=0)
    orders = {}  # shuffled, it is the order that each rank would read in
    for policy in ("leader", "index", "slice"):
        model = shared(data_policy=policy)
        orders[policy] = model.fit(X, Y, epochs=2, verbose=0).history["loss"]
    np.testing.assert_allclose(orders["leader"], orders["index"], rtol=CLOSE)
    np.testing.assert_allclose(orders["slice"], orders["index"], rtol=CLOSE)


@on_ranks(2)
def who_reads_what_is_refused_where_it_cannot_be() -> None:
    from farandole.data import FromRank0

    with raises(fd.InvalidArgument, "Model(): data_policy is 'all'; it is one of 'auto', 'index'"):
        shared(data_policy="all")
    model = shared(data_policy="index")
    for data, what in (
        (Batches.make(X, Y, BATCH), "a PyDataset"),
        (generated(), "a generator"),
    ):
        with raises(fd.InvalidArgument, f"policy 'index' does not go with {what}"):
            model.evaluate(data, steps=2, verbose=0)
    with raises(fd.InvalidArgument, "policy 'index' does not go with a FromRank0"):
        model.predict(FromRank0([X]), verbose=0)
    model = shared(data_policy="slice")
    rows = np.tile(X, (10, 1))
    rows[11] += hvd.rank()  # which is not among those that are compared before
    with raises(fd.Mismatch, "batch 2 of pass 1"):  # of arrays, too, whole batches are compared
        model.predict(rows, batch_size=BATCH, verbose=0)


@on_ranks(1, 3)
def loaders_of_torch() -> None:
    import torch
    from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

    def loader(**options: Any) -> Any:
        data = TensorDataset(torch.tensor(X), torch.tensor(Y))
        return DataLoader(data, batch_size=BATCH, **options)

    def fit(model: Any, _: bool) -> Any:
        return model.fit(
            loader(), epochs=2, shuffle=False, verbose=0, validation_data=loader(drop_last=True)
        )

    compare(shared(), fit)

    # A shuffle whose seed nobody gave.
    model, drawn = shared(), loader(shuffle=True)
    model.fit(drawn, epochs=2, shuffle=False, verbose=0)
    work.assert_same_on_all_ranks(model.model)
    first, second = (model.predict(drawn, verbose=0) for _ in range(2))
    assert sorted(first.ravel().tolist()) == sorted(second.ravel().tolist())
    assert first.tolist() != second.tolist()  # orders go on from one call to the next

    def fit_drawn(model: Any, _: bool) -> Any:
        drawn = loader(shuffle=True, generator=torch.Generator().manual_seed(4))
        return model.fit(drawn, epochs=2, shuffle=False, verbose=0)

    for policy in ("index", "slice"):
        compare(shared(data_policy=policy), fit_drawn)
    compare(shared(data_policy="leader"), fit)

    class Numbered(IterableDataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return N

        def __iter__(self) -> Iterator[Any]:
            return iter(loader().dataset)

    class Named(Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return N

        def __getitem__(self, key: str) -> Any:
            return loader().dataset[int(key.removeprefix("sample "))]

    names = [f"sample {i}" for i in range(N)]
    for make in (
        lambda: DataLoader(Numbered(), batch_size=BATCH),
        lambda: DataLoader(Named(), batch_size=BATCH, sampler=names),
    ):
        compare(
            shared(),
            lambda model, _, make=make: model.fit(make(), epochs=2, shuffle=False, verbose=0),
        )

    with raises(fd.InvalidArgument, "not batched"):
        model.fit(DataLoader(loader().dataset, batch_size=None), shuffle=False, verbose=0)


# ---- callbacks ----


@on_ranks(3)
def callbacks_decide_alike_and_write_once() -> None:
    from farandole.keras._global.callbacks import of_this_rank

    folder = Path(broadcast_object(tempfile.mkdtemp(), 0, "folder"))
    mine = folder / f"rank {hvd.rank()}"
    mine.mkdir()

    def fit(model: Any, serial: bool) -> Any:
        place = folder / "alone" if serial else mine
        place.mkdir(exist_ok=True)
        return model.fit(
            X, Y, batch_size=BATCH, epochs=8, shuffle=False, verbose=0,
            validation_data=(X[:7], 1 - Y[:7]),
            callbacks=[
                keras.callbacks.EarlyStopping("val_loss", patience=3, restore_best_weights=True),
                keras.callbacks.ReduceLROnPlateau("val_loss", patience=1, factor=0.5, verbose=1),
                keras.callbacks.CSVLogger(str(place / "log.csv")),
                keras.callbacks.ModelCheckpoint(str(place / "{epoch}.keras")),
                keras.callbacks.TerminateOnNaN(),
                keras.callbacks.LambdaCallback(on_epoch_end=lambda _, logs: seen.append(logs)),
            ],
        )  # fmt: skip

    seen: list[Any] = []
    compare(shared(), fit)
    assert_same_bits([numbers(logs) for logs in seen[:3]], "what callbacks see")
    once = [keras.callbacks.RemoteMonitor(), keras.callbacks.TensorBoard(str(mine))]
    assert of_this_rank(once) == (once if hvd.rank() == 0 else [])
    written = {rank: list((folder / f"rank {rank}").iterdir()) for rank in range(hvd.size())}
    assert written[0]
    assert not any(written[rank] for rank in range(1, hvd.size())), written
    if hvd.rank() == 0:
        tables = [
            list(csv.DictReader((place / "log.csv").open())) for place in (mine, folder / "alone")
        ]
        assert len(tables[0]) == len(tables[1])
        for a, b in zip(*tables, strict=True):
            assert all(abs(float(a[key]) - float(b[key])) < CLOSE for key in b), (a, b)
        again = keras.models.load_model(mine / "1.keras")
        assert isinstance(again.optimizer, keras.optimizers.Adam)


@on_ranks(2)
def a_loss_that_is_no_number_ends_fit_on_all_ranks_in_one_batch() -> None:
    x = X.copy()
    x[9] = np.nan  # in the second batch; of the first rank alone
    model = shared()
    seen: list[int] = []

    class Counts(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
            seen.append(batch)

    nans = keras.callbacks.TerminateOnNaN()
    model.fit(x, Y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[Counts(), nans])
    assert seen == [0, 1]


@on_ranks(2)
def training_goes_on_where_a_backup_ends() -> None:
    folder = broadcast_object(tempfile.mkdtemp(), 0, "folder")

    def fit(model: Any, serial: bool) -> Any:
        place = f"{folder}/{'alone' if serial else f'rank {hvd.rank()}'}"

        class Fails(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
                if epoch == 1:
                    raise KeyboardInterrupt

        def go(callbacks: list[Any]) -> Any:
            backup = keras.callbacks.BackupAndRestore(place, delete_checkpoint=False)
            return model.fit(
                X, Y, batch_size=BATCH, epochs=3, shuffle=False, verbose=0,
                callbacks=[backup, *callbacks],
            )  # fmt: skip

        try:
            go([Fails()])
        except KeyboardInterrupt:
            pass
        else:
            raise AssertionError("fit() goes on")
        for variable in model.trainable_variables:  # lost, but for the file of rank 0
            variable.assign(variable * 0.0)
        return go([])

    compare(shared(), fit)


@on_ranks(2)
def a_callback_evaluates_by_itself() -> None:
    scores: list[float] = []

    class Looks(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
            if hvd.rank() == 0:
                scores.append(self.model.evaluate(X, Y, verbose=0, return_dict=True)["loss"])

    model = shared()
    model.fit(X, Y, epochs=2, verbose=0, callbacks=[Looks()])
    score = model.evaluate(X, Y, verbose=0, return_dict=True)["loss"]
    if hvd.rank() == 0:
        assert abs(scores[-1] - score) < CLOSE


@on_ranks(2)
def who_wants_to_stop_on_one_rank_stops_all() -> None:
    class Stops(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
            if hvd.rank() == 1 and epoch == 1:
                self.model.stop_training = True

    model = shared()
    history = model.fit(X, Y, epochs=5, verbose=0, callbacks=Stops())
    assert len(history.history["loss"]) == 2


# ---- single batches, files, weights ----


@on_ranks(1, 3)
def single_batches() -> None:
    def fit(model: Any, _: bool) -> Any:
        logs: dict[str, list[float]] = {}
        for n in (8, 7, 1):
            for key, value in model.train_on_batch(
                X[:n], Y[:n], sample_weight=W[:n], return_dict=True
            ).items():
                logs.setdefault(key, []).append(float(value))
        return logs

    def then(model: Any, _: bool) -> dict[str, Any]:
        scores = model.test_on_batch(X[:8], Y[:8], return_dict=True)
        listed = model.train_on_batch(X[:8], Y[:8], class_weight={0: 2.0})
        return scores | {"listed": listed, "outputs": model.predict_on_batch(X[:5])}

    compare(shared(), fit, then=then)


@on_ranks(2)
def single_batches_that_differ_are_a_mismatch() -> None:
    model = shared()
    model.train_on_batch(X[:8], Y[:8])
    with raises(fd.Mismatch, "the batch of train_on_batch()", "rank 0: 8 samples; rank 1: 7"):
        n = 8 - hvd.rank()
        model.train_on_batch(X[:n], Y[:n])
    x: Any = "x" if hvd.rank() else X[:8]
    weights: Any = 3 if hvd.rank() else {0: 2.0}
    for call, name, words in [  # wrong on one rank alone: told to the other at once
        (lambda: model.train_on_batch(X[:8], Y[:8], class_weight=weights), "train", "weight is 3"),
        (lambda: model.test_on_batch(x, Y[:8]), "test", "has a str without a first dimension"),
        (lambda: model.predict_on_batch(x), "predict", "has a str without a first dimension"),
    ]:
        more = [] if hvd.rank() else [f"{name}_on_batch() cannot begin: rank 1: InvalidArgument"]
        with raises(fd.InvalidArgument, words, *more):
            call()


@on_ranks(2)
def files_and_weights() -> None:
    from farandole.keras._wrapped import distributed_in

    folder = Path(broadcast_object(tempfile.mkdtemp(), 0, "folder"))
    model = shared()
    model.fit(X, Y, batch_size=BATCH, verbose=0)
    model.save(folder / "model.keras")
    model.save_weights(folder / "model.weights.h5")
    before = model.get_weights()

    again = hvd.Model(keras.models.load_model(folder / "model.keras"))  # is compiled
    assert again.evaluate(X, Y, verbose=0) == model.evaluate(X, Y, verbose=0)
    again.fit(X, Y, batch_size=BATCH, verbose=0)
    work.assert_same_on_all_ranks(again.model)

    again.load_weights(folder / "model.weights.h5" if hvd.rank() == 0 else "not here.weights.h5")
    for a, b in zip(again.get_weights(), before, strict=True):
        assert np.array_equal(a, b)
    model.set_weights([w + hvd.rank() for w in before])  # rank 0's are taken
    assert model.evaluate(X, Y, verbose=0) == again.evaluate(X, Y, verbose=0)
    assert model.layers[0].name
    assert model.count_params() == model.model.count_params()
    model.stop_training = True
    assert model.model.stop_training
    with raises(fd.InvalidArgument, "model.model"):
        copy.deepcopy(model)
    copied = hvd.Model(copy.deepcopy(model.model))
    copied.fit(X, Y, batch_size=BATCH, verbose=0)
    work.assert_same_on_all_ranks(copied.model)
    nowhere = "/proc/none/model.weights.h5"
    for use in (model.save, model.load_weights):
        with raises(FileNotFoundError if hvd.rank() == 0 else fd.InvalidArgument):
            use(nowhere)
    lines: list[str] = []
    model.summary(print_fn=lambda line, **_: lines.append(line))
    assert bool(lines) == (hvd.rank() == 0)
    again = compiled(hvd.Model(keras.models.model_from_json(model.to_json())))
    assert again.get_layer(index=0) is again.model.layers[0]
    assert again.count_params() == model.count_params()
    assert distributed_in(pickle.loads(pickle.dumps(model.model)).optimizer) is not None


def value_of(variable: Any) -> np.ndarray[Any, Any]:
    return np.asarray(keras.ops.convert_to_numpy(variable))


@on_ranks(2, 3)
def a_file_of_a_window_that_is_open_is_that_of_one_process() -> None:
    """Each rank's gradients wait for those of the next batch."""
    folder = Path(broadcast_object(tempfile.mkdtemp(), 0, "folder"))

    def trained(wrap: Callable[[Any], Any]) -> Any:
        model = wrap(net())
        model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=5), "mse")
        model.fit(X[:BATCH], Y[:BATCH], batch_size=BATCH, shuffle=False, verbose=0)
        return model

    trained(hvd.Model).save(folder / "model.keras")
    alone = trained(lambda model: model).optimizer._accumulated_gradients
    found = keras.models.load_model(folder / "model.keras").optimizer._accumulated_gradients
    for got, right in zip(found, alone, strict=True):
        assert np.abs(value_of(right)).max() > 0
        np.testing.assert_allclose(value_of(got), value_of(right), rtol=1e-4, atol=1e-7)


@on_ranks(2)
def several_ways_to_compile() -> None:
    def fit(model: Any, _: bool) -> Any:
        return model.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)

    ways: list[dict[str, Any]] = [
        {"optimizer": keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)},
        {"optimizer": "sgd", "run_eagerly": True, "metrics": None},
        {"optimizer": {"class_name": "Ftrl", "config": {"learning_rate": 0.1}}, "metrics": None},
    ]
    if work.backend() != "torch":
        ways.append({"optimizer": "sgd", "steps_per_execution": 2})
    for way in ways:

        def fresh(way: dict[str, Any] = way) -> dict[str, Any]:
            if isinstance(way["optimizer"], str | dict):
                return way
            kind = type(way["optimizer"])
            return way | {"optimizer": keras.optimizers.SGD.from_config(
                way["optimizer"].get_config()
            )} if kind else way  # fmt: skip

        compare(shared(**fresh()), fit, **fresh())


@on_ranks(3)
def loss_scaling_weighs_as_in_one_process() -> None:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:

        def fit(model: Any, _: bool) -> Any:
            return model.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)

        def options() -> dict[str, Any]:
            # With a scale at which nothing overflows: gradients of a part are not those of a batch.
            sgd = keras.optimizers.SGD(0.01)
            return UNMEASURED | {
                "optimizer": keras.optimizers.LossScaleOptimizer(sgd, initial_scale=8.0)
            }

        mine = shared(**options())
        compare(mine, fit, close=2e-3, **options())
        assert type(mine.optimizer).__name__ == "LossScaleOptimizer"
        assert int(mine.optimizer.inner_optimizer.iterations) == 2 * 5
    finally:
        keras.config.set_dtype_policy(before)


# ---- models ----


@on_ranks(2)
def classes_of_models_that_are_not_built() -> None:
    class Net(keras.Model):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.hidden = keras.layers.Dense(8, activation="tanh")
            self.out = keras.layers.Dense(1, activation="sigmoid")

        def call(self, x: Any, training: bool = False) -> Any:  # noqa: ARG002
            return self.out(self.hidden(x))

    def build() -> Any:
        keras.utils.set_random_seed(1)
        return Net()

    def build_apart() -> Any:
        keras.utils.set_random_seed(1 + hvd.rank())
        return Net()

    def fit(model: Any, _: bool) -> Any:
        return model.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)

    compare(shared(build_apart), fit, build=build, then=evaluated)
    fresh = hvd.Model(build_apart())  # predicts without compile()
    assert_same_bits(fresh.predict(X, verbose=0).tobytes(), "outputs")


@on_ranks(2)
def normalization_is_each_ranks_own_and_its_averages_are_shared() -> None:
    import warnings

    def build() -> Any:
        keras.utils.set_random_seed(1)
        layers = [keras.Input((6,)), keras.layers.BatchNormalization(name="norm")]
        return keras.Sequential([*layers, keras.layers.Dense(1)])

    model = hvd.Model(build())
    model.compile("sgd", "mse")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(X, Y, batch_size=BATCH, verbose=0)
    told = [str(each.message) for each in caught if "'norm'" in str(each.message)]
    assert len(told) == (hvd.rank() == 0), told
    if told:
        assert "which are 4 of a batch of 8" in told[0]
        assert "advice: Model(sync_batch_norm=True)" in told[0]
    work.assert_same_on_all_ranks(model.model)
    frozen = build()
    frozen.get_layer("norm").trainable = False
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*'norm'")
        hvd.Model(compiled(frozen, **UNMEASURED)).fit(X, Y, batch_size=BATCH, verbose=0)


def adversaries() -> Any:
    """Two models, two optimizers, and a step that applies both, as Keras' guides write it."""

    class Adversaries(keras.Model):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            keras.utils.set_random_seed(1)
            layers = keras.layers
            self.made = keras.Sequential([keras.Input((6,)), layers.Dense(3, activation="tanh")])
            self.judge = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
            self.judged = keras.metrics.Mean(name="judged")

        def compile(self, rate: float, **options: Any) -> None:
            super().compile(**options)
            self.of_judge = keras.optimizers.SGD(rate, momentum=0.9)

        def call(self, x: Any) -> Any:
            return self.judge(self.made(x))

        def losses_of(self, y: Any, out: Any) -> tuple[Any, Any]:
            each = keras.losses.binary_crossentropy(y, out, from_logits=True)
            return keras.ops.mean(each), keras.ops.mean(keras.ops.square(out))

    def step_tensorflow(self: Any, data: Any) -> Any:
        import tensorflow as tf

        x, y = data
        for i, (part, optimizer) in enumerate(
            ((self.judge, self.of_judge), (self.made, self.optimizer))
        ):
            with tf.GradientTape() as tape:
                loss = self.losses_of(y, self(x))[i]
            gradients = tape.gradient(loss, part.trainable_variables)
            optimizer.apply_gradients(zip(gradients, part.trainable_variables, strict=True))
        self.judged.update_state(loss)
        return {"judged": self.judged.result()}

    def step_torch(self: Any, data: Any) -> Any:
        import torch

        x, y = data
        for i, (part, optimizer) in enumerate(
            ((self.judge, self.of_judge), (self.made, self.optimizer))
        ):
            self.zero_grad()
            loss = self.losses_of(y, self(x))[i]
            loss.backward()
            with torch.no_grad():
                optimizer.apply(
                    [v.value.grad for v in part.trainable_weights], part.trainable_weights
                )
        self.judged.update_state(loss.detach())
        return {"judged": self.judged.result()}

    step = {"tensorflow": step_tensorflow, "torch": step_torch}[work.backend()]
    Adversaries.train_step = step
    model = Adversaries()
    model(X[:1])
    return model


@on_ranks(3)
def two_optimizers_in_a_step_of_ones_own() -> None:
    """On JAX a model's step has the state of one."""
    options: dict[str, Any] = {"optimizer": "sgd", "loss": None, "rate": 0.05, **UNMEASURED}

    def fit(model: Any, _: bool) -> Any:
        return model.fit(X, Y, batch_size=BATCH, epochs=3, shuffle=False, verbose=0)

    compare(shared(adversaries, **options), fit, build=adversaries, **options)


def some_left_out(y: Any, out: Any) -> Any:
    """Keras divides it by how many are left, of which each rank has another number."""
    classes = keras.ops.concatenate([1 - out, out], -1)
    y = keras.ops.minimum(y, 1.0)  # whatever it is tried on
    return keras.losses.sparse_categorical_crossentropy(y, classes, ignore_class=0)


def divided_by_those_but(mark: float) -> Any:
    def loss(y: Any, out: Any) -> Any:
        there = keras.ops.cast(keras.ops.not_equal(y, mark), "float32")
        errors = there * keras.ops.square(keras.ops.where(there > 0, y, 0.0) - out)
        return keras.ops.mean(errors / keras.ops.mean(there), axis=-1)

    return loss


class Direct(keras.losses.Loss):  # type: ignore[misc, name-defined]
    """Has no call()."""

    def __call__(self, y: Any, out: Any, sample_weight: Any = None) -> Any:
        del sample_weight
        return keras.ops.mean(keras.ops.square(y - out))


class LeavingOut(keras.losses.Loss):  # type: ignore[misc, name-defined]
    def call(self, y: Any, out: Any) -> Any:
        return some_left_out(y, out)


@on_ranks(2, 3)
def losses_that_leave_samples_out_are_those_of_the_whole_batch() -> None:
    y = np.sort(Y, axis=0)  # whose first batches have none that is there, but one
    y[::BATCH] = 1.0
    marked = [np.where(np.arange(N)[:, None] % 5 == 0, mark, Y) for mark in (255.0, -7.0)]
    for loss, weights, targets in [
        (some_left_out, W, y),
        (LeavingOut(reduction="mean_with_sample_weight"), W, y),
        (LeavingOut(reduction="sum"), None, y),
        (Direct(), None, y),
        (divided_by_those_but(255), None, marked[0]),
        (divided_by_those_but(-7), None, marked[1]),
    ]:

        def options(loss: Any = loss) -> dict[str, Any]:
            return {"optimizer": keras.optimizers.SGD(0.03), "loss": loss, **UNMEASURED}

        def fit(model: Any, _: bool, weights: Any = weights, y: Any = targets) -> Any:
            return model.fit(
                X, y, sample_weight=weights, batch_size=BATCH, epochs=2, shuffle=False, verbose=0
            )

        compare(shared(**options()), fit, **options())


def taught_by(loss_of: Any) -> Callable[[], Any]:
    """Makes a model whose step computes gradients of this loss."""

    def step_tensorflow(self: Any, data: Any) -> Any:
        import tensorflow as tf

        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(y, self(x, training=True))
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"of my own": loss}

    def step_torch(self: Any, data: Any) -> Any:
        import torch

        x, y = data
        self.zero_grad()
        loss = self.loss_of(y, self(x, training=True))
        loss.backward()
        weights = self.trainable_weights
        with torch.no_grad():
            self.optimizer.apply([v.value.grad for v in weights], weights)
        return {"of my own": loss}

    def step_jax(self: Any, state: Any, data: Any) -> Any:
        import jax

        weights, others, slots, metrics = state
        x, y = data

        def loss_of(weights: Any) -> Any:
            return self.loss_of(y, self.stateless_call(weights, others, x, training=True)[0])

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        weights, slots = self.optimizer.stateless_apply(slots, gradients, weights)
        return {"of my own": loss}, (weights, others, slots, metrics)

    steps = {"torch": step_torch, "tensorflow": step_tensorflow, "jax": step_jax}

    class Own(keras.Sequential):  # type: ignore[misc, name-defined]
        train_step = steps[work.backend()]

    def build() -> Any:
        keras.utils.set_random_seed(1)
        model = Own([keras.Input((6,)), keras.layers.Dense(1, activation="sigmoid")])
        model.loss_of = loss_of
        return model

    return build


def compare_taught_by(loss: Any) -> None:
    """Ranks have parts of different lengths."""

    def fit(model: Any, _: bool) -> Any:
        model.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
        even = model.fit(X[:27], Y[:27], batch_size=9, shuffle=False, verbose=0).history
        return {"of my own": even["of my own"]}

    build = taught_by(loss)
    compare(shared(build, **UNMEASURED), fit, build=build, **UNMEASURED)


@on_ranks(3)
def a_training_step_of_ones_own() -> None:
    """It computes gradients of a plain mean."""
    compare_taught_by(lambda y, out: keras.ops.mean(keras.ops.square(y - out)))


@on_ranks(2)
def a_loss_with_its_own_divisor_that_a_step_calls_is_told() -> None:
    mean, dice = keras.losses.MeanSquaredError(), keras.losses.Dice()
    weighing = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    ignoring = keras.losses.SparseCategoricalCrossentropy(ignore_class=0)

    def ignored(y: Any, out: Any) -> Any:
        return ignoring(keras.ops.minimum(y, 1.0), keras.ops.concatenate([1 - out, out], -1))

    for loss, told in [
        (mean, ""),
        (weighing, ""),
        (dice, "Dice by itself, which divides by what it finds in the samples together"),
        (ignored, "SparseCategoricalCrossentropy by itself, which divides by how many samples"),
        (
            lambda y, out: weighing(y, out, y),
            "MeanSquaredError by itself, which divides by the sum",
        ),
    ]:
        model = shared(taught_by(loss), metrics=[dice], weighted_metrics=None)
        with contextlib.redirect_stderr(io.StringIO()) as said:
            model.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
            model.evaluate(X, Y, batch_size=BATCH, verbose=0)
        assert said.getvalue().count("a step calls the loss") == bool(told and hvd.rank() == 0)
        assert told in said.getvalue() or hvd.rank() > 0


def clipping(sharp: bool) -> Any:
    """A model whose step clips gradients by their norm, at first where they are steepest nearby
    (Foret et al., Sharpness-Aware Minimization, 2021)."""

    def norm(gradients: Any) -> Any:
        ops = keras.ops
        return ops.sqrt(sum(ops.sum(ops.square(each)) for each in gradients))

    def near(gradients: Any) -> Any:
        far = 0.05 / norm(gradients)
        return [each * far for each in gradients]

    def clipped(gradients: Any) -> Any:
        factor = 0.05 / keras.ops.maximum(norm(gradients), 0.05)
        return [each * factor for each in gradients]

    def step_tensorflow(self: Any, data: Any) -> Any:
        import tensorflow as tf

        (x, y), weights = data, self.trainable_variables

        def gradients_of() -> Any:
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
            return tape.gradient(loss, weights)

        if sharp:
            aside = near(gradients_of())
            for weight, each in zip(weights, aside, strict=True):
                weight.assign_add(each)
        gradients = clipped(gradients_of())
        if sharp:
            for weight, each in zip(weights, aside, strict=True):
                weight.assign_sub(each)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"of my own": 1.0}

    def step_torch(self: Any, data: Any) -> Any:
        import torch

        (x, y), weights = data, self.trainable_weights

        def backward() -> Any:
            self.zero_grad()
            self.compute_loss(x=x, y=y, y_pred=self(x, training=True)).backward()
            return [v.value.grad for v in weights]

        if sharp:
            aside = near(backward())
            with torch.no_grad():
                for weight, each in zip(weights, aside, strict=True):
                    weight.value.add_(each)
        backward()
        torch.nn.utils.clip_grad_norm_([v.value for v in weights], 0.05)
        with torch.no_grad():
            if sharp:
                for weight, each in zip(weights, aside, strict=True):
                    weight.value.sub_(each)
            self.optimizer.apply([v.value.grad for v in weights], weights)
        return {"of my own": 1.0}

    def step_jax(self: Any, state: Any, data: Any) -> Any:
        import jax

        weights, others, slots, metrics = state
        x, y = data

        def loss_of(weights: Any) -> Any:
            out, _ = self.stateless_call(weights, others, x, training=True)
            return self.compute_loss(x=x, y=y, y_pred=out)

        gradients = jax.grad(loss_of)(weights)
        weights, slots = self.optimizer.stateless_apply(slots, clipped(gradients), weights)
        return {"of my own": 1.0}, (weights, others, slots, metrics)

    steps = {"torch": step_torch, "tensorflow": step_tensorflow, "jax": step_jax}

    class Clipping(keras.Sequential):  # type: ignore[misc, name-defined]
        train_step = steps[work.backend()]

    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)]
    return Clipping([keras.Input((6,)), *layers])


@on_ranks(2)
def a_step_of_ones_own_that_needs_the_whole_batch_is_refused_with_logical_ranks() -> None:
    class Twice(keras.Sequential):  # type: ignore[misc, name-defined]
        def train_step(self, *given: Any) -> Any:
            super().train_step(*given)
            return super().train_step(*given)

    twice = Twice([keras.Input((6,)), keras.layers.Dense(1)])
    for inner, words in [
        (clipping(sharp=False), "train_step() changes gradients before the optimizer gets them"),
        (twice, "train_step() applies its optimizer more than once"),
    ]:
        model = hvd.Model(inner, logical_ranks=2)
        model.compile(keras.optimizers.SGD(0.05), "mse")
        with raises(fd.InvalidArgument, f"logical_ranks=2: {words}"):
            model.fit(X, Y, batch_size=BATCH, verbose=0)


@on_ranks(3)
def a_step_of_ones_own_has_the_gradients_of_the_whole_batch() -> None:
    def fit(model: Any, _: bool) -> Any:
        return model.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)

    for sharp, passes in ((work.backend() != "jax", None), (False, 2)):

        def options(passes: int | None = passes) -> dict[str, Any]:
            optimizer = keras.optimizers.SGD(0.2, momentum=0.5, gradient_accumulation_steps=passes)
            return {"optimizer": optimizer, "loss": "mse", **UNMEASURED}

        def build(sharp: bool = sharp) -> Any:
            return clipping(sharp)

        compare(shared(build, **options()), fit, build=build, **options())


def torch_steps() -> dict[str, Callable[..., Any]]:
    """Ways to get gradients that are not those of one backward(), or are changed then."""
    import torch

    def loss_of(self: Any, x: Any, y: Any) -> Any:
        return self.compute_loss(x=x, y=y, y_pred=self(x, training=True))

    def clipped(gradients: Any, most: float) -> Any:
        norm = sum((each**2).sum() for each in gradients) ** 0.5
        return [each * (most / torch.clamp(norm, min=most)) for each in gradients]

    def by_grad(self: Any, x: Any, y: Any, parameters: Any) -> Any:
        return clipped(torch.autograd.grad(loss_of(self, x, y), parameters), 0.05)

    def by_grad_of_each(self: Any, x: Any, y: Any, parameters: Any) -> Any:
        loss_of(self, x, y)
        losses = [loss_of(self, x[i : i + 1], y[i : i + 1]) for i in range(len(x))]
        each = [clipped(torch.autograd.grad(loss, parameters), 0.5) for loss in losses]
        return [sum(gradients) / len(x) for gradients in zip(*each, strict=True)]

    def by_graph(self: Any, x: Any, y: Any, parameters: Any) -> Any:
        return torch.autograd.grad(loss_of(self, x, y), parameters, create_graph=True)

    def by_backward_of_each(self: Any, x: Any, y: Any, parameters: Any) -> Any:
        for i in range(len(x)):
            (loss_of(self, x[i : i + 1], y[i : i + 1]) / len(x)).backward()
        return [each.grad for each in parameters]

    def by_backward_and_clipped(self: Any, x: Any, y: Any, parameters: Any) -> Any:
        return clipped(by_backward_of_each(self, x, y, parameters), 0.05)

    def by_two_backwards(self: Any, x: Any, y: Any, parameters: Any) -> Any:
        loss_of(self, x, y).backward()
        (0.3 * keras.ops.mean(keras.ops.square(self(-x)))).backward()
        return clipped([each.grad for each in parameters], 0.05)

    def by_names(self: Any, x: Any, y: Any, parameters: Any) -> Any:
        named = {str(i): each for i, each in enumerate(parameters)}
        return clipped(list(torch.autograd.grad(loss_of(self, x, y), named).values()), 0.05)

    def by_edges(self: Any, x: Any, y: Any, parameters: Any) -> Any:
        edge_of = torch.autograd.graph.get_gradient_edge
        gradients = torch.autograd.grad(edge_of(loss_of(self, x, y)), map(edge_of, parameters))
        return clipped(gradients, 0.05)

    def by_backward_of_some(self: Any, x: Any, y: Any, parameters: Any, by: int = 1) -> Any:
        """Every rank has such samples in the first batch, one alone in the last."""
        some = x[:, by] > 0.25
        if some.any():
            (torch.square(self(x) - y)[some].sum() / len(x)).backward()
        return [each.grad for each in parameters]

    def by_backward_or_zeros(self: Any, x: Any, y: Any, parameters: Any) -> Any:
        """One rank alone has such samples."""
        gradients = by_backward_of_some(self, x, y, parameters, by=0)
        pairs = zip(gradients, parameters, strict=True)
        return [torch.zeros_like(p) if g is None else g for g, p in pairs]

    def by_grad_of_some(self: Any, x: Any, y: Any, parameters: Any) -> Any:
        some = [i for i in range(len(x)) if x[i, 1] > 0.25]
        losses = [torch.square(self(x[i : i + 1]) - y[i]).sum() / len(x) for i in some]
        each = [torch.autograd.grad(loss, parameters) for loss in losses]
        zeros = [torch.zeros_like(p) for p in parameters]
        return [sum(gradients) for gradients in zip(zeros, *each, strict=True)]

    def by_backward_at_last(self: Any, x: Any, y: Any, parameters: Any) -> Any:
        """One that raises on rank 0, when others have begun it."""
        hidden = self.layers[0](x)
        if hvd.rank() == 0:
            hidden.register_hook(lambda _: 1 / 0)
        with contextlib.suppress(ZeroDivisionError, fd.Error):
            self.compute_loss(x=x, y=y, y_pred=self.layers[1](hidden)).backward()
        self.zero_grad()
        loss_of(self, x, y).backward()
        return [each.grad for each in parameters]

    def by_clipped_of_some(self: Any, x: Any, y: Any, parameters: Any) -> Any:
        gradients = by_backward_of_some(self, x, y, parameters)
        return gradients if gradients[0] is None else clipped(gradients, 0.05)

    def by_all_ways(self: Any, x: Any, y: Any, parameters: Any) -> Any:
        loss_of(self, x, y).backward()
        if hvd.rank() == 0:
            torch.autograd.grad(torch.square(self(x[:1])).sum(), parameters)
        elif hvd.rank() == 1:
            loss_of(self, x, y).backward()
        return [each.grad for each in parameters]

    def by_more_on_rank_0(self: Any, x: Any, y: Any, parameters: Any) -> Any:
        for _ in range(1 if hvd.rank() > 0 else 2):
            result = by_grad(self, x, y, parameters)
        return result

    return {each.__name__: each for each in vars().copy().values() if hasattr(each, "__name__")}


def asking(how: str) -> Any:
    gradients_of = torch_steps()[how]

    class Asking(keras.Sequential):  # type: ignore[misc, name-defined]
        def train_step(self, data: Any) -> Any:
            import torch

            (x, y), weights = data, self.trainable_weights
            self.zero_grad()
            gradients = gradients_of(self, x, y, [v.value for v in weights])
            with torch.no_grad():
                self.optimizer.apply(gradients, weights)
            return {"of my own": 1.0}

    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)]
    return Asking([keras.Input((6,)), *layers])


@on_ranks(2, 3)
def steps_on_torch_ask_for_gradients_as_in_one_process() -> None:
    """The last batch of 13 samples has 5: ranks have different numbers, some of them one."""

    def fit(model: Any, _: bool = False) -> Any:
        return model.fit(X[:13], Y[:13], batch_size=8, epochs=2, shuffle=False, verbose=0)

    def options() -> dict[str, Any]:
        return {"optimizer": keras.optimizers.SGD(0.2, momentum=0.5), "loss": "mse", **UNMEASURED}

    for how in (
        *("by_grad", "by_grad_of_each", "by_backward_of_each", "by_two_backwards", "by_names"),
        *("by_edges", "by_backward_of_some", "by_backward_or_zeros", "by_grad_of_some"),
        "by_backward_at_last",
    ):

        def build(how: str = how) -> Any:
            return asking(how)

        compare(shared(build, **options()), fit, build=build, **options())
    for how, kind, words in [
        ("by_graph", fd.InvalidArgument, "are part of no rank's graph"),
        ("by_backward_and_clipped", fd.InvalidArgument, "calls backward() more often on rank 0"),
        ("by_clipped_of_some", fd.Mismatch, "disagree on what a train_step() gives its optimizer"),
        ("by_all_ways", fd.Mismatch, "disagree on what comes next in a train_step()"),
        ("by_more_on_rank_0", fd.Mismatch, "rank 0: torch.autograd.grad(); rank 1: its optimizer"),
    ]:
        with raises(kind, words):
            fit(shared(lambda how=how: asking(how), **options()))


@on_ranks(2, 3)
def passes_on_torch_of_an_optimizer_that_one_rank_had_none_of_are_a_mismatch() -> None:
    import torch

    class Halves(keras.Sequential):  # type: ignore[misc, name-defined]
        def train_step(self, data: Any) -> Any:
            x, first = data[0], not self.of_last.built
            self.zero_grad()
            hidden = self.layers[0](x)
            torch.square(hidden).mean().backward()
            if first or hvd.rank() == 0:
                torch.square(self.layers[1](hidden.detach())).mean().backward()
            for optimizer, layer in zip((self.optimizer, self.of_last), self.layers, strict=True):
                weights = layer.trainable_weights
                with torch.no_grad():
                    optimizer.apply([v.value.grad for v in weights], weights)
            return {"own": 1.0}

    def build() -> Any:
        model = Halves([keras.Input((6,)), keras.layers.Dense(4), keras.layers.Dense(1)])
        model.of_last = keras.optimizers.SGD(0.1, name="last")
        return model

    inner, optimizer = build(), keras.optimizers.SGD(0.1)
    optimizer.build(inner.layers[0].trainable_variables)
    model = shared(lambda: inner, optimizer=optimizer, loss=None, **UNMEASURED)
    with raises(fd.Mismatch, "rank 0: backward() of DistributedSGD", "rank 1: its optimizer"):
        model.fit(X, Y, batch_size=BATCH, verbose=0)


@on_ranks(2, 3)
def edges_of_autograd_are_as_without_a_model() -> None:
    import torch

    shared(lambda: asking("by_grad"), optimizer="sgd", loss="mse", **UNMEASURED)
    weight = torch.nn.Parameter(torch.ones(3))
    edge = torch.autograd.graph.get_gradient_edge(weight)
    (gradient,) = torch.autograd.grad((2 * weight).sum(), edge)
    assert gradient.tolist() == [2.0] * 3


@on_ranks(2)
def gradients_that_ranks_ask_for_more_or_less_often_are_a_mismatch() -> None:
    import tensorflow as tf

    class Own(keras.Sequential):  # type: ignore[misc, name-defined]
        def train_step(self, data: Any) -> Any:
            (x, y), weights = data, self.trainable_variables
            for _ in range(2 - hvd.rank()):
                with tf.GradientTape() as tape:
                    loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
                gradients = tape.gradient(loss, weights)
            self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
            return {"own": loss}

    def build() -> Any:
        return Own([keras.Input((6,)), keras.layers.Dense(1)])

    with raises(fd.Mismatch, "rank 0: those that train_step() asks for; rank 1: DistributedSGD"):
        shared(build, optimizer="sgd", loss="mse", **UNMEASURED).fit(X, Y, verbose=0)


@on_ranks(2)
def gradients_of_samples_by_themselves_are_this_ranks_own() -> None:
    """They are clipped one by one, and their mean is reduced; and others that a step makes."""
    if work.backend() != "tensorflow":
        return
    import tensorflow as tf

    def by_jacobian(_: Any, tape: Any, each: Any, __: Any, weights: Any) -> Any:
        return [
            tf.reduce_mean(tf.clip_by_value(g, -0.1, 0.1), 0) for g in tape.jacobian(each, weights)
        ]

    def with_flows(_: Any, tape: Any, each: Any, __: Any, weights: Any) -> Any:
        flow = tf.ones_like(each) / tf.cast(tf.shape(each)[0], each.dtype)
        return tape.gradient(each, weights, output_gradients=flow)

    def with_noise(_: Any, tape: Any, __: Any, loss: Any, weights: Any) -> Any:
        """The mean of that of all ranks, which is small."""
        own = hvd.rank() - 0.5 * (hvd.size() - 1)
        return [g + np.full(g.shape, own, "float32") for g in tape.gradient(loss, weights)]

    def in_part(_: Any, tape: Any, __: Any, loss: Any, weights: Any) -> Any:
        first = tape.gradient(loss, weights)
        half = tf.cond(tf.constant(True), lambda: tape.gradient(loss, weights), lambda: first)
        return [0.5 * a + 0.5 * b for a, b in zip(first, half, strict=True)]

    def build(of: Any) -> Any:
        class Own(keras.Sequential):  # type: ignore[misc, name-defined]
            def train_step(self, data: Any) -> Any:
                (x, y), weights = data, self.trainable_variables
                with tf.GradientTape(persistent=True) as tape:
                    each = tf.reduce_mean(tf.square(y - self(x, training=True)), -1)
                    loss = tf.reduce_mean(each)
                gradients = of(self, tape, each, loss, weights)
                self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
                return {"own": 1.0}

        keras.utils.set_random_seed(1)
        return Own([keras.Input((6,)), keras.layers.Dense(1)])

    def fit(model: Any, _: bool) -> Any:
        return model.fit(X[:32], Y[:32], batch_size=BATCH, shuffle=False, verbose=0)

    plain = build(lambda _, tape, __, loss, weights: tape.gradient(loss, weights))
    for of in (by_jacobian, with_flows, with_noise, in_part):
        options: dict[str, Any] = {"optimizer": "sgd", "loss": None, **UNMEASURED}
        mine = shared(lambda of=of: build(of), **options)
        if of is not with_noise:
            compare(mine, fit, build=lambda of=of: build(of), **options)
            continue
        fit(mine, False)
        work.assert_same_on_all_ranks(mine.model)
        compiled(plain, **options)
        fit(plain, True)
        for a, b in zip(work.values(mine.model), work.values(plain), strict=True):
            assert np.abs(a - b).max() < CLOSE


@on_ranks(2)
def sums_by_a_constant_are_known_where_the_program_says_that_they_are_losses() -> None:
    if work.backend() != "tensorflow":
        return
    import tensorflow as tf

    class Summed(keras.losses.Loss):  # type: ignore[misc, name-defined]
        def call(self, y: Any, out: Any) -> Any:
            return tf.reduce_sum(tf.square(y - out)) / BATCH

    def scaled(self: Any, y: Any, out: Any) -> Any:
        return self.optimizer.scale_loss(tf.reduce_sum(tf.square(y - out)) / BATCH)

    def build(of: Any) -> Any:
        class Own(keras.Sequential):  # type: ignore[misc, name-defined]
            def train_step(self, data: Any) -> Any:
                (x, y), weights = data, self.trainable_variables
                with tf.GradientTape() as tape:
                    loss = of(self, y, self(x, training=True))
                gradients = tape.gradient(loss, weights)
                self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
                return {"own": 1.0}

        keras.utils.set_random_seed(1)
        return Own([keras.Input((6,)), keras.layers.Dense(1)])

    class Computing(keras.Sequential):  # type: ignore[misc, name-defined]
        def compute_loss(self, x: Any, y: Any, y_pred: Any, *_: Any, **__: Any) -> Any:
            del x
            return tf.reduce_sum(tf.square(y - y_pred)) / BATCH

    def computing() -> Any:
        keras.utils.set_random_seed(1)
        return Computing([keras.Input((6,)), keras.layers.Dense(1)])

    def fit(model: Any, _: bool) -> Any:
        return model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)

    steps = (scaled, lambda _, y, out: Summed()(y, out))
    for make in (computing, *(lambda of=of: build(of) for of in steps)):
        options: dict[str, Any] = {"optimizer": "sgd", "loss": None, **UNMEASURED}
        compare(shared(make, **options), fit, build=make, **options)


@on_ranks(2, 3)
def sums_that_layers_add_are_those_of_the_whole_batch() -> None:
    """Keras adds up losses of single samples. That one number is a sum is seen in a graph alone."""
    ops = keras.ops

    class Adding(keras.layers.Layer):  # type: ignore[misc, name-defined]
        def call(self, x: Any) -> Any:
            each = 0.1 * ops.mean(ops.square(x), axis=-1)
            self.add_loss(ops.sum(each) if work.backend() == "tensorflow" else each)
            self.add_loss(each)
            return x

    def build() -> Any:
        keras.utils.set_random_seed(1)
        return keras.Sequential([keras.Input((6,)), keras.layers.Dense(1), Adding()])

    def fit(model: Any, _: bool) -> Any:
        return model.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)

    options: dict[str, Any] = {"optimizer": "sgd", "loss": "mse", **UNMEASURED}
    compare(shared(build, **options), fit, build=build, **options)


@on_ranks(2)
def a_loss_that_a_layer_adds_is_told() -> None:
    """Unless it is known to be a mean over samples, or one for each."""
    ops = keras.ops

    class Rare(keras.Regularizer):  # type: ignore[misc, name-defined]
        def __call__(self, x: Any) -> Any:
            return ops.sum(ops.square(ops.mean(ops.sigmoid(x), axis=0) - 0.05))

    class Adding(keras.layers.Layer):  # type: ignore[misc, name-defined]
        def call(self, x: Any) -> Any:
            self.add_loss(0.1 * ops.mean(ops.square(x), axis=-1))
            return x

    penalty = {"activity_regularizer": "l2", "kernel_regularizer": "l2"}
    for layer, is_told in [
        (keras.layers.Dense(4, activity_regularizer=Rare(), name="rare"), True),
        (keras.layers.Dense(4, name="known", **penalty), False),
        (Adding(name="of_each"), False),
    ]:
        inner = keras.Sequential([keras.Input((6,)), layer, keras.layers.Dense(1)])
        model = compiled(hvd.Model(inner), optimizer="sgd", loss="mse", **UNMEASURED)
        with contextlib.redirect_stderr(io.StringIO()) as said:
            model.fit(X, Y, batch_size=BATCH, epochs=2, verbose=0)
        told = said.getvalue().count(f"layer '{layer.name}' adds a loss of one number")
        assert told == (is_told and hvd.rank() == 0), said.getvalue()
        assert said.getvalue().count("adds a loss") == told


@on_ranks(2)
def losses_that_reach_beyond_their_samples_train_as_in_one_process() -> None:
    """A model's weights, what a layer has kept of its samples, a state of their own."""
    ops = keras.ops

    class Keeping(keras.layers.Layer):  # type: ignore[misc, name-defined]
        kept: Any = None

        def call(self, x: Any) -> Any:
            self.kept = x
            return x

    def squared(y: Any, out: Any) -> Any:
        return ops.mean(ops.square(y - out), axis=-1)

    class Counting(keras.losses.Loss):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.calls = keras.Variable(0.0, trainable=False)

        def call(self, y: Any, out: Any) -> Any:
            if work.backend() != "jax":
                self.calls.assign(self.calls + 1.0)
            return squared(y, out)

    class Growing(keras.losses.Loss):  # type: ignore[misc, name-defined]
        """Counts its calls, which are those of one process."""

        def __init__(self) -> None:
            super().__init__()
            self.calls, self.seen = 0, []

        def call(self, y: Any, out: Any) -> Any:
            self.calls += 1
            self.seen.append(self.calls)
            return (self.calls + len(self.seen)) / 10 * squared(y, out)

    class Reaching(keras.losses.Loss):  # type: ignore[misc, name-defined]
        """Has a state and a layer in lists."""

        def __init__(self) -> None:
            super().__init__()
            self.draws, self.nets = [keras.random.SeedGenerator(1)], [keras.layers.Flatten()]

        def call(self, y: Any, out: Any, again: bool = True) -> Any:
            if again:
                return self.call(y, out, again=False)
            return 0.0 * keras.random.uniform((), seed=self.draws[0]) + squared(
                y, self.nets[0](out)
            )

    def build() -> Any:
        keras.utils.set_random_seed(1)
        return keras.Sequential([keras.Input((6,)), keras.layers.Dense(1), Keeping()])

    def penalty(model: Any) -> Any:
        weights = model.layers[0]
        return lambda y, out: ops.mean(squared(y, out)) + 0.5 * ops.sum(ops.square(weights.kernel))

    def of_kept(model: Any) -> Any:
        keeping = model.layers[-1]
        return lambda y, out: squared(y, out) + 0.5 * ops.mean(ops.square(keeping.kept), axis=-1)

    def fit(model: Any, _: bool) -> Any:
        return model.fit(X[:32], Y[:32], batch_size=BATCH, shuffle=False, verbose=0)

    for make in (penalty, of_kept, lambda _: Counting(), lambda _: Growing(), lambda _: Reaching()):
        models = [build(), build()]
        losses = [make(model) for model in models]
        mine = compiled(hvd.Model(models[0]), optimizer="sgd", loss=losses[0], **UNMEASURED)
        compare(
            mine, fit, build=lambda m=models: m[1], optimizer="sgd", loss=losses[1], **UNMEASURED
        )
        if work.backend() != "jax" and isinstance(losses[0], Counting):
            assert float(ops.convert_to_numpy(losses[0].calls)) == 32 / BATCH


@on_ranks(3)
def a_stateful_layer_that_was_built_for_the_whole_batch() -> None:
    x = np.random.default_rng(1).normal(size=(24, 5, 3)).astype("float32")
    y = x[:, 0, :1]

    def build() -> Any:
        keras.utils.set_random_seed(1)
        layers = [keras.Input(batch_shape=(8, 5, 3)), keras.layers.GRU(4, stateful=True)]
        return keras.Sequential([*layers, keras.layers.Dense(1)])

    def fit(model: Any, _: bool) -> Any:
        return model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)

    def then(model: Any, _: bool) -> dict[str, Any]:
        return {"outputs": model.predict(x, batch_size=8, verbose=0)}

    options: dict[str, Any] = {"optimizer": "sgd", "loss": "mse", **UNMEASURED}
    compare(shared(build, **options), fit, build=build, then=then, **options)


# ---- what goes wrong ----


@on_ranks(2)
def what_is_wrong_is_an_error_on_every_rank() -> None:
    model = hvd.Model(net())
    with raises(fd.InvalidArgument, "not compiled"):
        model.fit(X, Y)
    compiled(model)
    for kind, words, call in [
        (fd.Mismatch, "rank 0: 33 samples; rank 1: 32 samples",
         lambda: model.fit(X[: N - hvd.rank()], Y[: N - hvd.rank()])),
        (fd.Mismatch, "steps_per_epoch 3", lambda: model.fit(X, Y, steps_per_epoch=3 + hvd.rank())),
        (fd.Mismatch, "batch_size 9", lambda: model.fit(X, Y, batch_size=8 + hvd.rank())),
        (fd.Mismatch, "values ", lambda: model.fit(X + hvd.rank(), Y)),
        (fd.Mismatch, "values ", lambda: model.evaluate(X + hvd.rank(), Y)),
        (fd.InvalidArgument, "different lengths: [33, 32]", lambda: model.fit(X, Y[:32])),
        (fd.InvalidArgument, "batch_size is 0.5", lambda: model.fit(X, Y, batch_size=0.5)),
        (fd.InvalidArgument, "rank 1" if hvd.rank() == 0 else "batch_size is -1",
         lambda: model.fit(X, Y, batch_size=8 - 9 * hvd.rank())),
        (fd.InvalidArgument, "which is a str", lambda: model.predict("x")),
        (fd.InvalidArgument, "validation_split=0.999",
         lambda: model.fit(X, Y, validation_split=0.999)),
        *((fd.InvalidArgument, f"{name} is {value!r}", lambda o={name: value}: model.fit(X, Y, **o))
          for name, value in {
              "epochs": "2", "initial_epoch": -1, "steps_per_epoch": 0, "validation_steps": 1.5,
              "validation_freq": 0, "validation_split": 2, "class_weight": [1.0],
          }.items()),
        (fd.InvalidArgument, "callbacks has a list; it takes callbacks of Keras",
         lambda: model.evaluate(X, Y, callbacks=[[]])),
        (fd.InvalidArgument, "steps is 0", lambda: model.evaluate(X, Y, steps=0)),
        (fd.InvalidArgument, "batch_size is 'a'", lambda: model.predict(X, batch_size="a")),
        (fd.InvalidArgument, "batch_size goes with arrays only",
         lambda: model.fit(generated(), batch_size=3)),
        (fd.InvalidArgument, "nonsense", lambda: hvd.Model(net(), nonsense=1)),
        (fd.InvalidArgument, "a Keras 3 model", lambda: hvd.Model(model)),
        (fd.InvalidArgument, "another farandole.keras.Model", lambda: hvd.Model(model.model)),
    ]:  # fmt: skip
        with raises(kind, words):
            call()
    model.fit(X, Y, verbose=0)  # all is well


@on_ranks(2)
def models_that_differ_are_a_mismatch() -> None:
    layers = [keras.Input((6,)), keras.layers.Dense(3 + hvd.rank()), keras.layers.Dense(1)]
    model = compiled(hvd.Model(keras.Sequential(layers)))
    with raises(fd.Mismatch, "[6, 3]", "[6, 4]"):
        model.fit(X, Y, verbose=0)
    model = shared(optimizer=("sgd", "adam")[fd.rank()], **UNMEASURED)
    with raises(fd.Mismatch, "adam"):
        model.fit(X, Y, verbose=0)
    compiled(model, optimizer="sgd", **UNMEASURED)  # the second of one rank, the first of another
    model.fit(X, Y, verbose=0)
    for options, words in [
        ({"loss": ("mse", "mae")[fd.rank()]}, "loss mae"),
        ({"loss": keras.losses.MeanSquaredError(("sum", "mean")[fd.rank()])}, "reduction='sum'"),
        ({"metrics": [["mae"], ["mse"]][fd.rank()]}, "metrics [mae]"),
    ]:
        compiled(model, optimizer="sgd", **UNMEASURED | options)
        with raises(fd.Mismatch, words):
            model.fit(X, Y, verbose=0)
    # Keras keeps the metrics that are there for None.
    compiled(model, optimizer="sgd", metrics=[], weighted_metrics=None)
    model.fit(X, Y, verbose=0)
    work.assert_same_on_all_ranks(model.model)
    led = shared(data_policy=("auto", "leader")[fd.rank()], **UNMEASURED)
    with raises(fd.Mismatch, "data_policy='leader'"):
        led.fit(X, Y, verbose=0)


# ---- tf.data, on every backend ----


@on_ranks(1, 3)
def datasets_of_tensorflow() -> None:
    import tensorflow as tf

    import farandole.tensorflow

    assert farandole.tensorflow.Model is hvd.Model

    def plain() -> Any:
        return tf.data.Dataset.from_tensor_slices((X, Y))

    def zipped() -> Any:
        x, y = (tf.data.Dataset.from_tensor_slices(each) for each in (X, Y))
        return tf.data.Dataset.zip((x, y)).filter(lambda x, _: x[0] > -9.0)  # of unknown length

    def check(make: Callable[[], Any], **options: Any) -> None:
        def fit(model: Any, _: bool) -> Any:
            return model.fit(make(), epochs=2, shuffle=False, verbose=0, **options)

        compare(shared(), fit)

    check(
        lambda: plain().shuffle(40, seed=3).batch(BATCH).prefetch(2),
        validation_data=plain().batch(7),
        class_weight={0: 0.5, 1: 2.0},
    )
    check(lambda: zipped().batch(BATCH).take(4))
    check(lambda: plain().repeat().batch(7), steps_per_epoch=5)
    check(lambda: plain().batch(BATCH, drop_remainder=True))

    def then(model: Any, _: bool) -> dict[str, Any]:
        scores = model.evaluate(zipped().batch(5), verbose=0, return_dict=True)
        some = model.evaluate(plain().repeat().batch(5), steps=3, verbose=0, return_dict=True)
        outputs = model.predict(plain().batch(7), verbose=0)
        only = model.predict(tf.data.Dataset.from_tensor_slices(X).batch(7), verbose=0)
        return scores | {f"some {k}": v for k, v in some.items()} | {"all": outputs, "x": only}

    compare(shared(), lambda m, _: m.fit(X, Y, shuffle=False, verbose=0), then=then)


@on_ranks(2)
def lists_and_texts_are_data() -> None:
    import tensorflow as tf

    texts = np.array(["a b", "c", "b a", "d"] * 9)
    words = keras.layers.TextVectorization(output_mode="multi_hot")
    words.adapt(texts)

    def build() -> Any:
        keras.utils.set_random_seed(1)
        inputs = [keras.Input((), dtype="string"), keras.Input((X.shape[1],))]
        joined = keras.layers.Concatenate()([words(inputs[0]), inputs[1]])
        return keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(joined))

    def fit(model: Any, _: bool) -> Any:
        n = min(len(texts), len(X))
        x = [tf.constant(texts[:n]), X[:n]]
        return model.fit(x, Y[:n], batch_size=BATCH, shuffle=False, verbose=0)

    model = hvd.Model(build())
    compare(compiled(model), fit, build=build)


@on_ranks(3)
def orders_of_a_dataset_are_those_of_keras_own_fit() -> None:
    """On JAX and PyTorch, Keras uses up one order of the data to see what batches look like."""
    import tensorflow as tf

    def fit(model: Any, _: bool) -> Any:
        tf.random.set_seed(5)
        data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(40, seed=3).batch(BATCH)
        model.fit(data, epochs=2, verbose=0)
        return model.fit(data, verbose=0)

    compare(shared(), fit)


@on_ranks(2, 3)
def datasets_whose_maps_run_in_parts_and_whose_shuffles_have_no_seed() -> None:
    import tensorflow as tf

    def mapped(seed: int | None) -> Any:
        tf.random.set_seed(None)  # which net() sets
        # Keras opens a dataset twice for each epoch, and so skips every other order.
        data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(40, seed, policy != "leader")
        data = data.map(lambda x, y: (2.0 * x, y), num_parallel_calls=2)
        return data.take(31).batch(BATCH)

    def fit(model: Any, serial: bool) -> Any:
        seed = 42 if serial else None
        data, held = (mapped(seed) if serial or reads else None for _ in range(2))
        last: dict[str, Any] = {}
        for _ in range(2):  # the second goes on where the first ends
            last = model.fit(
                data, epochs=2, verbose=0, validation_data=held, class_weight={0: 0.5, 1: 2.0}
            ).history
        return last

    for policy in ("index", "slice", "leader"):
        reads = policy != "leader" or hvd.rank() == 0
        compare(shared(data_policy=policy), fit)

    with raises(fd.InvalidArgument, "map (step 2 from the source) draws at random"):
        plain = tf.data.Dataset.from_tensor_slices(X)
        shared(data_policy="index").predict(
            plain.map(lambda x: x + tf.random.uniform(())).batch(BATCH), verbose=0
        )


def normalizing(seed: int) -> Any:
    model = keras.Sequential([keras.Input((6,)), keras.layers.Normalization(), *net().layers])
    model.layers[0].adapt(np.random.default_rng(seed).choice(X, 3, axis=0))
    return model


@on_ranks(2)
def layers_normalize_by_the_statistics_of_rank_0() -> None:
    """They are variables, but what the layer computes with is made of them once."""

    def fit(model: Any, serial: bool) -> Any:
        del serial
        return model.fit(X, Y, batch_size=BATCH, shuffle=False, epochs=2, verbose=0)

    mine = compiled(hvd.Model(normalizing(hvd.rank())))
    compare(mine, fit, build=lambda: normalizing(0))


def counting() -> Any:
    class Counting(keras.layers.Layer):  # type: ignore[misc, name-defined]
        """Its outputs depend on how many steps there were."""

        def build(self, shape: Any) -> None:
            del shape
            self.steps = self.add_weight(
                shape=(), dtype="int32", initializer="zeros", trainable=False
            )

        def call(self, inputs: Any) -> Any:
            self.steps.assign(self.steps + 1)
            return inputs * keras.ops.cast(self.steps, "float32")

    return keras.Sequential([keras.Input((6,)), Counting(), *net().layers])


@on_ranks(2)
def steps_are_counted_where_a_rank_has_no_samples() -> None:
    def fit(model: Any, serial: bool) -> Any:
        del serial
        return model.fit(X[:9], Y[:9], batch_size=4, shuffle=False, epochs=2, verbose=0)

    compare(shared(counting), fit, build=counting)


def following() -> Any:
    class Centred(keras.layers.Layer):  # type: ignore[misc, name-defined]
        def build(self, shape: Any) -> None:
            self.centre = self.add_weight((shape[-1],), "zeros", trainable=False, name="centre")

        def call(self, x: Any, training: bool = False) -> Any:
            if training:
                self.centre.assign(0.5 * self.centre + 0.5 * keras.ops.mean(x, axis=0))
            return x - self.centre

    keras.utils.set_random_seed(1)
    layers = [Centred(name="centred"), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((6,)), *layers])


@on_ranks(2)
def a_layer_whose_state_follows_samples_is_told() -> None:
    """Ranks train with different ones, and nothing here can join them."""
    for build in (following, counting):
        model = shared(build, optimizer="sgd", loss="mse", **UNMEASURED)
        with contextlib.redirect_stderr(io.StringIO()) as said:
            model.fit(X, Y, batch_size=BATCH, epochs=2, verbose=0)
        is_told = build is following and hvd.rank() == 0
        assert said.getvalue().count("layer 'centred' of class Centred") == is_told
        work.assert_same_on_all_ranks(model.model)


@on_ranks(2)
def batches_are_made_while_a_step_runs() -> None:
    import tensorflow as tf

    made: list[int] = []

    def make(number: Any) -> Any:
        made.append(int(number))
        return number

    numbers = tf.data.Dataset.range(8).map(
        lambda i: tf.ensure_shape(tf.numpy_function(make, [i], tf.int64), [])
    )
    for _ in split_dataset(numbers.batch(1)):
        until = time.monotonic() + 30
        while len(made) < 3:  # this one and two more
            assert time.monotonic() < until, made
            time.sleep(0.01)
        break


@on_ranks(2)
def datasets_that_differ_between_ranks_are_a_mismatch() -> None:
    import tensorflow as tf

    plain = tf.data.Dataset.from_tensor_slices((X, Y))
    model = shared()
    tf.random.set_seed(hvd.rank())  # as without any, which others may have set before
    with raises(fd.Mismatch, "different batches", "shuffle(1000, seed=42)"):
        model.fit(plain.shuffle(40).batch(BATCH), shuffle=False, verbose=0)
    with raises(fd.Mismatch, "different batches", "predict()"):
        model.predict(plain.shuffle(40).batch(BATCH), verbose=0)

    def later(number: int) -> Any:
        """The data, of which rank 1 has another sample in that batch (numbered from 1)."""
        odd = tf.constant((number - 1) * 4 if hvd.rank() == 1 else -1, tf.int64)
        numbered = plain.enumerate()
        return numbered.map(lambda i, xy: (tf.where(i == odd, -xy[0], xy[0]), xy[1])).batch(4)

    with raises(fd.Mismatch, "batch 1 of pass 1"):  # by their maps, which ranks run in parts
        model.fit(later(3), verbose=0)
    model = shared(data_policy="slice")
    ends: list[int] = []
    looks = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, _: ends.append(epoch))
    for number in (3, 9):  # found in the fourth batch; at the end
        where = f"batch {number} of pass 1 over the data is another one on rank 1"
        with raises(fd.Mismatch, where):
            model.fit(later(number), epochs=2, verbose=0, callbacks=[looks])
    assert ends == []  # nothing is saved of such an epoch
    with raises(fd.Mismatch, "batch 7 of pass 1"):
        model.evaluate(later(7), verbose=0)
    long = later(99).concatenate(later(9))  # of 18 the last one; not each before it is told
    with raises(fd.Mismatch, "batch 18 of pass 1"):
        model.predict(long.map(lambda x, _: x), verbose=0)
    rows = (X + (np.arange(N) == 20)[:, None] * hvd.rank()).astype("float32")
    with raises(fd.Mismatch, "batch 3 of pass 1"):  # all of it made by Keras' workers
        model.fit(Batches.make(rows, Y, BATCH, workers=2), verbose=0, shuffle=False)
    with raises(fd.Mismatch, "values "):
        model.fit(rows, Y, verbose=0)
    scalars = tf.data.Dataset.range(8)
    with raises(fd.InvalidArgument, "not batched"):
        model.predict(scalars)
    ragged = tf.data.Dataset.from_tensors(tf.ragged.constant([[1.0], [1.0, 2.0]]))
    with raises(fd.InvalidArgument, "RaggedTensors"):
        model.predict(ragged)
