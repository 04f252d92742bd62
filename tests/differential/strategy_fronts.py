"""Programs in a scope of farandole.strategy: Keras' fit(), and a loop with run().

The reference has TensorFlow's default strategy, so both run the same lines.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras_fronts
import keras_parts as parts
import keras_steps
import programs
from keras_parts import EPOCHS
from programs import BATCH, Front, Program, Result


def strategy_of(program: Program) -> Any:
    from farandole import strategy

    return getattr(strategy, program["strategy"])()


STRATEGIES = ["MirroredStrategy", "MultiWorkerMirroredStrategy", "CentralStorageStrategy"]

# ---- fit ----

STEPS: dict[str, Callable[[], Any]] = {
    "own_average": lambda: keras_steps.divided_step(parts.dense(), "batch"),
    "own_sum": lambda: keras_steps.divided_step(parts.dense(), "division"),
    "own_quotient": lambda: keras_steps.divided_step(parts.dense(), "mean"),
    "own_mean": lambda: keras_steps.divided_step(parts.dense(), "replicas"),
}


class Alone(keras_fronts.Setting):
    def model(self) -> Any:
        make = STEPS.get(self.program["model"])
        return make() if make else super().model()


class Scope(Alone):
    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.strategy = strategy_of(program)
        self.rank = _rank()

    def scope(self) -> Any:
        return self.strategy.scope()

    def model(self) -> Any:
        if self.program["model"] == "batch_norm":
            return parts.normal(synchronized=True)
        return super().model()


def _rank() -> int:
    import farandole

    return farandole.rank()


def fit(program: Program, parallel: bool) -> Result:
    return keras_fronts.train((Scope if parallel else Alone)(program))


OWN = f"model={','.join(STEPS)}"
FIT_LEFT_OUT = keras_fronts.left_out("tensorflow") | {
    "a step of its own has a loss of its own, and neither weights nor metrics": [
        f"{OWN} loss!=name", f"{OWN} weights!=none", f"{OWN} metrics!=none",
    ],
    "it does not scale its loss": [f"{OWN} optimizer=loss_scale"],
    "it logs nothing of that name": [f"{OWN} callbacks=plateau,stopping"],
    "a mean over each replica's samples, divided by the replicas, needs as many on each": [
        "model=own_mean batches=uneven,one",
    ],
}  # fmt: skip


# ---- a loop ----


def loop(program: Program, parallel: bool) -> Result:
    with keras_fronts.begun(program, _rank() if parallel else 0):
        return _looped(program, parallel)


def _looped(program: Program, parallel: bool) -> Result:
    import tensorflow as tf

    strategy = strategy_of(program) if parallel else tf.distribute.get_strategy()
    with strategy.scope():
        model = parts.MODELS[program["model"]]()
        if program["model"] == "batch_norm":
            model = parts.normal(synchronized=parallel)
        groups = groups_of(program, model)
        optimizers = [_optimizer(program) for _ in groups]
        for optimizer, variables in zip(optimizers, groups, strict=True):
            optimizer.build(variables)
        metric = METRICS[program["metrics"]]()
    before = keras_fronts.weights_of(model)
    step = step_of(program, model, list(zip(optimizers, groups, strict=True)), metric)
    batches = READERS[program["data"]](strategy, program)
    losses: list[float] = []
    one = RUNS[program["run"]](strategy, step)
    for _ in range(EPOCHS):
        losses += one(batches)
        if metric is not None:
            losses.append(float(metric.result()))
            metric.reset_state()
    losses += [float(optimizer.iterations) for optimizer in optimizers]
    return Result(before, keras_fronts.weights_of(model),
                  [each if math.isfinite(each) else -1.0 for each in losses])  # fmt: skip


def _optimizer(program: Program) -> Any:
    """Keras wraps it only in compile()."""
    import keras

    made = parts.OPTIMIZERS[program["optimizer"]]()
    scales = program["precision"] == "mixed_float16"
    return keras.optimizers.LossScaleOptimizer(made) if scales else made


def groups_of(program: Program, model: Any) -> list[list[Any]]:
    """The variables of each optimizer."""
    variables = list(model.trainable_variables)
    if program["groups"] == "two":
        return [variables[:1], variables[1:]]
    return [variables]


def loss_in_loop(program: Program, each: Any, weights: Any) -> Any:
    """The replica's share of the loss, from each sample's loss, as in TensorFlow's guide."""
    import tensorflow as tf

    kind = program["loss"]
    if kind == "average":
        return tf.nn.compute_average_loss(each, sample_weight=weights, global_batch_size=BATCH)
    each = each if weights is None else each * weights
    if kind == "sum":
        return tf.reduce_sum(each) / BATCH
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    return tf.reduce_mean(each) / replicas


def step_of(program: Program, model: Any, groups: list[Any], metric: Any) -> Any:
    import tensorflow as tf

    def step(batch: Any) -> Any:
        x, y = batch[:2]
        weights = batch[2] if len(batch) > 2 else None
        with tf.GradientTape() as tape:
            out = model(x, training=True)
            each = tf.reduce_mean(tf.square(y - out), -1)
            loss = loss_in_loop(program, each, weights)
            if model.losses:
                loss += tf.nn.scale_regularization_loss(tf.add_n(model.losses))
            scaled = groups[0][0].scale_loss(loss)
        gradients = tape.gradient(scaled, [v for _, variables in groups for v in variables])
        gradients = TOUCHES[program["touch"]](gradients)
        for optimizer, variables in groups:
            own, gradients = gradients[: len(variables)], gradients[len(variables) :]
            optimizer.apply_gradients(zip(own, variables, strict=True))
        if metric is not None:
            metric.update_state(y, out)
        return loss

    return step


def _clip_sum(gradients: Any) -> Any:
    """Clips the sum, which each replica then has a share of (docs/strategies.md)."""
    import tensorflow as tf

    context = tf.distribute.get_replica_context()
    clipped, _ = tf.clip_by_global_norm(context.all_reduce("SUM", gradients), 0.05)
    replicas = context.all_reduce("SUM", tf.constant(1.0))  # those with samples
    return [g / replicas for g in clipped]


TOUCHES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda gradients: gradients,
    "scale": lambda gradients: [g * 0.5 for g in gradients],
    "clip_sum": _clip_sum,
}


METRICS: dict[str, Callable[[], Any]] = {"none": lambda: None} | {
    name: parts.METRICS[name][1] for name in (
        "accuracy", "true_positives", "precision", "auc", "own_mean", "own_state", "sparse",
        "function")
}  # fmt: skip


def _distributed(kind: str) -> Callable[[Any, Program], Any]:
    def read(strategy: Any, program: Program) -> Any:
        given = tuple(each for each in parts.samples(program) if each is not None)
        dataset = keras_fronts.SOURCES[kind](given, BATCH, program)
        return strategy.experimental_distribute_dataset(dataset)

    return read


def _from_function(strategy: Any, program: Program) -> Any:
    """Each worker makes its own dataset, of its rows."""
    import tensorflow as tf

    def of_worker(context: Any) -> Any:
        rank, size = context.input_pipeline_id, context.num_input_pipelines
        given = tuple(each for each in parts.samples(program) if each is not None)
        count = len(given[0])
        rows = [
            range(count)[first : first + BATCH][
                programs.rows_of(rank, size, min(BATCH, count - first))
            ]
            for first in range(0, count, BATCH)
        ]
        whole = tuple(each[[n for part in rows for n in part]] for each in given)
        batch = context.get_per_replica_batch_size(BATCH)
        return tf.data.Dataset.from_tensor_slices(whole).batch(batch)

    return strategy.distribute_datasets_from_function(of_worker)


READERS = {
    "distributed": _distributed("dataset"), "from_function": _from_function,
    "remainder": _distributed("remainder"), "padded": _distributed("padded"),
}  # fmt: skip


def _summed(strategy: Any, step: Any) -> Any:
    return lambda batch: strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)


def _in_function(strategy: Any, step: Any) -> Any:
    import tensorflow as tf

    one = tf.function(_summed(strategy, step))
    return lambda batches: [float(one(batch)) for batch in batches]


def _eagerly(strategy: Any, step: Any) -> Any:
    one = _summed(strategy, step)
    return lambda batches: [float(one(batch)) for batch in batches]


def _run_of_function(strategy: Any, step: Any) -> Any:
    import tensorflow as tf

    one = _summed(strategy, tf.function(step))
    return lambda batches: [float(one(batch)) for batch in batches]


def _epoch_in_function(strategy: Any, step: Any) -> Any:
    import tensorflow as tf

    summed = _summed(strategy, step)

    @tf.function
    def epoch(batches: Any) -> Any:
        total = tf.constant(0.0)
        for batch in batches:
            total += summed(batch)
        return total

    return lambda batches: [float(epoch(batches))]


RUNS = {
    "function": _in_function, "eager": _eagerly, "run_of_function": _run_of_function,
    "epoch": _epoch_in_function,
}  # fmt: skip


LOOP_LEFT_OUT = {
    "a mean over each replica's samples needs as many on each": ["loss=mean batches=uneven,one"],
    "each worker's own dataset has batches of one size": ["data=from_function batches=uneven,one"],
    "replicas share such a loss equally, however many samples they have": [
        "model=add_loss batches=uneven,one",
    ],
    "Keras clips each replica's gradients by themselves": [
        "optimizer=clipnorm,global_clipnorm,clipvalue,amsgrad,accumulate_adam",
    ],
    "what is rounded may be on either side of a threshold": [
        f"{keras_fronts.ROUNDED} metrics=accuracy,true_positives,precision,auc,sparse",
        f"{keras_fronts.ROUNDED} optimizer=lion,muon",
    ],
    "the loss is scaled by one optimizer": [
        f"{each} groups=two" for each in keras_fronts.OVERFLOWS
    ],
    "gradients that are scaled cannot be clipped by their size": [
        f"{each} touch=clip_sum" for each in keras_fronts.OVERFLOWS
    ],
    # A replica without samples of a batch puts the states of its layers back.
    "a fault that stands, of a state that counts batches": ["model=counting batches=one"],
    "each replica counts its own samples": ["model=seen"],
    "a fault that stands, of a replica without rows of a length": [
        "model=lengths data=padded batches=one",
    ],
    "TensorFlow clips the rows of a sparse gradient as often as they were looked up": [
        "model=embedding touch=clip_sum",
    ],
    **keras_fronts.OF_OVERFLOWS,
    **keras_fronts.OF_ROWS,
}


FIT = {
    **keras_fronts.COLUMNS,
    "model": [*parts.MODELS, *STEPS],
    "strategy": STRATEGIES,
}
OF_LOOPS = (
    "dense", "tied", "frozen", "frozen_norm", "add_loss", "batch_norm", "counting", "seen", "conv",
    "embedding", "lstm", "gru", "attention", "group_norm", "spectral", "adapted", "shared", "lora",
    "lengths",
)  # fmt: skip
LOOP = {
    "model": list(OF_LOOPS),
    "precision": keras_fronts.PRECISIONS,
    "loss": ["average", "sum", "mean"],
    "weights": ["none", "samples"],
    "optimizer": list(parts.OPTIMIZERS),
    "groups": ["one", "two"],
    "touch": list(TOUCHES),
    "batches": list(parts.TAILS),
    "metrics": list(METRICS),
    "run": list(RUNS),
    "data": list(READERS),
    "strategy": STRATEGIES,
}

FRONTS = {
    "strategy.fit": Front("keras on tensorflow", FIT, keras_fronts.begin, fit, FIT_LEFT_OUT),
    "strategy.loop": Front("keras on tensorflow", LOOP, keras_fronts.begin, loop, LOOP_LEFT_OUT),
}
