"""Constants that layers compute from variables."""

from __future__ import annotations

from typing import Any

import keras


def compute_again(model: Any) -> None:
    """Where variables have got other values by assignment, as Keras does where it loads them."""
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.Normalization):
            layer.finalize_state()  # its mean and variance are no variables
