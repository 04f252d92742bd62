"""Our ops in TensorFlow: ``_tf.so`` beside the core, opened once, and how its ops are used.

The library is built without TensorFlow. ``tf.load_op_library`` opens it, the core hands it a table
of functions, and from then on ops and engine talk without Python.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from farandole import _core, _world
from farandole._limits import setting
from farandole.common import _basics
from farandole.tensorflow import _turns, _verdicts
from farandole.tensorflow._graph import in_tensorflow_1

# Where asynchronous kernels were tested. Elsewhere each operation is a pair of ops, which asks of
# TensorFlow nothing but what it documents.
TESTED = ("2.16", "2.21")

# Ops that TensorFlow must not order one after the other, as it does other stateful ops.
_KINDS = "AllReduce AllGather Broadcast ReduceScatter AllToAll Barrier Join Step Weights Start"
_UNORDERED = {f"Farandole{kind}" for kind in _KINDS.split()}


def version() -> str:
    return ".".join(tf.__version__.split(".")[:2])


@functools.cache
def uses_pairs() -> bool:
    """Whether an operation is an op that starts and one that finishes."""
    asked = setting("FARANDOLE_TF_OP")
    return asked == "pair" or (asked == "auto" and version() not in TESTED)


@functools.cache
def ops() -> Any:
    """The ops, as TensorFlow wraps them.

    Raises:
        ImportError: they cannot be loaded into this TensorFlow; says why.
    """
    library = Path(_core.__file__).parent / "_tf.so"
    if not library.exists():
        raise ImportError(f"{library} is missing: this farandole was built without it")
    wrapped = tf.load_op_library(str(library))
    attach = ctypes.CDLL(str(library)).farandole_tf_attach
    attach.restype, attach.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    problem = attach(_core.plugin_table())
    if problem is not None:
        raise ImportError(
            f"farandole does not work with TensorFlow {tf.__version__}: {problem.decode()}"
        )
    runs_unordered()
    _show_world_later()  # graphs go on in a later one, however that is joined
    _verdicts.come_first()
    _turns.are_known()  # of functions from files, too
    return wrapped


@functools.cache
def runs_unordered() -> bool:
    """Tells TensorFlow not to order our ops; False where that is not possible. Ops without an order
    do not run if their results are not used."""
    try:
        # Private, and there from 2.4 to 2.21 at least.
        from tensorflow.python.framework import auto_control_deps

        known = auto_control_deps.ASYNC_STATEFUL_OPS
        auto_control_deps.ASYNC_STATEFUL_OPS = frozenset(known) | _UNORDERED
        return True
    except (ImportError, AttributeError):
        logging.getLogger(__name__).warning(
            "TensorFlow %s runs our operations one after the other: they are right, and hide "
            "little of their time",
            tf.__version__,
        )
        return False


def ready() -> None:
    """Shows TensorFlow's threads the world before an op is made. A graph of TensorFlow 1 may be
    built before there is one; a session that runs it then does not wait for one, but fails."""
    if in_tensorflow_1() and not _world.is_initialized():
        _show_world_later()
    else:
        _show_world()


def _show_world() -> None:
    _core.names_of(_world.world())


@functools.cache
def _show_world_later() -> None:
    _world.after_joining(_show_world)


def init(
    comm: Sequence[int] | None = None, process_sets: Iterable[Any] | str | None = None, **place: Any
) -> None:
    """Joins the other ranks of the job; a second call without ``shutdown()`` does nothing.

    Args and errors are those of ``farandole.torch.init``.

    Examples:
        >>> import farandole.tensorflow as hvd
        >>> hvd.init()
        >>> hvd.rank(), hvd.size()
        (0, 1)
    """
    _basics.init(comm, process_sets, **place)
    ops()  # so that TensorFlow can load functions from files
    _show_world()  # graphs made in an earlier world go on in this one
