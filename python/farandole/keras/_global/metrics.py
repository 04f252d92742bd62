"""Metrics of all ranks' samples.

A state of Keras' metrics is sums (a total and a count, the four cells of a table): added up over
the ranks it is that of one process that has seen all samples. So AUC, Precision and weighted means
are exact, which a mean of the ranks' results is not. Metrics of the user's own have seen all
samples on every rank (whole_metrics.py).

Numbers that a step of the user's own returns are of a part of a batch; Keras shows those of the
last one. Each gets its part's weight, so that the mean over the ranks is that of the batch. Results
of the model's metrics stay, as they are after a rank without samples has its metrics' states back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from farandole import _world
from farandole.keras import _host
from farandole.keras._accumulated import besides
from farandole.keras._global.steps import Steps
from farandole.keras._global.whole_metrics import whole_states


def with_global_state(model: Any, compute: Callable[[], Any]) -> Any:
    """Collective: what `compute` makes of the model's metrics, as their state is over all ranks.
    After it they have this rank's own again, to go on with: what `compute` gives is not to be a
    view of them."""
    share_whole_states(model)
    variables = besides(model.metrics_variables, whole_states(model))
    if not variables or _world.size() == 1:
        return compute()
    with summed(variables, lambda flat: _host.all_reduce(flat, "sum", "metrics")):
        return compute()


@contextmanager
def summed(
    variables: Iterable[Any], sum_of: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]
) -> Iterator[None]:
    """Collective: a context in which variables have the sums of all ranks' values."""
    ours = _unique(variables)
    own = [keras.ops.convert_to_numpy(v) for v in ours]
    whole = sum_of(np.concatenate([value.astype(np.float64).ravel() for value in own]))
    ends = np.cumsum([value.size for value in own])[:-1]
    for variable, value, part in zip(ours, own, np.split(whole, ends), strict=True):
        variable.assign(part.reshape(value.shape).astype(value.dtype))
    try:
        yield
    finally:
        for variable, value in zip(ours, own, strict=True):
            variable.assign(value)


def share_whole_states(model: Any) -> None:
    """Collective: states that are equal on all ranks have the same bits, too."""
    for i, variable in enumerate(whole_states(model)):
        value = keras.ops.convert_to_numpy(variable)
        variable.assign(_host.broadcast(value, 0, f"metrics of whole batches, {i}"))


def values_of(results: Any) -> Any:
    """As they are now: a metric's result may be its state itself, which changes."""

    def value(result: Any) -> Any:
        return keras.ops.convert_to_tensor(np.array(keras.ops.convert_to_numpy(result)))

    return keras.tree.map_structure(value, results)


class Shown:
    """Results that are views of a metric's state, on PyTorch. In one process they go on changing
    until Keras shows them: after a validation, those of training are the validation's."""

    def __init__(self) -> None:
        self._last: dict[str, Any] = {}

    def show(self, results: dict[str, Any], values: dict[str, Any], model: Any) -> None:
        if keras.backend.backend() != "torch":
            return
        states = _unique(v for metric in model.metrics for v in metric.variables)
        places = {v.value.untyped_storage().data_ptr() for v in states}
        for name, result in results.items():
            storage = getattr(result, "untyped_storage", None)
            if storage is None or storage().data_ptr() not in places:
                continue
            last = self._last.get(name)
            if last is not None and last.shape == values[name].shape:
                last.copy_(values[name])
            self._last[name] = values[name]


def of_own_logs(logs: dict[str, Any], mine: dict[str, Any], joint: dict[str, Any]) -> Any:
    """Collective: what a training step of the user's own returns. The result of a metric of the
    model's is that of all ranks; other numbers become their mean over ranks.

    Args:
        mine: results of the model's metrics, of this rank.
        joint: of all ranks.
    """
    names = sorted(logs)
    values = [np.asarray(keras.ops.convert_to_numpy(logs[name]), np.float64) for name in names]
    are_results = [
        float(np.array_equal(keras.ops.convert_to_numpy(mine[name]), value.astype(np.float32)))
        if name in mine
        else 0.0
        for name, value in zip(names, values, strict=True)
    ]
    flat = np.concatenate([are_results, *(value.ravel() for value in values)])
    means = _host.all_reduce(flat, "mean", f"logs {', '.join(names)}")
    ends = np.cumsum([len(names), *(value.size for value in values)])[:-1]
    everywhere, *parts = np.split(means, ends)
    whole = [part.reshape(value.shape) for part, value in zip(parts, values, strict=True)]
    return {
        name: joint[name] if is_result == 1 else mean if mean.ndim else float(mean)
        for name, is_result, mean in zip(names, everywhere, whole, strict=True)
    }


def _unique(variables: Any) -> list[Any]:
    return list({id(v): v for v in variables}.values())


# ---- logs of a step of the user's own ----

Results = Callable[[], dict[str, Any]]  # of the model's metrics, as they are now


def has_own_step(model: Any, name: str) -> bool:
    """Whether the model's class has a step of its own."""
    return not getattr(type(model), name).__module__.startswith("keras.")


def makes_own_logs(model: Any, step: str) -> bool:
    """Whether they may have more than results of the model's metrics."""
    return has_own_step(model, step) or has_own_step(model, "compute_metrics")


def of_part(logs: Any, results: Results, steps: Steps) -> Results | None:
    """Called in the step; what it gives is called when the metrics have the state that stays. None:
    the logs are right as they are."""
    if not isinstance(logs, dict) or _world.size() == 1:
        return None
    weight = steps.weight("float32")
    if keras.backend.backend() == "torch" and float(weight) == 1.0:
        return None
    factors = {name: steps.factor_of(value) for name, value in logs.items()}
    known = results()
    are_results = {
        name: _equal(value, known[name]) for name, value in logs.items() if name in known
    }

    def weighed() -> dict[str, Any]:
        kept = results()
        ours = {name: _times(value, weight * factors[name]) for name, value in logs.items()}
        for name, is_result in are_results.items():
            if is_result is not None:
                ours[name] = keras.ops.where(is_result, kept[name], ours[name])
        return ours

    return weighed


def _equal(value: Any, result: Any) -> Any:
    """None where they cannot be: another shape."""
    value, result = (keras.ops.convert_to_tensor(each) for each in (value, result))
    if tuple(value.shape) != tuple(result.shape):
        return None
    return keras.ops.equal(value, keras.ops.cast(result, value.dtype))


def _times(value: Any, weight: Any) -> Any:
    """Also of a value that is no number, on a rank without samples."""
    product = keras.ops.stop_gradient(keras.ops.cast(value, "float32")) * weight
    return keras.ops.where(weight > 0, product, keras.ops.zeros_like(product))
