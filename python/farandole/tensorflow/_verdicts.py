"""What an op of ours says of its failure is the first that a user reads.

TensorFlow tells a failed op by a stack trace of where it stands in its graph, and what the op said
after that. Errors of TensorFlow are shown as before, unless one of ours is in them.
"""

from __future__ import annotations

import functools
import re

import tensorflow as tf

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
    """From now on, in all ways in which an op fails: at once, in functions, sessions, and Keras."""
    own = tf.errors.OpError.__str__

    def __str__(self: tf.errors.OpError) -> str:
        return verdict_first(own(self))

    tf.errors.OpError.__str__ = __str__
