"""All fronts by name. A front's framework is imported where it trains, not here."""

from __future__ import annotations

import jax_fronts
import keras_fronts
import strategy_fronts
import torch_fronts
from programs import Front, Program, Result

FRONTS: dict[str, Front] = {
    **torch_fronts.FRONTS,
    **keras_fronts.FRONTS,
    **strategy_fronts.FRONTS,
    **jax_fronts.FRONTS,
}


def begin(front: str) -> None:
    """On a rank, once."""
    FRONTS[front].begin()


def train(program: Program, parallel: bool) -> Result:
    """On a rank, or in the process that trains alone."""
    return FRONTS[program.front].train(program, parallel)
