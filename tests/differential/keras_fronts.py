"""Keras programs with fit(): by farandole.keras.Model and by DistributedOptimizer."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import keras_parts as parts
import keras_steps
import numpy as np
import programs
from keras_parts import BATCHES, EPOCHS
from programs import BATCH, Front, Program, Result

# ---- one program for all fronts ----


class Setting:
    """How a front trains. This one is Keras alone, with the whole batch."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.rank, self.size = 0, 1

    def scope(self) -> Any:
        """Where the model is made and compiled."""
        return nullcontext()

    def model(self) -> Any:
        make: Any = parts.MODELS[self.program["model"]]
        return make(self.program["touch"]) if self.program["model"] == "own_step" else make()

    def wrapped(self, model: Any) -> Any:
        return model

    def optimizer(self) -> Any:
        has = dict(self.program.values)
        more = {"gradient_accumulation_steps": 2} if has.get("options") == "passes" else {}
        return parts.OPTIMIZERS[has["optimizer"]](**more)

    def callbacks(self) -> list[Any]:
        return []

    def rows(self, count: int) -> np.ndarray:
        """Numbers of the samples that fit() gets."""
        return np.arange(count)

    def batch(self) -> int:
        return BATCH

    def told(self, logs: dict[str, list[float]]) -> dict[str, list[float]]:
        return logs

    def of_all_ranks(self, value: float) -> float:
        """The value over all ranks, for a number that no callback averages."""
        return value


class Global(Setting):
    def __init__(self, program: Program) -> None:
        import farandole.keras as fd

        super().__init__(program)
        self.fd, self.rank, self.size = fd, fd.rank(), fd.size()

    def wrapped(self, model: Any) -> Any:
        options: dict[str, Any] = {
            "none": {}, "logical": {"logical_ranks": 4}, "slice": {"data_policy": "slice"},
            "groups": {"num_groups": 2}, "predivide": {"gradient_predivide_factor": 2.0},
            "leader": {"data_policy": "leader"},
        }[self.program["options"]]  # fmt: skip
        if self.program["model"] == "batch_norm":
            options["sync_batch_norm"] = True
        return self.fd.Model(model, **options)


class Horovod(Setting):
    """Each rank has its rows of every batch."""

    def __init__(self, program: Program) -> None:
        import farandole.keras as hvd

        super().__init__(program)
        self.hvd, self.rank, self.size = hvd, hvd.rank(), hvd.size()
        self.sums = program["loss"] == "sum"

    def optimizer(self) -> Any:
        options: dict[str, Any] = {
            "none": {}, "groups": {"num_groups": 2},
            "predivide": {"gradient_predivide_factor": 2.0},
            "passes": {"backward_passes_per_step": 2, "average_aggregated_gradients": True},
        }[self.program["options"]]  # fmt: skip
        if self.sums:
            options["op"] = self.hvd.Sum
        optimizer = parts.OPTIMIZERS[self.program["optimizer"]]()
        return self.hvd.DistributedOptimizer(optimizer, **options)

    def callbacks(self) -> list[Any]:
        called = self.hvd.callbacks
        return [called.BroadcastGlobalVariablesCallback(0), called.MetricAverageCallback()]

    def rows(self, count: int) -> np.ndarray:
        return np.concatenate([
            np.arange(first, min(first + BATCH, count))[
                programs.rows_of(self.rank, self.size, min(BATCH, count - first))
            ]
            for first in range(0, count, BATCH)
        ])  # fmt: skip

    def batch(self) -> int:
        return BATCH // self.size

    def told(self, logs: dict[str, list[float]]) -> dict[str, list[float]]:
        factor = self.size if self.sums else 1
        sums = [k for k in logs if "loss" in k or k == "own"]
        return logs | {k: [v * factor for v in logs[k]] for k in sums}

    def of_all_ranks(self, value: float) -> float:
        return float(self.hvd.allreduce(np.float64(value), op=self.hvd.Average))


def callbacks(program: Program, folder: str) -> list[Any]:
    import keras

    key = parts.METRICS[program["metrics"]][0]
    if program["model"] == "outputs" and key != "loss":
        key = f"left_{key}"
    made: dict[str, Callable[[], list[Any]]] = {
        "none": list,
        "plateau": lambda: [keras.callbacks.ReduceLROnPlateau(
            monitor=key, mode="max", factor=0.25, patience=1, min_delta=0)],
        "stopping": lambda: [keras.callbacks.EarlyStopping(
            monitor=key, mode="max", patience=1, restore_best_weights=True)],
        "schedule": lambda: [keras.callbacks.LearningRateScheduler(
            lambda epoch: 0.2 / (1 + epoch))],
        "batches": lambda: [_follows_batches()],
        "checkpoint": lambda: [keras.callbacks.ModelCheckpoint(
            folder + BEST, monitor=key, mode="max", save_best_only=True, save_weights_only=True)],
        "swap_ema": lambda: [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)],
        "terminate": lambda: [keras.callbacks.TerminateOnNaN()],
        "function": lambda: [_function("on_epoch_end")],
        "function_of_batches": lambda: [_function("on_train_batch_end")],
    }  # fmt: skip
    return made[program["callbacks"]]()


BEST = "/best.weights.h5"


def _function(when: str) -> Any:
    """Sets the rate by the loss that it reads. On JAX only a callback's own `model` is one that has
    what has been trained."""
    import keras

    def follow(_: int, logs: Any) -> None:
        made.model.optimizer.learning_rate = 0.2 * min(abs(float(logs["loss"])), 1.0)

    made = keras.callbacks.LambdaCallback(**{when: follow})
    return made


def _follows_batches() -> Any:
    """Sets the rate by the results after each batch."""
    import keras

    class Follows(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            del batch
            told = float(np.mean(logs[min(logs)]))
            self.model.optimizer.learning_rate = 0.2 * min(abs(told), 1.0)

    return Follows()


def how_it_runs(program: Program) -> dict[str, Any]:
    import keras

    plain = {"jit_compile": False} if keras.backend.backend() == "tensorflow" else {}
    return {
        "plain": plain, "eager": {"run_eagerly": True}, "jit": {"jit_compile": True},
        "several": {**plain, "steps_per_execution": 2},
    }[program["run"]]  # fmt: skip


def compiled(setting: Setting, model: Any) -> None:
    program = setting.program
    options = how_it_runs(program)
    if program["model"] in parts.TWO_OPTIMIZERS:
        model.compile(setting.optimizer(), second=setting.optimizer(), **options)
        return
    count = 2 if program["model"] == "outputs" else 1
    losses = [parts.LOSSES[program["loss"]]() for _ in range(count)]
    metric = parts.METRICS[program["metrics"]][1]
    metrics = [[metric()] for _ in range(count)] if program["metrics"] != "none" else None
    if metrics is not None:
        kind = "weighted_metrics" if program["metrics"] == "weighted" else "metrics"
        options[kind] = metrics if count > 1 else metrics[0]
    if count > 1:
        options["loss_weights"] = [1.0, 0.5]
    model.compile(setting.optimizer(), loss=losses if count > 1 else losses[0], **options)


def data_of(setting: Setting) -> dict[str, Any]:
    """Arguments of fit()."""
    program = setting.program
    x, y, weights = parts.samples(program)
    rows = setting.rows(len(x))
    given = [x[rows], parts.targets(program, y[rows])]
    if weights is not None:
        given.append(weights[rows])
    steps = {"steps_per_epoch": BATCHES - 1} if program["data"] in ("steps", "repeat") else {}
    if program["data"] in ("arrays", "steps"):
        names = ("x", "y", "sample_weight")
        return dict(zip(names, given, strict=False)) | {"batch_size": setting.batch()} | steps
    return {"x": SOURCES[program["data"]](tuple(given), setting.batch(), program)} | steps


def _dataset(given: Any, batch: int, _: Program) -> Any:
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(given).batch(batch)


def _remainder(given: Any, batch: int, _: Program) -> Any:
    """What does not make a whole batch is left out."""
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(given).batch(batch, drop_remainder=True)


def _padded(given: Any, batch: int, program: Program) -> Any:
    """Rows of some lengths, with zeros behind them."""
    import tensorflow as tf

    width = None if program["model"] == "lengths" else programs.WIDTH

    def cut(x: Any, *others: Any) -> Any:
        length = tf.cast(tf.abs(x[0]) * 10, tf.int32) % 3
        return (x[: programs.WIDTH - length], *others)

    cut_short = tf.data.Dataset.from_tensor_slices(given).map(cut)
    shapes = tf.nest.map_structure(lambda spec: spec.shape, cut_short.element_spec)
    return cut_short.padded_batch(batch, ([width], *shapes[1:]))


def _sequence(given: Any, batch: int, _: Program) -> Any:
    import keras

    cut = [_each(given, lambda a, i=i: a[i : i + batch]) for i in range(0, len(given[0]), batch)]

    class Batches(keras.utils.PyDataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return len(cut)

        def __getitem__(self, number: int) -> Any:
            return cut[number]

    return Batches()


def _each(given: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(given, tuple):
        return tuple(_each(one, change) for one in given)
    return change(given)


SOURCES = {
    "dataset": _dataset, "sequence": _sequence, "remainder": _remainder, "padded": _padded,
    "repeat": lambda *arguments: _dataset(*arguments).repeat(),
}  # fmt: skip


def weights_of(model: Any) -> dict[str, np.ndarray]:
    from keras import ops

    return {f"{i}.{w.name}": np.array(ops.convert_to_numpy(w)) for i, w in enumerate(model.weights)
            if w.dtype in ("float32", "float64")}  # fmt: skip


@contextmanager
def begun(program: Program, rank: int) -> Iterator[None]:
    """In it nothing is left of programs before. All ranks must begin with rank 0's weights."""
    import keras

    keras.backend.clear_session()
    keras.utils.set_random_seed(rank)
    keras.config.set_dtype_policy(program["precision"])
    try:
        yield
    finally:
        keras.config.set_dtype_policy("float32")


def train(setting: Setting) -> Result:
    with begun(setting.program, setting.rank):
        return _trained(setting)


def _trained(setting: Setting) -> Result:
    from keras import ops

    program = setting.program
    with setting.scope():
        inner = setting.model()
        model = setting.wrapped(inner)
        before = weights_of(inner)
        compiled(setting, model)
    told = fitted(setting, model, range(1 if program["midway"] != "nothing" else EPOCHS))
    if program["midway"] != "nothing":
        told += MIDWAY[program["midway"]](setting, model, inner) or []
        told += fitted(setting, model, range(1, EPOCHS))
    if program["model"] not in parts.TWO_OPTIMIZERS:
        told += _evaluated(setting, model, inner)
    told.append(float(ops.convert_to_numpy(model.optimizer.learning_rate)))
    after = weights_of(inner)
    return Result(before or {n: v * 0 for n, v in after.items()}, after,
                  [each if math.isfinite(each) else -1.0 for each in told])  # fmt: skip


def fitted(setting: Setting, model: Any, epochs: range, more: Sequence[Any] = ()) -> list[float]:
    """The logs of fit() for these epochs, as one list."""
    program = setting.program
    chosen = {"class_weight": {0: 1.0, 1: 3.0}} if program["weights"] == "classes" else {}
    with tempfile.TemporaryDirectory() as folder:
        own = callbacks(program, folder)
        history = model.fit(
            **data_of(setting), **chosen, epochs=epochs.stop, initial_epoch=epochs.start,
            shuffle=False, verbose=0, callbacks=[*setting.callbacks(), *more, *own],
        )  # fmt: skip
        if program["callbacks"] == "checkpoint":
            model.load_weights(folder + BEST)
    logs = setting.told({k: [float(v) for v in vs] for k, vs in history.history.items()})
    return [value for key in sorted(logs) for value in logs[key]]


# ---- what programs do between two calls of fit() ----


def _evaluated(setting: Setting, model: Any, _: Any) -> list[float]:
    x, y = parts.held_out(setting.program)
    y = parts.targets(setting.program, y)
    scores = model.evaluate(x, y, batch_size=6, verbose=0, return_dict=True)
    return [float(scores[key]) for key in sorted(scores)]


def _predicted(setting: Setting, model: Any, _: Any) -> list[float]:
    x, _y = parts.held_out(setting.program)
    out = model.predict(x, batch_size=6, verbose=0)
    outs = out if isinstance(out, list) else [out]
    return [float(each) for one in outs for each in np.ravel(one)]


def _compiled_again(setting: Setting, model: Any, _: Any) -> None:
    with setting.scope():
        compiled(setting, model)


def _thawed(setting: Setting, model: Any, inner: Any) -> None:
    """As in fine-tuning: what was frozen is trained from now on, and what was trained is frozen."""
    first = next(each for each in inner._flatten_layers(include_self=False) if each.weights)
    first.trainable = not first.trainable
    _compiled_again(setting, model, inner)


def _slower(_: Setting, model: Any, __: Any) -> None:
    model.optimizer.learning_rate = 0.01


def _changed(_: Setting, __: Any, inner: Any) -> None:
    for variable in inner.trainable_variables:
        variable.assign(variable * 0.5)


def _loaded(setting: Setting, model: Any, inner: Any) -> None:
    """Weights of a file whose name the ranks have not agreed on."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_weights(f"{folder}/kept.weights.h5")
        _changed(setting, model, inner)
        model.load_weights(f"{folder}/kept.weights.h5")


def _set(_: Setting, model: Any, __: Any) -> None:
    model.set_weights([each * 0.5 if each.dtype == np.float32 else each
                       for each in model.get_weights()])  # fmt: skip


def _one_batch(setting: Setting, model: Any, _: Any) -> list[float]:
    x, y, weights = parts.samples(setting.program)
    rows = setting.rows(BATCH)
    y = parts.targets(setting.program, y[rows])
    own = None if weights is None else weights[rows]
    logs = model.train_on_batch(x[rows], y, sample_weight=own, return_dict=True)
    told = setting.told({k: [setting.of_all_ranks(float(v))] for k, v in sorted(logs.items())})
    return [value for key in sorted(told) for value in told[key]]


class _Interrupted(Exception):
    """As by a machine that is turned off."""


def _restored(setting: Setting, model: Any, inner: Any) -> list[float]:
    """fit() again, as after an interruption."""
    import keras

    class Interrupts(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            del logs
            if epoch == EPOCHS - 1:
                raise _Interrupted

    with tempfile.TemporaryDirectory() as folder:
        backup = keras.callbacks.BackupAndRestore(folder, delete_checkpoint=False)
        with suppress(_Interrupted):
            fitted(setting, model, range(1, EPOCHS), [backup, Interrupts()])
        _changed(setting, model, inner)
        backup = keras.callbacks.BackupAndRestore(folder)
        return fitted(setting, model, range(1, EPOCHS + 1), [backup])


MIDWAY: dict[str, Callable[[Setting, Any, Any], list[float] | None]] = {
    "evaluate": _evaluated, "predict": _predicted, "compile": _compiled_again, "thaw": _thawed,
    "rate": _slower, "assign": _changed, "load": _loaded, "set_weights": _set,
    "one_batch": _one_batch, "restore": _restored,
}  # fmt: skip


def by(kind: Callable[[Program], Setting]) -> Callable[[Program, bool], Result]:
    return lambda program, parallel: train((kind if parallel else Setting)(program))


# ---- the table ----

PRECISIONS = ["float32", "mixed_bfloat16", "mixed_float16", "float64"]
COLUMNS: dict[str, list[str]] = {
    "model": list(parts.MODELS),
    "precision": PRECISIONS,
    "loss": list(parts.LOSSES),
    "touch": list(keras_steps.TOUCHES),
    "weights": ["none", "samples", "classes"],
    "optimizer": list(parts.OPTIMIZERS),
    "batches": list(parts.TAILS),
    "metrics": list(parts.METRICS),
    "callbacks": [
        "none", "plateau", "stopping", "schedule", "batches", "checkpoint", "swap_ema",
        "terminate", "function", "function_of_batches",
    ],
    "run": ["plain", "eager", "jit", "several"],
    "data": ["arrays", "steps", *SOURCES],
    "midway": ["nothing", *MIDWAY],
}  # fmt: skip


GANS = f"model={','.join(parts.TWO_OPTIMIZERS)}"
TABLES = f"metrics={','.join(parts.OF_TWO_COLUMNS)}"


OVERFLOWS = ("optimizer=loss_scale", "precision=mixed_float16")
OF_OVERFLOWS = {
    "an infinity stays in statistics": [f"{each} model=batch_norm" for each in OVERFLOWS],
    "an infinity is no word": [f"{each} model=embedding" for each in OVERFLOWS],
    "Keras scales a loss once": ["optimizer=loss_scale precision=mixed_float16"],
}
# Keras on TensorFlow takes each time that a row was looked up for a row; farandole adds them up, so
# that squares and norms are those of a dense gradient (docs/keras.md).
OF_ROWS = {
    "Keras squares and clips the rows of a sparse gradient as often as they were looked up": [
        f"model=embedding optimizer!={','.join(parts.LINEAR)}",
    ],
}
ROUNDED = "precision=mixed_bfloat16,mixed_float16"
SETS_RATE = "plateau,schedule,batches,function,function_of_batches"
OF_LOSS = "batches,function,function_of_batches"


def left_out(backend: str) -> dict[str, list[str]]:
    """By reason the programs that Keras alone does not train."""
    found = {
        "only a step of its own sees gradients": ["touch!=nothing model!=own_step"],
        "its steps have losses of their own, and neither weights nor metrics": [
            f"{GANS} loss!=name", f"{GANS} weights!=none", f"{GANS} metrics!=none",
        ],
        "Keras does not evaluate without a loss": [f"{GANS} midway=evaluate"],
        "class_weight needs a single target of one axis": ["model=outputs,masked weights=classes"],
        "the metric compares classes, of two axes": [f"model=masked {TABLES}"],
        "Keras does not weigh one number by a mask": ["model=masked metrics=dice"],
        "the loss compares samples by one row each": ["model=masked loss=pairs"],
        "the loss takes a row for the probabilities of classes": [
            "model=masked,outputs loss=ignoring",
        ],
        "a rate that follows a schedule cannot be set": [
            f"optimizer=schedule callbacks={SETS_RATE}", "optimizer=schedule midway=rate",
        ],
        "only an optimizer with averages has weights to swap": [
            f"callbacks=swap_ema optimizer!={','.join(parts.AVERAGING)}",
        ],
        "nothing follows a loss that is no number": [
            f"{each} callbacks={OF_LOSS},checkpoint" for each in OVERFLOWS
        ],
        "its steps log no loss": [f"{GANS} callbacks={OF_LOSS},checkpoint"],
        "Keras scales the loss for its one optimizer": [f"{GANS} precision=mixed_float16"],
        "what is rounded may be on either side of a threshold": [
            f"{ROUNDED} metrics!={','.join(parts.SMOOTH)}", f"{ROUNDED} optimizer=lion,muon",
            f"{ROUNDED} touch=leave_out",
        ],
        # Ranks with as many samples have it alike, and nothing tells it from a number of steps.
        "a fault that stands, of a state that counts samples": ["model=seen"],
        # Its constants are computed again, which Keras' own set_weights() does not.
        "a fault that stands, of set_weights()": ["model=adapted midway=set_weights"],
        "the metric takes class numbers of one column": [
            f"model=masked,outputs metrics={','.join(parts.SPARSE)}",
        ],
    } | OF_OVERFLOWS  # fmt: skip
    if backend == "tensorflow":
        found |= OF_ROWS
        found["Keras adds losses to one number, not to many"] = [
            "loss=none model=add_loss,add_losses,tied",
        ]
        found["TensorFlow's recompute_grad() does not take these layers"] = ["model=remat"]
    else:
        found["only TensorFlow has gradients of losses that are not one number"] = ["loss=none"]
    if backend == "torch":
        found["Keras on PyTorch executes one step at a time"] = ["run=several"]
        found["torch.compile takes minutes"] = ["run=jit"]
    if backend == "jax":
        found["a metric has no state in call() under fit() on JAX"] = ["model=subclassed"]
        found["after an interruption Keras on JAX lacks averages"] = [
            f"midway=restore optimizer={','.join(parts.AVERAGING)}",
        ]
        found["JAX has float64 if a process says so before it begins"] = ["precision=float64"]
        found["a step on JAX is a function of states"] = [GANS]
    return found


def horovod_left_out(backend: str) -> dict[str, list[str]]:
    """Horovod averages the results of ranks, however each of them was computed."""
    return left_out(backend) | {
        "gradients are each rank's own until the optimizer has them": ["touch=clip,leave_out"],
        "it does not synchronize statistics": ["model=batch_norm"],
        "ranks with other masks, weights or samples have other divisors": [
            "model=masked", "loss=mean_with_sample_weight,ignoring", "batches=uneven,one",
            "model=add_losses",
        ],
        "a loss of each rank's samples has no pairs of others, and is one number": [
            "loss=pairs,none",
        ],
        "Keras multiplies a loss of one number by the mean of the rank's own weights": [
            f"loss={','.join(parts.OF_ONE_NUMBER)} weights!=none",
        ],
        "each rank sees its own batches": [
            "callbacks=batches,function_of_batches", "data=padded model=lengths",
        ],
        "a rank's loss is its part of a sum": ["loss=sum callbacks=function"],
        "Keras accumulates as many passes as either asks for": [
            f"options=passes optimizer={','.join(parts.ACCUMULATING)}",
        ],
        "the mean of a metric over ranks is that of a mean alone": [
            "metrics!=none,mean,accuracy",
        ],
        "every rank adds the terms that are no sums over samples": ["loss=sum model=tied,add_loss"],
    }  # fmt: skip


def begin() -> None:
    import farandole.keras as fd

    fd.init()


def _fronts(backend: str) -> dict[str, Front]:
    whole = {
        **COLUMNS, "options": ["none", "logical", "slice", "leader", "groups", "predivide"],
    }  # fmt: skip
    own = {**COLUMNS, "options": ["none", "groups", "predivide", "passes"]}
    keras = f"keras on {backend}"
    return {
        f"keras.model_{backend}": Front(keras, whole, begin, by(Global), left_out(backend)),
        f"keras.horovod_{backend}": Front(
            keras, own, begin, by(Horovod), horovod_left_out(backend)
        ),
    }


FRONTS = {
    name: front
    for backend in ("tensorflow", "torch", "jax")
    for name, front in _fronts(backend).items()
}
