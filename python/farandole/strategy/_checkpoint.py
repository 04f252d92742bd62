"""tf.train.Checkpoint of variables that replicas share: it is taught, once, to write a file once.

Reading a metric's variable is collective, so every rank takes part in writing; but those other than
rank 0 write to a folder of their own, as TensorFlow tells users of several workers to do, and throw
it away. When the call returns, the file is there on all ranks.
"""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.python.checkpoint import graph_view  # private, as is what is taught

from farandole import _world
from farandole._core import InvalidArgument
from farandole.common._objects import broadcast_object


@functools.cache
def learn() -> None:
    kind = tf.train.Checkpoint
    kind._write = _written(kind._write)


def _written(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def _write(self: Any, file_prefix: Any, options: Any = None) -> Any:
        if _world.size() == 1 or not tf.executing_eagerly() or not _is_shared(self):
            return own(self, file_prefix, options)
        path, error = None, None
        try:
            if _world.rank() == 0:
                path = own(self, file_prefix, options)
            else:
                _write_aside(own, self, options)
        except Exception as failed:
            error = failed
        told = broadcast_object((path, None if error is None else str(error)), 0, "checkpoint")
        if error is not None:
            raise error
        if told[1] is not None:
            raise InvalidArgument(f"rank 0 could not write the checkpoint: {told[1]}")
        if _world.rank() != 0:
            for call in _callbacks(options):
                call(told[0])
        return told[0]

    return _write


def _write_aside(own: Callable[..., Any], checkpoint: Any, options: Any) -> None:
    plain = copy.copy(options) if options is not None else tf.train.CheckpointOptions()
    plain.experimental_write_callbacks = None
    with tempfile.TemporaryDirectory() as folder:
        own(checkpoint, str(Path(folder) / "aside"), plain)


def _callbacks(options: Any) -> list[Callable[[Any], Any]]:
    """Those of TensorFlow's, which keep account of the files."""
    return [] if options is None else list(options.experimental_write_callbacks or ())


def _is_shared(checkpoint: Any) -> bool:
    """Whether one of its variables is of a scope of ours."""
    objects = graph_view.ObjectGraphView(checkpoint).breadth_first_traversal()[0]
    return any(_is_ours(getattr(each, "_value", each)) for each in objects)


def _is_ours(value: Any) -> bool:
    strategy = vars(value).get("_distribute_strategy") if hasattr(value, "__dict__") else None
    return strategy is not None and hasattr(strategy.extended, "one_process_a_replica")
