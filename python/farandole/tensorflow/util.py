"""Horovod's small helpers for TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

__all__ = ["refs_to_vars", "vars_to_refs"]


def _executing_eagerly() -> bool:
    """Whether operations run as they are called."""
    return bool(tf.executing_eagerly())


def _make_subgraph(f: Any) -> Any:
    """The function as a graph."""
    return tf.function(f)


def _cache(f: Callable[..., Any]) -> Callable[..., Any]:
    """Remembers results by arguments, and by whether operations run as they are called."""
    known: dict[Any, Any] = {}

    def cached(*args: Any) -> Any:
        key = (args, _executing_eagerly())
        if key not in known:
            known[key] = f(*args)
        return known[key]

    return cached


def vars_to_refs(variables: Any) -> Any:
    """References to variables, which can be keys: of a list, or of one variable."""
    if isinstance(variables, tf.Variable):  # which calls itself iterable
        return variables.ref()
    if isinstance(variables, Iterable) and not isinstance(variables, str):
        return tuple(vars_to_refs(v) for v in variables)
    return variables


def refs_to_vars(refs: Any) -> Any:
    """The variables that ``vars_to_refs`` made these references of."""
    if isinstance(refs, (list, tuple)):
        return [refs_to_vars(r) for r in refs]
    return refs.deref() if hasattr(refs, "deref") else refs
