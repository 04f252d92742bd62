"""All fronts by name. A front's framework is imported where it trains, not here."""

from __future__ import annotations

import keras_fronts
import torch_fronts
from programs import Front, Program, Result

FRONTS: dict[str, Front] = {**torch_fronts.FRONTS, **keras_fronts.FRONTS}


def begin(front: str) -> None:
    """On a rank, once."""
    FRONTS[front].begin()


def train(program: Program, parallel: bool) -> Result:
    """On a rank, or in the process that trains alone."""
    return FRONTS[program.front].train(program, parallel)
