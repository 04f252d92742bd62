"""Means over batches, of numbers that are means over their samples.

A metric that is told the loss of a batch counts it once. On ranks each tells that of its part, so
it counts by the part's samples. What has a weight, or a value for each sample, is as it is.
"""

from __future__ import annotations

from functools import cache, wraps
from typing import Any

import keras

from farandole.keras._global.steps import running


@cache
def learn() -> None:
    """From now on, in a step of a shared model."""
    own = keras.metrics.Mean.update_state

    @wraps(own)
    def update_state(self: Any, values: Any, sample_weight: Any = None) -> Any:
        steps = running()
        is_number = sample_weight is None and len(getattr(values, "shape", ())) == 0
        if is_number and steps is not None and steps.share is not None:
            sample_weight = steps.share[0, 0] / steps.share[0, 1]
        return own(self, values, sample_weight=sample_weight)

    keras.metrics.Mean.update_state = update_state
