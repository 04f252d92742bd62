"""What metrics are told in a step of a shared model, and which see the whole batch.

    update_state() is                             it gets              the state over ranks is
    Keras', of values for each sample             this rank's samples  the sum
    Keras', of a function that gives one number   that of all samples  the sum, by samples
    or that is known, or seen, to mix samples
    the user's own                                all ranks' samples   equal: any rank's
    the same, with `state_is_sum = True`          this rank's samples  the sum

A state of the user's own may be anything: the largest value, the last, a ratio. So such a metric is
told what one process would tell it, and so is a function that gives one number for all samples (a
Dice coefficient). Ranks send each other targets and outputs for that, as with losses of one number.
A rank without samples takes part, and keeps what the metric then knows.

Of numbers of a batch that Keras' Mean and Sum are told each rank tells that of its part. A mean
over samples weighs by the part's samples, a sum over samples is added up: which of the two a number
is follows from TensorFlow's graph (loss_kinds.py). Elsewhere it is taken for a mean, and a whole
number that Sum is told for a count, and rank 0 says so. Values for each sample, and what has a
weight, are as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, wraps
from types import FunctionType
from typing import Any

import keras

from farandole import _world
from farandole._core import InvalidArgument
from farandole.keras._global.loss_kinds import Kind
from farandole.keras._global.losses import GATHER
from farandole.keras._global.samples_apart import (
    DECLARED,
    FUNCTION,
    METRIC,
    is_mixing,
    is_seen_to_mix,
    left_as_it_was,
    needs_whole_batch,
)
from farandole.keras._global.saying import say_once
from farandole.keras._global.steps import Steps, running
from farandole.keras._global.sums import sum_over_ranks

_WRAPPED = "_farandole_whole"
_FRACTION = "_farandole_fraction"  # of what it is told, which it adds
_TRACKING = "_farandole_tracking"  # Keras tells it of losses
_OF_VALUES = (keras.metrics.Mean, keras.metrics.Sum)
_CHANGING = {"add_weight", "add_variable", "assign", "assign_add", "assign_sub", "Variable"}
_SENT = (
    "metric {} has an update_state() of its own: in each step ranks send each other what it is "
    f"told, so that it sees the whole batch\n  advice: {DECLARED} = True in its class saves that, "
    "if its state is nothing but sums over samples"
)


def all_of(metrics: Any) -> list[Any]:
    """The metrics, and in place of a collection of Keras' those in it."""
    return [each for m in metrics for each in getattr(m, "metrics", None) or [m]]


def is_own(kind: type[Any]) -> bool:
    """Whether metrics of this class are told samples by a method of the user's, and their state may
    be no sum: it does not say so, and the method is not one that only prepares what Keras' own adds
    up."""
    if _is_of_keras(kind.update_state) or getattr(kind, DECLARED, False):
        return False
    return not _only_prepares(kind)


def _only_prepares(kind: Any) -> bool:
    """Whether it derives from a metric of Keras' that has an update_state() of targets and outputs,
    adds no variable, and calls that. What Mean and Sum are told may be one number of the batch."""
    if issubclass(kind, _OF_VALUES) and not issubclass(kind, keras.metrics.MeanMetricWrapper):
        return False
    theirs = [each for each in kind.__mro__ if not each.__module__.startswith("keras.")]
    metrics = [each for each in kind.__mro__ if issubclass(each, keras.metrics.Metric)]
    adds_up = any(
        "update_state" in vars(each)
        for each in metrics
        if each not in theirs and each is not keras.metrics.Metric
    )
    codes = [
        f.__code__ for each in theirs for f in vars(each).values() if isinstance(f, FunctionType)
    ]
    names = {name for code in codes for name in code.co_names}
    calls = getattr(kind.update_state, "__code__", None)
    by_super = calls is not None and {"update_state", "super"} <= set(calls.co_names)
    return adds_up and by_super and not names & _CHANGING


def _is_of_keras(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith("keras.")


def whole_states(model: Any) -> list[Any]:
    """The variables of metrics that all ranks have told the whole batches."""
    known = {id(v): v for m in all_of(model.metrics) if _WRAPPED in vars(m) for v in m.variables}
    return list(known.values())


def tell_whole_batches(model: Any, steps: Steps) -> list[Any]:
    """Has the user's own metrics see whole batches; returns those that did not before.

    Raises:
        InvalidArgument: with logical ranks, which do not have whole batches.
    """
    if _world.size() == 1 and steps.block is None:
        return []
    trackers = [getattr(model, "_loss_tracker", None), *_metrics_of(model._compile_loss)]
    for metric in trackers:
        if metric is not None:
            setattr(metric, _TRACKING, True)
    own = [(i, m) for i, m in enumerate(all_of(model.metrics)) if is_own(type(m))]
    new = [(i, m) for i, m in own if _WRAPPED not in vars(m)]
    for i, metric in new:
        name = type(metric).__name__
        if steps.block is not None:
            raise needs_whole_batch(METRIC, name, steps.block)
        metric.update_state = _of_whole_batches(metric, steps, f"batch of metric {i} {name}")
        setattr(metric, _WRAPPED, True)
        say_once(_SENT.format(name))
    return [metric for _, metric in new]


def _metrics_of(compile_loss: Any) -> list[Any]:
    return [] if compile_loss is None else list(compile_loss.metrics)


def _of_whole_batches(metric: Any, steps: Steps, label: str) -> Callable[..., Any]:
    own = type(metric).update_state.__get__(metric)

    @wraps(own)
    def update_state(*args: Any, **kwargs: Any) -> Any:
        if steps.share is None:
            return own(*args, **kwargs)
        with _after_last_update(metric):
            args, kwargs = _of_all_ranks((args, kwargs), metric, steps, label)
        with _not_sharing(steps):
            return own(*args, **kwargs)

    return update_state


@contextmanager
def _not_sharing(steps: Steps) -> Iterator[None]:
    """In it what metrics are told is of the whole batch."""
    share, steps.share = steps.share, None
    try:
        yield
    finally:
        steps.share = share


def _after_last_update(metric: Any) -> AbstractContextManager[Any]:
    """Keeps what a graph sends for a metric in order."""
    if keras.backend.backend() != "tensorflow":
        return nullcontext()
    import tensorflow as tf

    last = [tf.identity(v.value) for v in metric.variables]
    ordered: AbstractContextManager[Any] = tf.control_dependencies(last)
    return ordered


def _of_all_ranks(tree: Any, metric: Any, steps: Steps, label: str) -> Any:
    """Collective: rows of all ranks in the place of this rank's rows; numbers of the whole batch in
    the place of those of parts."""
    from keras.src.backend import get_keras_mask, set_keras_mask

    flat = keras.tree.flatten(tree)
    masks = {i: mask for i, each in enumerate(flat) if (mask := get_keras_mask(each)) is not None}
    rows = [i for i, each in enumerate(flat) if not _is_number(each) and hasattr(each, "shape")]
    for i in rows:
        if not steps.covers(flat[i]):
            raise InvalidArgument(
                f"metric {type(metric).__name__}: update_state() is told an array of shape "
                f"{tuple(flat[i].shape)}, which is not one of samples, so the ranks' cannot be put "
                f"together\n  advice: tell it samples, or say {DECLARED} = True in its class if "
                "its state is sums over samples"
            )
    sent = [_sendable(each, metric) for each in (*(flat[i] for i in rows), *masks.values())]
    whole = GATHER[keras.backend.backend()]([], sent, steps, label)[1] if sent else []
    numbers = [i for i, each in enumerate(flat) if _is_number(each)]
    for i in numbers:
        flat[i] = _number_of_all(flat[i], metric, steps, f"{label}, number {i}")
    for i, each in zip(rows, whole, strict=False):
        flat[i] = each
    for i, mask in zip(masks, whole[len(rows) :], strict=True):
        set_keras_mask(flat[i], mask)
    return keras.tree.pack_sequence_as(tree, flat)


def _sendable(value: Any, metric: Any) -> Any:
    tensor = keras.ops.stop_gradient(keras.ops.convert_to_tensor(value))
    if "string" in str(tensor.dtype):
        raise InvalidArgument(
            f"metric {type(metric).__name__}: update_state() is told texts, which ranks cannot "
            f"send each other\n  advice: tell it numbers, or say {DECLARED} = True in its class if "
            "its state is sums over samples"
        )
    return tensor


def _number_of_all(value: Any, metric: Any, steps: Steps, label: str) -> Any:
    weight = _part_of_batch(steps)
    factor = 1.0 if _kind_told(value, metric, steps) is Kind.SUM else weight
    mine = keras.ops.cast(value, "float32") * factor
    mine = keras.ops.where(weight > 0, mine, keras.ops.zeros_like(mine))
    whole = sum_over_ranks(keras.ops.stop_gradient(mine), label)
    return whole if not hasattr(value, "dtype") else keras.ops.cast(whole, value.dtype)


# ---- functions ----


@cache
def learn() -> None:
    """From now on, in a step of a shared model, functions that give one number for all samples are
    given all of them, and numbers count by samples."""
    _learn_numbers()
    wrapper = keras.metrics.MeanMetricWrapper
    own = wrapper.update_state

    @wraps(own)
    def update_state(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        steps = _sharing()
        if steps is None:
            return own(self, y_true, y_pred, sample_weight)
        alone = _world.size() == 1 and steps.block is None
        with steps.not_telling_of_losses():  # the function may be one
            if alone or not needs_others(self, y_true, y_pred):
                return own(self, y_true, y_pred, sample_weight)
        if steps.block is not None:
            raise needs_whole_batch(FUNCTION, self.name, steps.block)
        label = f"batch of metric function {self.name}"
        is_one = sample_weight is None or _is_number(sample_weight)
        rows = (y_true, y_pred) if is_one else (y_true, y_pred, sample_weight)
        with _after_last_update(self):
            y_true, y_pred, *weights = _of_all_ranks(rows, self, steps, label)
        (sample_weight,) = weights or [sample_weight]
        # Each rank adds its fraction of what one process adds.
        vars(self)[_FRACTION] = _part_of_batch(steps)
        try:
            with _not_sharing(steps):
                return own(self, y_true, y_pred, sample_weight)
        finally:
            del vars(self)[_FRACTION]

    wrapper.update_state = update_state


def needs_others(metric: Any, y_true: Any, y_pred: Any) -> bool:
    """Whether the function gives anything but a value for each sample, or is known to mix them. All
    ranks find the same, however many samples they have."""
    fn = metric._fn
    if isinstance(fn, FunctionType) and _is_of_keras(fn):
        return is_mixing(fn.__name__, metric._fn_kwargs, y_pred)
    known = vars(metric).get("_farandole_few")
    if known is None:
        with left_as_it_was(metric, fn):
            shape = _shape_of_values(metric, y_true, y_pred)
            few = not shape or shape[0] is not None
            known = few or is_seen_to_mix(metric, y_true, y_pred)
        metric._farandole_few = known
    return bool(known)


def _shape_of_values(metric: Any, y_true: Any, y_pred: Any) -> Any:
    """The first dimension is None where it follows the number of samples, if that can be told."""
    from keras.src.backend import compute_output_spec

    def any_number(tensor: Any) -> Any:
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        return keras.KerasTensor((None, *tensor.shape[1:]), dtype)

    def values(y_true: Any, y_pred: Any) -> Any:
        return keras.ops.convert_to_tensor(metric._fn(y_true, y_pred, **metric._fn_kwargs))

    try:
        symbols = keras.tree.map_structure(any_number, (y_true, y_pred))
        return compute_output_spec(values, *symbols).shape
    except Exception:  # a function that needs values
        return () if len(values(y_true, y_pred).shape) == 0 else (None,)


# ---- numbers ----


def _sharing() -> Steps | None:
    """Returns the steps of the step that runs, if its batch has a share."""
    steps = running()
    return steps if steps is not None and steps.share is not None else None


def _part_of_batch(steps: Steps) -> Any:
    """Returns the fraction of the batch's samples that this rank has."""
    return steps.share[0, 0] / steps.share[0, 1]


def _is_number(value: Any) -> bool:
    if isinstance(value, float | int):
        return not isinstance(value, bool)
    return len(getattr(value, "shape", (0,))) == 0


_TOLD_OF: set[type] = set()


def _kind_told(value: Any, metric: Any, steps: Steps) -> Kind:
    """Tells whether a number of a part is a mean or a sum over its samples, and says so if that is
    not known."""
    kind = steps.kind_of([value])
    # A variable is alike on all ranks.
    if kind is not None or isinstance(value, keras.Variable) or _TRACKING in vars(metric):
        return kind or Kind.MEAN
    # Mean takes each number for one of a batch.
    is_sum = _is_whole(value) and not isinstance(metric, keras.metrics.Mean)
    taken = Kind.SUM if is_sum else Kind.MEAN
    if type(metric) in _TOLD_OF:
        return taken
    _TOLD_OF.add(type(metric))  # a program may have many of a kind
    say_once(
        f"metric {metric.name} ({type(metric).__name__}) is told one number of a batch, and "
        "whether that is a mean or a sum over samples, or neither, is not known: it is taken for "
        f"{taken.value}\n"
        "  advice: tell the metric a value for each sample; or a class with an update_state() of "
        "its own, which is told targets and outputs, and sees the whole batch"
    )
    return taken


def _is_whole(value: Any) -> bool:
    if isinstance(value, float | int):
        return isinstance(value, int)
    return not keras.backend.is_float_dtype(keras.backend.standardize_dtype(value.dtype))


def _learn_numbers() -> None:
    own_mean, own_sum = keras.metrics.Mean.update_state, keras.metrics.Sum.update_state

    @wraps(own_mean)
    def update_mean(self: Any, values: Any, sample_weight: Any = None) -> Any:
        steps, fraction = _sharing(), vars(self).get(_FRACTION)
        if fraction is not None:
            ones = keras.ops.ones_like(values) if sample_weight is None else sample_weight
            sample_weight = keras.ops.convert_to_tensor(ones, dtype=self.dtype) * fraction
        if steps is not None and sample_weight is None and _is_number(values):
            sample_weight = _part_of_batch(steps)
            if _kind_told(values, self, steps) is Kind.SUM:
                # It is to be divided by the one batch alone.
                fraction = keras.ops.where(sample_weight > 0, sample_weight, 1.0)
                values = values / keras.ops.cast(fraction, values.dtype)
        return own_mean(self, values, sample_weight=sample_weight)

    @wraps(own_sum)
    def update_sum(self: Any, values: Any, sample_weight: Any = None) -> Any:
        steps = _sharing()
        plain = steps is not None and sample_weight is None and _is_number(values)
        if steps is not None and plain and _kind_told(values, self, steps) is Kind.MEAN:
            sample_weight = _part_of_batch(steps)
        return own_sum(self, values, sample_weight=sample_weight)

    keras.metrics.Mean.update_state, keras.metrics.Sum.update_state = update_mean, update_sum
