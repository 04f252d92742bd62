"""The losses and metrics of a compiled model in words, which ranks compare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from farandole._arguments import shown


def rows_of_compiled(model: Any) -> list[str]:
    """Losses and metrics as they were passed to compile(), or None."""
    loss = getattr(model, "_compile_loss", None)
    metrics = getattr(model, "_compile_metrics", None)
    weights = getattr(loss, "_user_loss_weights", None)
    weighted = getattr(metrics, "_user_weighted_metrics", None)
    return [
        f"loss {_named(getattr(loss, '_user_loss', None))}, loss_weights {shown(weights)}",
        f"metrics {_named(getattr(metrics, '_user_metrics', None))}, weighted_metrics "
        f"{_named(weighted)}",
    ]


def _named(given: Any) -> str:
    """Omits names that Keras numbers, since ranks may have made other models before."""
    if given is None or isinstance(given, str):
        return str(given)
    if isinstance(given, Mapping):
        return "{" + ", ".join(f"{key}: {_named(each)}" for key, each in given.items()) + "}"
    if isinstance(given, (list, tuple)):
        return "[" + ", ".join(map(_named, given)) + "]"
    reduction = getattr(given, "reduction", None)
    name = getattr(given, "__name__", type(given).__name__)
    return name if reduction is None else f"{name}(reduction={reduction!r})"
