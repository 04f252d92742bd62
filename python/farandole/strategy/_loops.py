"""Keras' optimizers and layers in a loop of a scope.

All replicas' gradients are summed before anything else.

Keras sums them last. So a LossScaleOptimizer would look at the replica's own, and each replica
decide by itself; and weights would have decayed where a rank is lost before the sums are there.

An optimizer that clips does that to the replica's own gradients, as with TensorFlow's strategies;
one that accumulates sums in the pass that updates. There the sum stays where Keras has it, and
its terms are checked to be finite (tensorflow/_finite.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from farandole import _world
from farandole.strategy._collectives import SUM, gradients_of
from farandole.strategy._extended import as_is
from farandole.strategy._variables import is_ours
from farandole.tensorflow._reduction import after, names_of
from farandole.tensorflow._weights import raw

_REDUCE = "_all_reduce_sum_gradients"  # of Keras' optimizers, as they update
_OTHERWISE = ("clipnorm", "global_clipnorm", "clipvalue", "gradient_accumulation_steps")


@functools.cache
def teach(optimizers: Any) -> None:
    owner: Any = next(c for c in optimizers.Optimizer.__mro__ if "apply" in vars(c))
    scaling = optimizers.LossScaleOptimizer
    owner.apply = _taught(owner.apply, lambda one: one, _sums_first)
    scaling.apply = _taught(scaling.apply, lambda one: one.inner_optimizer, lambda _: True)


@functools.cache
def teach_normalization(layer: Any) -> None:
    """Synchronized moments are of all samples: a replica without any keeps the moving averages
    that they give."""
    own = layer.call

    @as_is
    @functools.wraps(own)
    def call(self: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        # Keras does not synchronize what is masked.
        joins = self.synchronized and mask is None
        if not (joins or hasattr(self, "over_all_ranks")) or not _in_replica():
            return own(self, inputs, training=training, mask=mask)
        with tf.distribute.get_strategy().extended.presence.writing_alike():
            return own(self, inputs, training=training, mask=mask)

    layer.call = call


@functools.cache
def teach_spectral(layer: Any) -> None:
    """What SpectralNormalization writes follows from the kernel alone."""
    own = layer.call

    @as_is
    @functools.wraps(own)
    def call(self: Any, inputs: Any, training: bool = False) -> Any:
        if not _in_replica():
            return own(self, inputs, training=training)
        with tf.distribute.get_strategy().extended.presence.writing_alike():
            return own(self, inputs, training=training)

    layer.call = call


def _sums_first(optimizer: Any) -> bool:
    return not any(getattr(optimizer, name, None) for name in _OTHERWISE)


def _taught(
    own: Callable[..., Any], inside: Callable[[Any], Any], sums_first: Callable[[Any], bool]
) -> Callable[..., Any]:
    """`inside`: the optimizer that would sum."""

    @as_is
    @functools.wraps(own)
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        if _world.size() == 1 or not _in_replica():
            return own(self, grads, trainable_variables)
        updates = inside(self)
        if _REDUCE in vars(updates) or _reduces(updates):
            return own(self, grads, trainable_variables)
        presence = tf.distribute.get_strategy().extended.presence
        grads = _of_samples(presence, list(grads))
        with presence.updating():
            if not sums_first(self):
                variables = None if trainable_variables is None else list(trainable_variables)
                all_of_it = variables or updates._trainable_variables
                looked = functools.partial(_looked, updates, all_of_it)
                with _reducing(updates, looked):
                    return own(self, grads, variables)
            sums = _summed(self, grads, trainable_variables)
            with _reducing(updates, list), after(sums):
                return own(self, sums, trainable_variables)

    taught: Callable[..., Any] = apply
    return taught


def _of_samples(presence: Any, gradients: list[Any]) -> list[Any]:
    """Zeros on a replica without samples, before an optimizer may add them to earlier ones."""
    there = [i for i, gradient in enumerate(gradients) if gradient is not None]
    kept = presence.kept([gradients[i] for i in there])
    for i, gradient in zip(there, kept, strict=True):
        gradients[i] = gradient
    return gradients


def _in_replica() -> bool:
    """Whether this is a replica in a loop. In a step of Keras optimizers reduce by themselves."""
    context = tf.distribute.get_replica_context()
    if context is None or not is_ours(context.strategy):
        return False
    return not context.strategy.extended.inside_keras


def _reduces(optimizer: Any) -> bool:
    """Whether the optimizer reduces by itself, before it looks at gradients."""
    from farandole.keras._wrapped import Distributed

    return isinstance(optimizer, Distributed)


def _summed(optimizer: Any, gradients: list[Any], variables: Any) -> list[Any]:
    """Sums all gradients but values of variables (of float8), which each replica has."""
    variables = optimizer._trainable_variables if variables is None else list(variables)
    there = [
        i
        for i, (gradient, variable) in enumerate(zip(gradients, variables, strict=False))
        if gradient is not None and not optimizer._overwrite_variable_with_gradient(variable)
    ]
    if there:
        context = tf.distribute.get_replica_context()
        those = [variables[i] for i in there]
        looks = hasattr(optimizer, "inner_optimizer")  # scales losses, looks for infinities itself
        with gradients_of(names_of(those), those, finite=not looks):
            reduced = context.all_reduce(SUM, [gradients[i] for i in there])
        for i, each in zip(there, reduced, strict=True):
            gradients[i] = each
    return gradients


def _looked(optimizer: Any, variables: Sequence[Any], pairs: Any) -> Any:
    """The optimizer's own sum of what it has clipped or accumulated. `variables` have the paths,
    which TensorFlow's in `pairs` have not."""
    pairs = list(pairs)
    paths = {id(raw(each)): name for each, name in zip(variables, names_of(variables), strict=True)}
    those = [variable for gradient, variable in pairs if gradient is not None]
    with gradients_of([paths[id(variable)] for variable in those], those):
        return getattr(type(optimizer), _REDUCE)(optimizer, pairs)


@contextmanager
def _reducing(optimizer: Any, function: Callable[[Any], Any]) -> Iterator[None]:
    """Meanwhile this sums the optimizer's pairs of gradients and variables."""
    vars(optimizer)[_REDUCE] = function
    try:
        yield
    finally:
        del vars(optimizer)[_REDUCE]
