"""Puts the message of an op of ours first in TensorFlow's errors.

TensorFlow shows a stack trace of where a failed op stands in its graph, and the op's message after
that. Errors of TensorFlow are shown as before, unless one of ours is in them.
"""

from __future__ import annotations

import functools
import re

import tensorflow as tf

from farandole._core import Error
from farandole.common._causes import verdict_behind

# To where TensorFlow goes on: the node, the op, where it was made.
_VERDICT = re.compile(
    r"farandole\.[A-Z]\w+: .*?(?=\n\t \[\[\{\{node|\s\[Op:|\n\nOriginal stack trace|\Z)", re.DOTALL
)


def verdict_first(text: str) -> str:
    found = _VERDICT.search(text)
    if found is None:
        return text
    rest = (text[: found.start()] + text[found.end() :]).strip()
    return f"{found.group().strip()}\n\n{rest}" if rest else text


@functools.cache
def come_first() -> None:
    """Patches TensorFlow's errors: of ops that fail eagerly, in functions, sessions and Keras."""
    own = tf.errors.OpError.__str__

    def __str__(self: tf.errors.OpError) -> str:
        return verdict_first(own(self))

    tf.errors.OpError.__str__ = __str__


def cause_of(error: Exception) -> BaseException:
    """The world's error, if an op has failed by it; else the given one."""
    if isinstance(error, tf.errors.OpError) and not isinstance(error, Error):
        return verdict_behind(error)
    return error
