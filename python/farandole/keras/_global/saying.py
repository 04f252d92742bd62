"""Sentences that rank 0 says once."""

from __future__ import annotations

import sys
from functools import cache

from farandole import _world


def say(text: str) -> None:
    if _world.rank() == 0 and _world.size() > 1:
        print(f"farandole: {text}", file=sys.stderr)


say_once = cache(say)
