"""A step that runs eagerly: called without the strategy's scope being entered.

TensorFlow takes time to enter a scope, which serves all that a program may do in it. A step needs
little of that: its replica's context and device, and that variables which it makes are the
strategy's.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx  # private, as is all of `extended`
from tensorflow.python.framework import ops

from farandole.strategy._variables import local_tree

_AS_IT_IS = ag_ctx.Status.UNSPECIFIED


class EagerSteps:
    """The eager steps of one strategy.

    Args:
        make_context: makes a replica's context.
    """

    def __init__(self, strategy: Any, device: str, make_context: Callable[[], Any]) -> None:
        self._strategy, self._device, self._make_context = strategy, device, make_context
        self._contexts: list[Any] = []  # that no thread is in
        # A device that is named makes TensorFlow's functions slower, also where there is one alone.
        self._is_alone = len(tf.config.list_logical_devices()) == 1

    def are_possible(self) -> bool:
        """False in a function, a replica's context or another strategy's scope: TensorFlow handles
        or refuses these itself."""
        return (
            tf.executing_eagerly()
            and ag_ctx.control_status_ctx().status is _AS_IT_IS
            and (not tf.distribute.has_strategy() or self._in_scope())
        )

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls the function on this process' replica."""
        given, named = local_tree(args), local_tree(kwargs or {})
        try:
            context = self._contexts.pop()
        except IndexError:
            context = self._make_context()
        try:
            with self._creating(), self._placed(), context:
                return function(*given, **named)
        finally:
            self._contexts.append(context)

    def _placed(self) -> AbstractContextManager[Any]:
        if self._is_alone:
            return nullcontext()
        placed: AbstractContextManager[Any] = tf.device(self._device)
        return placed

    def _in_scope(self) -> bool:
        here = tf.distribute.get_strategy() is self._strategy
        return here and tf.distribute.in_cross_replica_context()

    def _creating(self) -> AbstractContextManager[Any]:
        if tf.distribute.has_strategy():  # its scope is entered
            return nullcontext()
        creating: AbstractContextManager[Any] = tf.variable_creator_scope(self._creator)
        return creating

    @cached_property
    def _creator(self) -> Any:
        """The function that makes variables in the scope: the last one on the stack there."""
        with self._strategy.scope():
            return ops.get_default_graph()._variable_creator_stack[-1][1]
