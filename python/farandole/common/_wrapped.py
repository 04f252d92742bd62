"""An object of the user's becomes one of ours in place: of a child class with its class' name."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache


def child_of(own: type, mixin: type) -> type:
    """The class `own` with `mixin` before it."""
    names = {name: getattr(own, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(own.__name__, (mixin, own), names)


one_child_of: Callable[[type, type], type] = cache(child_of)  # the same one in every call
