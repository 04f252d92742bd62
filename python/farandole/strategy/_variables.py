"""Variables of a scope: TensorFlow's own, whose writes by a replica without samples do not stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import distribute_utils
from tensorflow.python.distribute import values as tf_values  # private, as is all of `extended`

from farandole._core import InvalidArgument

NONE, ON_READ = tf.VariableAggregation.NONE, tf.VariableSynchronization.ON_READ


def _written_by_one(own: Any, variable: Any, update: Any, value: Any, options: Any) -> Any:
    """A write that no other replica takes part in. Whole numbers count steps, not samples."""
    extended = variable.distribute_strategy.extended
    presence = extended.presence
    alike = presence.writes_alike or not variable.dtype.is_floating
    if presence.certain or alike or extended.inside_keras:
        return own(update, value, **options)
    local = variable._get_on_device_or_primary()
    before = tf.identity(local)
    result = own(update, value, **options)
    presence.restore(local, before)
    return result


class _Plain:
    """Read by Python and numpy as plain variables are: ``float(optimizer.learning_rate)``."""

    numpy: Callable[[], Any]

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
        return np.array(self.numpy(), dtype)

    def __float__(self) -> float:
        return float(self.numpy())

    def __int__(self) -> int:
        return int(self.numpy())


class MirroredVariable(_Plain, tf_values.MirroredVariable):  # type: ignore[misc]
    """A variable whose writes keep it alike on all replicas, unless its aggregation is NONE."""

    def _update_replica(self, update_fn: Any, value: Any, **options: Any) -> Any:
        own = super()._update_replica
        if self.aggregation != NONE:
            return own(update_fn, value, **options)
        return _written_by_one(own, self, update_fn, value, options)


class SyncOnReadVariable(_Plain, tf_values.SyncOnReadVariable):  # type: ignore[misc]
    """A variable that each replica writes by itself, and that is reduced where it is read."""

    _held: Any = None  # the value of reads between hold() and let_go()

    def __getattr__(self, name: str) -> Any:
        """Looks in this process' variable: TensorFlow's would reduce a value to look for a name."""
        if "_values" not in vars(self):
            raise AttributeError(name)
        return getattr(local(self), name)

    def _get_cross_replica(self) -> Any:
        return super()._get_cross_replica() if self._held is None else self._held

    # TensorFlow would look these up in this process' variable.

    def sparse_read(self, indices: Any, name: str | None = None) -> Any:
        return tf.gather(self.read_value(), indices, name=name)

    def gather_nd(self, indices: Any, name: str | None = None) -> Any:
        return tf.gather_nd(self.read_value(), indices, name=name)

    def hold(self) -> None:
        """Collective: until `let_go`, reads return the present value."""
        self._held = tf.identity(self._get_cross_replica())

    def let_go(self) -> None:
        self._held = None

    def _update_replica(self, update_fn: Any, value: Any, **options: Any) -> Any:
        return _written_by_one(super()._update_replica, self, update_fn, value, options)


CLASSES = distribute_utils.VARIABLE_CLASS_MAPPING | {
    tf.VariableSynchronization.ON_WRITE: MirroredVariable,
    ON_READ: SyncOnReadVariable,
}
POLICIES = distribute_utils.VARIABLE_POLICY_MAPPING
CREATED = tf_values.DistributedVariable


def is_ours(strategy: Any) -> bool:
    return getattr(strategy.extended, "one_process_a_replica", False)


def on_servers(strategy: Any) -> bool:
    """Whether variables of its scope are on servers of ours."""
    return strategy is not None and getattr(strategy.extended, "variables_on_servers", False)


def local(value: Any) -> Any:
    """This process' value of a distributed one."""
    if isinstance(value, tf_values.DistributedValues):
        return value.values[0]
    return value


def local_tree(tree: Any) -> Any:
    """The same for a structure: variables stay what they are."""
    if not any(isinstance(each, tf_values.DistributedValues) for each in tf.nest.flatten(tree)):
        return tree
    return tf.nest.map_structure(lambda v: v if isinstance(v, CREATED) else local(v), tree)


def require_of(strategy: Any, variable: Any) -> None:
    """Raises InvalidArgument for a variable that is not of its scope."""
    if isinstance(variable, CREATED) and variable.distribute_strategy is strategy:
        return
    raise InvalidArgument(
        f"variable '{getattr(variable, 'name', variable)}' was not created in the scope of this "
        f"{type(strategy).__name__}, so replicas do not share it\n"
        "  advice: create models, optimizers, metrics and variables inside `with strategy.scope():`"
    )


def refuse_symbolic(options: dict[str, Any]) -> None:
    """Raises InvalidArgument for variables that cannot be made at once."""
    with tf.init_scope():
        if not tf.executing_eagerly():
            raise InvalidArgument(
                "a variable is made in a graph of TensorFlow 1, where farandole.strategy has no "
                "scope"
            )
    value = options.get("initial_value")
    if tf.is_tensor(value) and not hasattr(value, "numpy"):
        raise InvalidArgument(
            f"variable '{options.get('name')}' is made in a tf.function from a tensor of it\n"
            "  advice: make it outside, or from a function: tf.Variable(lambda: tf.zeros(3))"
        )


def is_counter(variable: Any) -> bool:
    """A whole number, as optimizers count their steps: the same on all replicas by itself."""
    return bool(variable.dtype.is_integer and variable.shape.rank == 0)
