"""Warnings of what is deprecated."""

from __future__ import annotations

import sys
import warnings
from types import FrameType


def warn_deprecated(text: str) -> None:
    """Points at the program's line, however many of our functions are between."""
    warnings.warn(text, DeprecationWarning, stacklevel=_outside())


def _outside() -> int:
    frame, level = sys._getframe(2), 2  # warn_deprecated's caller, as warn_deprecated counts
    while frame.f_back is not None and _is_ours(frame):
        frame, level = frame.f_back, level + 1
    return level


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith("farandole.")
