"""Puts the error of a collective first in the text of JAX's errors.

JAX raises it where a result is waited for, behind one "Error dispatching computation" for each
program that was started since. Errors of JAX are shown as before, unless one of ours is in them.
"""

from __future__ import annotations

import functools
import re

import jax

from farandole import _core

_KINDS = "|".join(kind.__name__ for kind in _core.Error.__subclasses__())
_VERDICT = re.compile(rf"(?:[A-Z_]+: )?\b(?:{_KINDS}): .*", re.DOTALL)
_REPEATED = re.compile(r"(Error dispatching computation)(?:: Error dispatching computation)+")


def verdict_first(text: str) -> str:
    found = _VERDICT.search(text)
    if found is None or found.start() == 0:
        return text
    before = _REPEATED.sub(r"\1", text[: found.start()].strip().rstrip(":"))
    return f"{found.group().rstrip()}\n\nJAX tells it as: {before}"


@functools.cache
def come_first() -> None:
    """Puts them first from now on, however JAX raises them."""
    own = jax.errors.JaxRuntimeError.__str__

    def __str__(self: jax.errors.JaxRuntimeError) -> str:
        return verdict_first(own(self))

    jax.errors.JaxRuntimeError.__str__ = __str__
