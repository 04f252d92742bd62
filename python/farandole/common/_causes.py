"""What is behind the errors of frameworks that compute behind Python's back."""

from __future__ import annotations

from farandole import _world
from farandole._core import Error


def verdict_behind(error: Exception) -> BaseException:
    """What this process' world has failed with; the error itself where it has not."""
    world = _world.current()
    try:
        if world is not None:
            world.check()
    except Error as verdict:
        return verdict
    return error
