"""Finds the cause of errors in frameworks that compute outside of Python."""

from __future__ import annotations

from farandole import _world
from farandole._core import Error


def verdict_behind(error: Exception) -> BaseException:
    """The error with which this process' world has failed; if it has not, the given one."""
    world = _world.current()
    try:
        if world is not None:
            world.check()
    except Error as verdict:
        return verdict
    return error
