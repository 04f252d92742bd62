"""Patches tf.train.Checkpoint and tf.saved_model.save to write a file once, where replicas share
variables.

Reading a metric's variable is collective. So all ranks read those first, and rank 0 writes the
values. When the call returns on any rank, the file is there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.checkpoint import graph_view  # private, as is what is taught
from tensorflow.python.saved_model import save as saved_model

from farandole import _world
from farandole._core import InvalidArgument
from farandole.common._objects import made_by_first
from farandole.strategy._variables import CREATED, SyncOnReadVariable, is_ours, on_servers


@functools.cache
def learn() -> None:
    kind = tf.train.Checkpoint
    kind._write = _written(kind._write)
    kind.save = _at_once(kind.save)
    saved_model.save_and_return_nodes = _exported(saved_model.save_and_return_nodes)
    alone = tf.distribute.experimental.PreemptionCheckpointHandler
    alone.__init__ = _not_alone(alone.__init__)


def _not_alone(own: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(own)
    def __init__(
        self: Any, cluster_resolver: Any, checkpoint_or_checkpoint_manager: Any, *args: Any,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        saved = checkpoint_or_checkpoint_manager
        if _world.size() > 1 and _shared_variables(getattr(saved, "checkpoint", saved)):
            raise InvalidArgument(
                "tf.distribute.experimental.PreemptionCheckpointHandler knows of no other rank, "
                "and would save on one alone\n  advice: "
                "farandole.strategy.PreemptionCheckpointHandler takes the same arguments"
            )
        own(self, cluster_resolver, saved, *args, **kwargs)

    return __init__


def _at_once(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def save(self: Any, file_prefix: Any, options: Any = None) -> Any:
        _refuse_later(self, options)
        return own(self, file_prefix, options)

    return save


def _refuse_later(checkpoint: Any, options: Any) -> None:
    """Raises InvalidArgument for a checkpoint that a thread would write."""
    asked = options is not None and options.experimental_enable_async_checkpoint
    if asked and _world.size() > 1 and _shared_variables(checkpoint):
        raise InvalidArgument(
            "experimental_enable_async_checkpoint: replicas read their variables together, which "
            "a thread of one cannot\n  advice: leave it out"
        )


def _written(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def _write(self: Any, file_prefix: Any, options: Any = None) -> Any:
        _refuse_later(self, options)
        if _world.size() > 1 and _world.rank() != 0 and _is_on_servers(self):
            return str(file_prefix)  # the chief writes it at this call
        variables = _shared_variables(self) if _world.size() > 1 else []
        if not variables or not tf.executing_eagerly():
            return own(self, file_prefix, options)
        with _read(variables):
            path: Any = made_by_first(
                "checkpoint",
                lambda: own(self, file_prefix, options),
                "checkpoint: rank 0 could not",
            )
        if _world.rank() != 0:
            for call in _callbacks(options):
                call(path)
        return path

    return _write


def _exported(own: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the function that every export of a SavedModel calls."""

    @functools.wraps(own)
    def save(obj: Any, export_dir: Any, *args: Any, **kwargs: Any) -> Any:
        variables = _shared_variables(obj) if _world.size() > 1 else []
        if not variables or not tf.executing_eagerly():
            return own(obj, export_dir, *args, **kwargs)
        made: list[Any] = [([], {})]  # nodes and their places, which ranks that write have
        with _read(variables):
            made_by_first(
                "a SavedModel",
                lambda: made.append(own(obj, export_dir, *args, **kwargs)),
                "a SavedModel: rank 0 could not",
            )
        return made[-1]

    return save


def _callbacks(options: Any) -> list[Callable[[Any], Any]]:
    """TensorFlow's own callbacks, which keep account of the files."""
    return [] if options is None else list(options.experimental_write_callbacks or ())


def has_shared_variables(checkpoint: Any) -> bool:
    """Whether it has variables that replicas share, so that rank 0 alone writes a file."""
    return bool(_shared_variables(checkpoint))


def _shared_variables(root: Any) -> list[Any]:
    """Its variables of a scope of ours, in an order that is the same on all ranks."""
    ours = [
        v for v in _variables(root) if isinstance(v, CREATED) and is_ours(v.distribute_strategy)
    ]
    return list({id(v): v for v in ours}.values())


def _is_on_servers(checkpoint: Any) -> bool:
    """Whether it has variables on servers, so that the first rank writes all of it."""
    strategies = (getattr(v, "_distribute_strategy", None) for v in _variables(checkpoint))
    return any(on_servers(each) for each in strategies)


def _variables(root: Any) -> list[Any]:
    """Its variables, among other objects; for Keras' variables the ones inside."""
    objects = graph_view.ObjectGraphView(root).breadth_first_traversal()[0]
    return [vars(each).get("_value", each) for each in objects if hasattr(each, "__dict__")]


@contextmanager
def _read(variables: list[Any]) -> Iterator[None]:
    """Collective: a context in which reads return values that have been reduced."""
    reduced = [v for v in variables if isinstance(v, SyncOnReadVariable)]
    for variable in reduced:
        variable.hold()
    try:
        yield
    finally:
        for variable in reduced:
            variable.let_go()
