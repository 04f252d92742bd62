"""Variables from outside the scope, which replicas do not share: a replica that writes one is told.

TensorFlow's variables are taught so, once. Whole numbers may be written: counters and the states of
random generators are alike on all replicas, or each one's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops  # private, as is what is taught

from farandole import _world
from farandole.strategy._variables import is_ours, require_of

_WRITES = (
    "assign", "assign_add", "assign_sub", "scatter_add", "scatter_div", "scatter_max",
    "scatter_min", "scatter_mul", "scatter_nd_add", "scatter_nd_sub", "scatter_nd_update",
    "scatter_sub", "scatter_update",
)  # fmt: skip


@functools.cache
def learn() -> None:
    kind = resource_variable_ops.ResourceVariable
    for name in _WRITES:
        setattr(kind, name, _checked(getattr(kind, name)))


def _checked(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def write(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.dtype.is_floating and _world.size() > 1:
            _require_shared(self)
        return own(self, *args, **kwargs)

    write.autograph_info__ = {}  # type: ignore[attr-defined]  # AutoGraph calls it as it is
    return write


def _require_shared(variable: Any) -> None:
    """Raises InvalidArgument in a replica's context of ours, for a variable that is of no scope."""
    context = tf.distribute.get_replica_context()
    if context is None or not is_ours(context.strategy):
        return
    if not hasattr(variable.handle, "_distributed_container"):  # what a scope's variable is made of
        require_of(context.strategy, variable)
