"""All fronts by name. A front's framework is imported where it trains, not here."""

from __future__ import annotations

import jax_fronts
import keras_fronts
import programs
import strategy_fronts
import torch_fronts
from programs import Front, Result

FRONTS: dict[str, Front] = {
    **torch_fronts.FRONTS,
    **keras_fronts.FRONTS,
    **strategy_fronts.FRONTS,
    **jax_fronts.FRONTS,
}


def begin(front: str) -> None:
    """On a rank, once."""
    FRONTS[front].begin()


def train(line: str, parallel: bool) -> Result:
    """On a rank, or in the process that trains alone: the program that str() has printed."""
    program = programs.read(line, FRONTS)
    return FRONTS[program.front].train(program, parallel)
