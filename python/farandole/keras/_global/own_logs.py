"""Numbers that a step of the user's own returns of a part of a batch.

Keras shows those of the last batch. Each gets its part's weight, so that the mean over the ranks
(metrics.of_own_logs) is that of the batch. Results of the model's metrics stay, as they are after a
rank without samples has its metrics' states back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from farandole import _world
from farandole.keras._global.steps import Steps

Results = Callable[[], dict[str, Any]]  # of the model's metrics, as they are now


def is_own(model: Any, name: str) -> bool:
    """Whether the model's class has a step of its own."""
    return not getattr(type(model), name).__module__.startswith("keras.")


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
