"""Models, losses, optimizers, metrics and data of Keras programs, for every backend.

Models go from (n, WIDTH) to probabilities (n, 2); targets are zeros and ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras_steps
import numpy as np
import programs
from programs import BATCH, WIDTH, Program

BATCHES = 3  # whole ones of an epoch
EPOCHS = 3
HELD_OUT = 13  # samples that evaluate() sees, in batches of 6

# ---- models ----


def head(units: int = 2, **options: Any) -> Any:
    """In float32 with every policy, as Keras' guide to mixed precision has it."""
    from keras import layers

    return layers.Dense(units, activation="sigmoid", dtype="float32", **options)


def dense() -> Any:
    from keras import Input, Sequential, layers

    return Sequential([Input((WIDTH,)), layers.Dense(6, activation="tanh"), head()])


def tied() -> Any:
    """One layer is used twice, and is regularized."""
    from keras import Input, Sequential, layers

    twice = layers.Dense(WIDTH, activation="tanh", kernel_regularizer="l2")
    return Sequential([Input((WIDTH,)), twice, twice, head()])


def frozen() -> Any:
    model = dense()
    model.layers[0].trainable = False
    return model


def normal(**options: Any) -> Any:
    from keras import Input, Sequential, layers

    norm = layers.BatchNormalization(**options)
    # No bias before it: its gradient is 0 but for rounding, which Adam would magnify.
    first = layers.Dense(6, use_bias=False)
    return Sequential([Input((WIDTH,)), first, norm, layers.Activation("tanh"), head()])


def frozen_norm() -> Any:
    model = normal()
    model.layers[1].trainable = False
    return model


def outputs() -> Any:
    """Two outputs, each with a loss of its own."""
    from keras import Input, Model, layers

    inputs = Input((WIDTH,))
    hidden = layers.Dense(6, activation="tanh")(inputs)
    heads = [head(1, name=name)(hidden) for name in ("left", "right")]
    return Model(inputs, heads)


def add_loss() -> Any:
    from keras import Input, Sequential, layers, ops

    class Small(layers.Layer):
        """Asks for small activations."""

        def call(self, x: Any) -> Any:
            self.add_loss(0.5 * ops.mean(ops.square(x)))
            return x

    hidden = layers.Dense(6, activation="tanh")
    return Sequential([Input((WIDTH,)), hidden, Small(), head()])


def add_losses() -> Any:
    """Asks for small activations of each sample, which Keras adds up."""
    from keras import Input, Sequential, layers, ops

    class Small(layers.Layer):
        def call(self, x: Any) -> Any:
            self.add_loss(0.05 * ops.mean(ops.square(x), axis=-1))
            return x

    hidden = layers.Dense(6, activation="tanh")
    return Sequential([Input((WIDTH,)), hidden, Small(), head()])


def masked() -> Any:
    """Two steps of two features; steps of zeros are masked."""
    from keras import Input, Sequential, layers

    hidden = layers.Dense(4, activation="tanh")
    shaped = [Input((WIDTH,)), layers.Reshape((2, 2)), layers.Masking()]
    return Sequential([*shaped, hidden, head(1)])


def remat() -> Any:
    """Activations are computed again in the backward pass."""
    from keras import RematScope

    with RematScope(mode="full"):
        return dense()


def counting() -> Any:
    """Noise that dies out: a layer whose state is the number of its steps."""
    from keras import Input, Sequential, layers

    class Counting(layers.Layer):
        def build(self, _: Any) -> None:
            self.steps = self.add_weight(initializer="zeros", trainable=False, name="steps")

        def call(self, x: Any, training: bool = False) -> Any:
            if training:
                self.steps.assign(self.steps + 1.0)
            return x * (1.0 + 0.5 / (1.0 + self.steps))

    hidden = layers.Dense(6, activation="tanh")
    return Sequential([Input((WIDTH,)), hidden, Counting(), head()])


def seen() -> Any:
    """A layer whose state is the number of samples that it has seen."""
    from keras import Input, Sequential, layers, ops

    class Seen(layers.Layer):
        def build(self, _: Any) -> None:
            self.seen = self.add_weight(initializer="zeros", trainable=False, name="seen")

        def call(self, x: Any, training: bool = False) -> Any:
            if training:
                self.seen.assign(self.seen + ops.cast(ops.shape(x)[0], self.seen.dtype))
            return x

    return Sequential([Input((WIDTH,)), layers.Dense(6, activation="tanh"), Seen(), head()])


def conv() -> Any:
    from keras import Input, Sequential, layers

    hidden = layers.Conv2D(4, 2, padding="same", activation="tanh")
    return Sequential(
        [Input((WIDTH,)), layers.Reshape((2, 2, 1)), hidden, layers.Flatten(), head()]
    )


def embedding() -> Any:
    """Words of a sentence; the word 0 is masked. Gradients are sparse on TensorFlow."""
    from keras import Input, Sequential, layers, ops

    class Words(layers.Layer):
        def call(self, x: Any) -> Any:
            words = ops.minimum(ops.cast(ops.abs(x) * 2.0, "int32"), 5)
            return ops.maximum(words, np.eye(1, WIDTH, dtype=np.int32))  # one is no mask

    read = [layers.Embedding(6, 5, mask_zero=True), layers.GlobalAveragePooling1D()]
    return Sequential([Input((WIDTH,)), Words(), *read, head()])


def recurrent(kind: str) -> Any:
    from keras import Input, Sequential, layers

    return Sequential([Input((WIDTH,)), layers.Reshape((2, 2)), getattr(layers, kind)(4), head()])


def attention() -> Any:
    from keras import Input, Model, layers

    inputs = Input((WIDTH,))
    steps = layers.Dense(4)(layers.Reshape((2, 2))(inputs))
    # No bias: that of the keys has a gradient of 0 but for rounding.
    looks = layers.MultiHeadAttention(num_heads=2, key_dim=2, use_bias=False)(steps, steps)
    normal = layers.LayerNormalization()(layers.Add()([steps, looks]))
    return Model(inputs, head()(layers.Flatten()(normal)))


def group_norm() -> Any:
    from keras import Input, Sequential, layers

    # Two groups of three numbers: of two, what is normal would be a sign.
    body = [layers.Dense(6), layers.GroupNormalization(2), layers.Activation("tanh")]
    return Sequential([Input((WIDTH,)), *body, head()])


def spectral() -> Any:
    from keras import Input, Sequential, layers

    hidden = layers.SpectralNormalization(layers.Dense(6, activation="tanh"))
    return Sequential([Input((WIDTH,)), hidden, head()])


def adapted() -> Any:
    """A layer has learnt from data, before there is a model."""
    from keras import Input, Sequential, layers

    normal = layers.Normalization()
    normal.adapt(3.0 * programs.batch(0)[0] + 1.0)
    return Sequential([Input((WIDTH,)), normal, layers.Dense(6, activation="tanh"), head()])


def shared() -> Any:
    """Two layers have one weight."""
    from keras import Input, Sequential, layers, ops

    first = layers.Dense(WIDTH, activation="tanh")

    class Back(layers.Layer):
        def call(self, x: Any) -> Any:
            return ops.matmul(x, ops.transpose(ops.cast(self.kernel, x.dtype)))

    model = Sequential([Input((WIDTH,)), first])
    back = Back()
    back.kernel = first.kernel
    model.add(back)
    model.add(head())
    return model


def subclassed() -> Any:
    """A class of its own, with a metric that its call() tells of."""
    import keras
    from keras import layers, ops

    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.head = layers.Dense(6, activation="tanh"), head()
            self.size = keras.metrics.Mean(name="size")

        def call(self, x: Any, training: bool = False) -> Any:
            del training
            hidden = self.hidden(x)
            self.size.update_state(ops.mean(ops.square(hidden), axis=-1))
            return self.head(hidden)

    model = Own()
    model(programs.batch(0)[0])
    model.size.reset_state()
    return model


def lora() -> Any:
    model = dense()
    model.layers[0].enable_lora(2)
    return model


def lengths() -> Any:
    """Rows of any length, whose padding counts."""
    from keras import Input, Sequential, layers, ops

    class Steps(layers.Layer):
        def call(self, x: Any) -> Any:
            return ops.expand_dims(x, -1)

        def compute_output_shape(self, shape: Any) -> Any:
            return (*shape, 1)

    hidden = layers.Dense(4, activation="tanh")
    return Sequential([Input((None,)), Steps(), hidden, layers.GlobalAveragePooling1D(), head()])


MODELS: dict[str, Callable[[], Any]] = {
    each.__name__: each
    for each in (
        dense,
        tied,
        frozen,
        frozen_norm,
        outputs,
        add_loss,
        add_losses,
        masked,
        remat,
        counting,
        seen,
        conv,
        embedding,
        attention,
        group_norm,
        spectral,
        adapted,
        shared,
        subclassed,
        lora,
        lengths,
    )
} | {
    "lstm": lambda: recurrent("LSTM"),
    "gru": lambda: recurrent("GRU"),
    "batch_norm": normal,
    "own_step": lambda touch="nothing": keras_steps.own_step(dense(), touch),
    "gan": lambda: keras_steps.gan(dense(), scaled=True),
    "gan_plain": lambda: keras_steps.gan(dense(), scaled=False),
}
STEPS_OF_ITS_OWN = ("own_step", "gan", "gan_plain")
TWO_OPTIMIZERS = ("gan", "gan_plain")

# ---- losses ----


def _one_number(y: Any, out: Any) -> Any:
    """A mean over samples."""
    from keras import ops

    return ops.mean(ops.square(y - out))


def _each(y: Any, out: Any) -> Any:
    from keras import ops

    return ops.mean(ops.abs(y - out), axis=-1)


def _ignoring(y: Any, out: Any) -> Any:
    """The first column is a class; samples of one class do not count, and are no part of a mean."""
    from keras import losses, ops

    classes = ops.minimum(y[:, 0], 1.0)  # whatever it is tried on
    return losses.sparse_categorical_crossentropy(classes, out, ignore_class=1)


def _pairs(y: Any, out: Any) -> Any:
    """A value for each sample, which depends on the others of its batch."""
    from keras import ops

    rows = ops.reshape(out, (ops.shape(out)[0], -1))
    near = ops.log_softmax(ops.matmul(rows, ops.transpose(rows)), axis=0)
    return ops.sum(ops.square(y - out), axis=-1) - ops.diagonal(near)


def _class_of_one_number() -> Any:
    import keras

    class Whole(keras.losses.Loss):
        def call(self, y: Any, out: Any) -> Any:
            return _one_number(y, out)

    return Whole()


def _squares(reduction: str | None) -> Callable[[], Any]:
    def make() -> Any:
        import keras

        return keras.losses.MeanSquaredError(reduction=reduction)

    return make


LOSSES: dict[str, Callable[[], Any]] = {
    "name": lambda: "mse",
    "cross_entropy": lambda: "binary_crossentropy",
    "mean": _squares("mean"),
    "sum": _squares("sum"),
    "mean_with_sample_weight": _squares("mean_with_sample_weight"),
    "none": _squares(None),
    "each": lambda: _each,
    "one_number": lambda: _one_number,
    "class_of_one_number": _class_of_one_number,
    "pairs": lambda: _pairs,
    "ignoring": lambda: _ignoring,
}
OF_ONE_NUMBER = ("one_number", "class_of_one_number")


# ---- optimizers ----


def _loss_scaled(**more: Any) -> Any:
    import keras

    return keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.5, momentum=0.5, **more), initial_scale=8.0, dynamic_growth_steps=3
    )


def _scheduled(**more: Any) -> Any:
    import keras

    rate = keras.optimizers.schedules.CosineDecay(0.5, 8, alpha=0.1)
    return keras.optimizers.SGD(rate, momentum=0.5, **more)


def _of(kind: str, **options: Any) -> Callable[..., Any]:
    def make(**more: Any) -> Any:
        import keras

        return getattr(keras.optimizers, kind)(**options, **more)

    return make


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": _of("SGD", learning_rate=0.5),
    "momentum": _of("SGD", learning_rate=0.3, momentum=0.9, nesterov=True),
    "adam": _of("Adam", learning_rate=0.05, epsilon=1e-3),
    "accumulate": _of("SGD", learning_rate=0.5, gradient_accumulation_steps=2),
    "clipnorm": _of("SGD", learning_rate=0.5, clipnorm=0.02),
    "global_clipnorm": _of("SGD", learning_rate=0.5, global_clipnorm=0.03),
    "clipvalue": _of("SGD", learning_rate=0.5, clipvalue=0.01),
    "ema": _of("SGD", learning_rate=0.5, use_ema=True, ema_momentum=0.5,
               ema_overwrite_frequency=2),
    "weight_decay": _of("AdamW", learning_rate=0.05, epsilon=1e-3, weight_decay=0.05),
    "loss_scale": _loss_scaled,
    "schedule": _scheduled,
    "lion": _of("Lion", learning_rate=0.02),
    "adafactor": _of("Adafactor", learning_rate=0.1),
    "nadam": _of("Nadam", learning_rate=0.05, epsilon=1e-3),
    "ftrl": _of("Ftrl", learning_rate=0.3, l1_regularization_strength=1e-3),
    "rmsprop": _of("RMSprop", learning_rate=0.02, epsilon=1e-3, centered=True, momentum=0.5),
    "amsgrad": _of("Adam", learning_rate=0.05, epsilon=1e-3, amsgrad=True, clipnorm=0.02),
    "accumulate_adam": _of("AdamW", learning_rate=0.05, epsilon=1e-3, weight_decay=0.05,
                           gradient_accumulation_steps=3, global_clipnorm=0.03, use_ema=True),
    "muon": _of("Muon", learning_rate=0.02, epsilon=1e-3),
}  # fmt: skip
AVERAGING = ("ema", "accumulate_adam")
LINEAR = ("sgd", "momentum", "accumulate", "ema", "schedule")  # in the rows of a gradient
ACCUMULATING = ("accumulate", "accumulate_adam")

# ---- metrics ----


def _own_mean() -> Any:
    import keras
    from keras import ops

    class Root(keras.metrics.Metric):
        """Computed from sums."""

        def __init__(self) -> None:
            super().__init__(name="root")
            self.total = self.add_weight(initializer="zeros", name="total")
            self.count = self.add_weight(initializer="zeros", name="count")

        def update_state(self, y: Any, out: Any, sample_weight: Any = None) -> None:
            del sample_weight
            squares = ops.square(ops.cast(y, "float32") - out)
            self.total.assign(self.total + ops.sum(squares))
            self.count.assign(self.count + ops.sum(ops.ones_like(squares)))

        def result(self) -> Any:
            return ops.sqrt(self.total / self.count)

    return Root()


def _own_state() -> Any:
    import keras
    from keras import ops

    class Apart(keras.metrics.Metric):
        """Returns its variable."""

        def __init__(self) -> None:
            super().__init__(name="apart")
            self.total = self.add_weight(initializer="zeros", name="total")

        def update_state(self, y: Any, out: Any, sample_weight: Any = None) -> None:
            del sample_weight
            self.total.assign_add(ops.sum(ops.abs(ops.cast(y, "float32") - out)))

        def result(self) -> Any:
            return ops.convert_to_tensor(self.total)

    return Apart()


def _sum_of_distances() -> Any:
    """Keras' own Sum takes values, not targets and outputs."""
    import keras
    from keras import ops

    class Distances(keras.metrics.Sum):
        state_is_sum = True  # says so to farandole

        def update_state(self, y: Any, out: Any, sample_weight: Any = None) -> None:
            super().update_state(ops.abs(ops.cast(y, "float32") - out), sample_weight)

    return Distances(name="sum")


def _dice(y: Any, out: Any) -> Any:
    """One number of the batch that is no mean over samples."""
    from keras import ops

    y = ops.cast(y, "float32")
    return 2 * ops.sum(y * out) / (ops.sum(y) + ops.sum(out) + 1.0)


def _largest() -> Any:
    import keras
    from keras import ops

    class Largest(keras.metrics.Metric):
        """Its state is no sum."""

        def __init__(self) -> None:
            super().__init__(name="largest")
            self.largest = self.add_weight(initializer="zeros", name="largest")

        def update_state(self, y: Any, out: Any, sample_weight: Any = None) -> None:
            del sample_weight
            apart = ops.max(ops.abs(ops.cast(y, "float32") - out))
            self.largest.assign(ops.maximum(self.largest, apart))

        def result(self) -> Any:
            return ops.convert_to_tensor(self.largest)

    return Largest()


def _of_first_column(kind: str, **options: Any) -> Callable[[], Any]:
    """A metric of class numbers, which are in the first column."""

    def make() -> Any:
        import keras

        class Sparse(getattr(keras.metrics, kind)):  # type: ignore[misc]
            def update_state(self, y: Any, out: Any, sample_weight: Any = None) -> None:
                super().update_state(y[:, :1], out, sample_weight)

        return Sparse(name="sparse", **options)

    return make


def _of_function() -> Any:
    import keras

    return keras.metrics.MeanMetricWrapper(_each, name="function")


def _metric(kind: str, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        import keras

        return getattr(keras.metrics, kind)(**options)

    return make


PLAIN = (  # metrics of Keras that need no arguments
    "BinaryCrossentropy", "CategoricalHinge", "ConcordanceCorrelation", "CosineSimilarity",
    "FalseNegatives", "FalsePositives", "Hinge", "KLDivergence", "LogCoshError",
    "MeanAbsolutePercentageError", "MeanSquaredLogarithmicError", "PearsonCorrelation", "Poisson",
    "Recall", "RootMeanSquaredError", "SquaredHinge", "TrueNegatives",
)  # fmt: skip
CLASSES: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in PLAIN},
    "Accuracy": {}, "MeanIoU": {"num_classes": 2},
    "BinaryIoU": {"target_class_ids": [0, 1]}, "IoU": {"num_classes": 2, "target_class_ids": [0]},
    "PrecisionAtRecall": {"recall": 0.5}, "RecallAtPrecision": {"precision": 0.5},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
}  # fmt: skip
OF_TWO_COLUMNS: dict[str, dict[str, Any]] = {  # those that need a table of classes
    "CategoricalAccuracy": {}, "CategoricalCrossentropy": {},
    "F1Score": {"average": "macro"}, "FBetaScore": {"average": "macro"},
    "R2Score": {}, "TopKCategoricalAccuracy": {"k": 1}, "OneHotMeanIoU": {"num_classes": 2},
    "OneHotIoU": {"num_classes": 2, "target_class_ids": [1]},
}  # fmt: skip


METRICS: dict[str, tuple[str, Callable[[], Any]]] = {  # the key in logs, and what makes it
    "none": ("loss", lambda: None),
    "mean": ("mae", lambda: "mae"),
    "accuracy": ("accuracy", _metric("BinaryAccuracy", name="accuracy")),
    "weighted": ("mae", lambda: "mae"),
    "true_positives": ("hits", _metric("TruePositives", name="hits")),
    "precision": ("precision", _metric("Precision", name="precision")),
    "sum": ("sum", _sum_of_distances),
    "auc": ("auc", _metric("AUC", name="auc", num_thresholds=20)),
    "own_mean": ("root", _own_mean),
    "own_state": ("apart", _own_state),
    "dice": ("_dice", lambda: _dice),
    "largest": ("largest", _largest),
    "function": ("function", _of_function),
    "half": ("half", _metric("MeanAbsoluteError", name="half", dtype="float16")),
    "sparse": ("sparse", _of_first_column("SparseCategoricalAccuracy")),
    "sparse_top": ("sparse", _of_first_column("SparseTopKCategoricalAccuracy", k=1)),
    "sparse_entropy": ("sparse", _of_first_column("SparseCategoricalCrossentropy")),
} | {
    kind: (kind.lower(), _metric(kind, name=kind.lower(), **options))
    for kind, options in (CLASSES | OF_TWO_COLUMNS).items()
}
SPARSE = ("sparse", "sparse_top", "sparse_entropy")
SMOOTH = ("none", "mean", "weighted", "sum", "own_mean", "own_state", "function", "largest")
OF_ITS_STATE = ("true_positives", "sum", "own_state")

# ---- data ----

TAILS = {"even": 0, "short": 6, "uneven": 7, "one": 1}  # samples of an epoch's last batch


def samples(program: Program) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Inputs, targets and weights of an epoch's samples."""
    parts = [programs.batch(number) for number in range(BATCHES + 1)]
    count = BATCHES * BATCH + TAILS[program["batches"]]
    x = np.concatenate([each for each, _ in parts])[:count]
    y = (np.concatenate([each for _, each in parts])[:count] > 0.9).astype(np.float32)
    if program["model"] == "masked":
        x[::3, 2:] = 0
        y = y[..., None]
    if overflows(program):
        x[BATCH, 0] = np.inf  # its gradient is no number, on the rank that has it
    weights = (np.arange(1, count + 1) % 3).astype(np.float32) if has_weights(program) else None
    return x, y, weights


def overflows(program: Program) -> bool:
    return program["optimizer"] == "loss_scale" or program["precision"] == "mixed_float16"


def has_weights(program: Program) -> bool:
    return program["weights"] == "samples"


def held_out(program: Program) -> tuple[np.ndarray, np.ndarray]:
    x = np.concatenate([programs.batch(number)[0] for number in (20, 21)])[:HELD_OUT]
    y = (np.abs(x[:, :2]) > 0.7).astype(np.float32)
    return x, y[..., None] if program["model"] == "masked" else y


def targets(program: Program, y: np.ndarray) -> Any:
    return (y[:, :1], y[:, 1:]) if program["model"] == "outputs" else y
