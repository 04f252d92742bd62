"""Metrics on ranks against those of one process that is told the whole batches."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import numpy as np
from keras_model_cases import BATCH, UNMEASURED, W, X, Y, compare, net, shared
from keras_work import hvd, keras
from rank_cases import on_ranks, raises

import farandole as fd
from farandole.keras._global.whole_metrics import is_own


def dice(y: Any, out: Any) -> Any:
    """One number of a batch that is no mean over samples."""
    ops = keras.ops
    return 2 * ops.sum(y * out) / (ops.sum(y) + ops.sum(out) + 1.0)


def of_classes(y: Any, out: Any) -> Any:
    """A number of a batch for each class."""
    ops = keras.ops
    return ops.stack([ops.max(out * y), ops.max(out * (1 - y)), dice(y, out)])


def largest() -> Any:
    class Largest(keras.metrics.Metric):  # type: ignore[misc, name-defined]
        """Begins at a number that is not 0."""

        def __init__(self) -> None:
            super().__init__(name="largest")
            first = keras.initializers.Constant(-1.0)
            self.value = self.add_weight(shape=(), initializer=first, name="value")
            self.batches = self.add_weight(shape=(), initializer="zeros", name="batches")

        def reset_state(self) -> None:
            self.value.assign(-1.0)
            self.batches.assign(0.0)

        def update_state(self, y: Any, out: Any, sample_weight: Any = None) -> None:
            del sample_weight
            self.value.assign(keras.ops.maximum(self.value, keras.ops.max(out - 0.5 * y)))
            self.batches.assign(self.batches + 1.0)

        def result(self) -> Any:
            return self.value + self.batches

    return Largest()


def moving() -> Any:
    class Moving(keras.metrics.Mean):  # type: ignore[misc, name-defined]
        """A state of a class of Keras', of another kind."""

        def update_state(self, y: Any, out: Any, sample_weight: Any = None) -> None:
            del sample_weight
            self.total.assign(0.5 * self.total + 0.5 * dice(y, out))

        def result(self) -> Any:
            return self.total + 0.0

    return Moving(name="moving")


def explained() -> Any:
    class Explained(keras.metrics.Mean):  # type: ignore[misc, name-defined]
        """Tells Keras' Mean one number of the batch."""

        def update_state(self, y: Any, out: Any, sample_weight: Any = None) -> Any:
            del sample_weight
            left, whole = ops.square(y - out), ops.square(y - ops.mean(y))
            return super().update_state(ops.sum(left) / (1.0 + ops.sum(whole)))

    ops = keras.ops
    return Explained(name="explained")


def relative(y: Any, out: Any) -> Any:
    """A number for each sample, which is made from others, too."""
    return keras.ops.mean(keras.ops.abs(y - out), axis=-1) / keras.ops.max(out)


def summed() -> Any:
    class Distances(keras.metrics.Sum):  # type: ignore[misc, name-defined]
        state_is_sum = True

        def update_state(self, y: Any, out: Any, sample_weight: Any = None) -> None:
            super().update_state(keras.ops.abs(y - out), sample_weight)

    return Distances(name="distances")


def prepared() -> Any:
    """Keras' own method adds up what this one prepares, so the state is sums."""

    class Rounded(keras.metrics.MeanIoU):  # type: ignore[misc, name-defined]
        def update_state(self, y: Any, out: Any, sample_weight: Any = None) -> Any:
            return super().update_state(y, keras.ops.round(out), sample_weight)

    return Rounded(num_classes=2, name="rounded")


def measured() -> dict[str, Any]:
    own = [largest(), moving(), explained(), summed(), prepared()]
    along = keras.metrics.CosineSimilarity(name="along", axis=0)
    options = [dice, of_classes, relative, along, keras.losses.tversky, *own]
    weighted = [keras.metrics.MeanMetricWrapper(relative, name="weighted")]
    return UNMEASURED | {
        "optimizer": keras.optimizers.SGD(0.1),
        "metrics": options,
        "weighted_metrics": weighted,
    }


def fit_and_evaluate(model: Any, _: bool) -> Any:
    """Their last batches leave ranks without samples."""
    logs = model.fit(
        X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0,
        validation_data=(X[:13], Y[:13]), validation_batch_size=6,
    ).history  # fmt: skip
    tested = model.evaluate(
        X[:29], Y[:29], sample_weight=W[:29], batch_size=14, verbose=0, return_dict=True
    )
    return logs | {f"test {key}": value for key, value in tested.items()}


@on_ranks(2, 3)
def metrics_that_see_the_whole_batch() -> None:
    compare(shared(**measured()), fit_and_evaluate, **measured())
    alone = [
        is_own(type(each)) for each in (largest(), moving(), explained(), summed(), prepared())
    ]
    assert alone == [True, True, True, False, False]


def biased() -> Any:
    class Biased(keras.Sequential):  # type: ignore[misc, name-defined]
        def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            results = super().compute_metrics(x, y, y_pred, sample_weight)
            apart = y_pred - y
            ends = keras.ops.stack([keras.ops.mean(apart), keras.ops.mean(2 * apart)])
            return {**results, "bias": keras.ops.mean(apart), "several": ends}

    keras.utils.set_random_seed(1)
    return Biased([keras.Input((6,)), keras.layers.Dense(1)])


@on_ranks(2, 3)
def numbers_that_compute_metrics_adds_are_those_of_all_samples() -> None:
    """Ranks have parts of different lengths, or none."""

    def fit(model: Any, _: bool) -> Any:
        logs = model.fit(X[:5], Y[:5], batch_size=5, epochs=2, shuffle=False, verbose=0).history
        return logs | {
            f"test {count} {key}": value
            for count in (1, 3)
            for key, value in model.evaluate(
                X[:count], Y[:count], batch_size=count, verbose=0, return_dict=True
            ).items()
        }

    def options() -> dict[str, Any]:
        each = keras.metrics.F1Score(average=None, threshold=0.5, name="each")
        return {"optimizer": "sgd", "loss": "mse", "metrics": ["mae", each]}

    compare(shared(biased, **options()), fit, build=biased, **options())


@on_ranks(2)
def one_number_that_a_mean_is_told_is_told_of() -> None:
    """Nobody knows what it is of."""

    class Told(keras.Sequential):  # type: ignore[misc, name-defined]
        told: Any = None

        def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            if self.told is not None:
                self.told.update_state(dice(y, y_pred))
            return super().compute_metrics(x, y, y_pred, sample_weight)

    for is_told in (False, True):
        inner = Told([keras.Input((6,)), keras.layers.Dense(1)])
        inner.told = keras.metrics.Mean(name="dice_of_a_batch") if is_told else None
        model = hvd.Model(inner)
        model.compile("sgd", "mse", metrics=["mae"])
        with contextlib.redirect_stderr(io.StringIO()) as said:
            model.fit(X, Y, batch_size=BATCH, verbose=0)
        assert said.getvalue().count("is told one number") == (is_told and hvd.rank() == 0)
        assert said.getvalue().count("metric dice_of_a_batch (Mean)") == (
            is_told and hvd.rank() == 0
        )


@on_ranks(2)
def what_is_no_array_of_samples_is_refused() -> None:
    class Classes(keras.metrics.Metric):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__(name="classes")
            self.total = self.add_variable((5,), "zeros")

        def update_state(self, by_class: Any, *_: Any, **__: Any) -> None:
            self.total.assign(self.total + by_class)

        def result(self) -> Any:
            return keras.ops.sum(self.total)

    class Own(keras.Sequential):  # type: ignore[misc, name-defined]
        def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            self.told.update_state(keras.ops.ones(5))
            return super().compute_metrics(x, y, y_pred, sample_weight)

    keras.utils.set_random_seed(1)
    inner = Own([keras.Input((6,)), keras.layers.Dense(1)])
    inner.told = Classes()
    model = hvd.Model(inner)
    model.compile("sgd", "mse")
    with raises(
        fd.InvalidArgument, "metric Classes: update_state() is told an array of shape (5,)"
    ):
        model.fit(X[:8], Y[:8], batch_size=8, verbose=0)


@on_ranks(3)
def numbers_that_metrics_are_told_in_a_step() -> None:
    class Told(keras.Sequential):  # type: ignore[misc, name-defined]
        def compile(self, *args: Any, **options: Any) -> None:
            super().compile(*args, **options)
            self.total = keras.metrics.Sum(name="total")
            self.mean = keras.metrics.Mean(name="mean")
            self.largest = largest()

        def compute_loss(self, x: Any, y: Any, y_pred: Any, *args: Any, **options: Any) -> Any:
            loss = super().compute_loss(x, y, y_pred, *args, **options)
            self.total.update_state(loss)
            self.mean.update_state(loss)
            self.largest.update_state(0.0 * loss, loss)
            return loss

    def build() -> Any:
        keras.utils.set_random_seed(1)
        return Told([keras.Input((6,)), keras.layers.Dense(1, activation="sigmoid")])

    options: dict[str, Any] = {"optimizer": "sgd", **UNMEASURED}
    compare(shared(build, **options), fit_and_evaluate, build=build, **options)


# ---- every class of Keras' ----

TWO_CLASSES: dict[str, dict[str, Any]] = {
    "CategoricalAccuracy": {}, "CategoricalCrossentropy": {}, "CategoricalHinge": {},
    "ConcordanceCorrelation": {}, "CosineSimilarity": {}, "F1Score": {}, "FBetaScore": {},
    "KLDivergence": {}, "OneHotIoU": {"num_classes": 2, "target_class_ids": [1]},
    "OneHotMeanIoU": {"num_classes": 2}, "PearsonCorrelation": {}, "R2Score": {},
    "TopKCategoricalAccuracy": {"k": 1}, "Precision": {"top_k": 1}, "Recall": {"top_k": 1},
    "AUC": {"multi_label": True, "num_labels": 2},
}  # fmt: skip
OF_NUMBERS: dict[str, dict[str, Any]] = {
    "Accuracy": {}, "SparseCategoricalAccuracy": {}, "SparseCategoricalCrossentropy": {},
    "SparseTopKCategoricalAccuracy": {"k": 1},
}  # fmt: skip
ONE_COLUMN: dict[str, dict[str, Any]] = {
    "BinaryAccuracy": {}, "BinaryCrossentropy": {}, "BinaryIoU": {"target_class_ids": [0, 1]},
    "FalseNegatives": {}, "FalsePositives": {}, "Hinge": {},
    "IoU": {"num_classes": 2, "target_class_ids": [0]}, "LogCoshError": {},
    "MeanAbsoluteError": {}, "MeanAbsolutePercentageError": {}, "MeanIoU": {"num_classes": 2},
    "MeanSquaredError": {}, "MeanSquaredLogarithmicError": {}, "Poisson": {},
    "PrecisionAtRecall": {"recall": 0.5}, "RecallAtPrecision": {"precision": 0.5},
    "RootMeanSquaredError": {}, "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5}, "SquaredHinge": {}, "TrueNegatives": {},
    "TruePositives": {},
}  # fmt: skip
NOT_OF_TARGETS = {"Mean", "MeanMetricWrapper", "Metric", "Sum"}


def _made(table: dict[str, dict[str, Any]], of: str) -> list[Any]:
    return [
        getattr(keras.metrics, kind)(name=f"{of}_{kind}", **options)
        for kind, options in table.items()
    ]


def three_outputs() -> Any:
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6,))
    two = keras.layers.Dense(2, activation="softmax", name="two")(inputs)
    numbered = keras.layers.Softmax(name="numbered")(two)
    one = keras.layers.Dense(1, activation="sigmoid", name="one")(inputs)
    return keras.Model(inputs, {"two": two, "numbered": numbered, "one": one})


@on_ranks(3)
def every_class_of_metrics_of_keras() -> None:
    kinds = {
        name for name, kind in vars(keras.metrics).items()
        if isinstance(kind, type) and issubclass(kind, keras.metrics.Metric)
    }  # fmt: skip
    assert kinds == NOT_OF_TARGETS.union(TWO_CLASSES, OF_NUMBERS, ONE_COLUMN)

    def options() -> dict[str, Any]:
        numbered = [each for each in _made(OF_NUMBERS, "numbered") if "_Acc" not in each.name]
        one = [*_made(ONE_COLUMN, "one"), keras.metrics.Accuracy(name="exact")]
        metrics = {"two": _made(TWO_CLASSES, "two"), "numbered": numbered, "one": one}
        return UNMEASURED | {"optimizer": "sgd", "metrics": metrics, "loss": "mse"}

    targets = {"two": np.concatenate([Y, 1 - Y], -1), "numbered": Y, "one": Y}

    def evaluate(model: Any, _: bool) -> dict[str, Any]:
        scores: dict[str, Any] = model.evaluate(
            X, targets, batch_size=BATCH, verbose=0, return_dict=True
        )
        return scores

    compare(
        shared(three_outputs, **options()), evaluate, build=three_outputs, close=1e-4, **options()
    )


@on_ranks(2)
def metrics_that_logical_ranks_refuse() -> None:
    for metric, words in (
        (dice, "metric dice gives one number for all samples of a batch"),
        (largest(), "metric Largest has an update_state() of its own"),
    ):
        model = hvd.Model(net(), logical_ranks=2)
        model.compile("sgd", "mse", metrics=[metric])
        with raises(fd.InvalidArgument, words):
            model.fit(X, Y, batch_size=BATCH, verbose=0)
