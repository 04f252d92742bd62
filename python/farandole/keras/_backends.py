"""How gradients are exchanged on the backend that Keras runs on."""

from __future__ import annotations

import importlib
from typing import Any

import keras

from farandole._core import InvalidArgument

_BACKENDS = {
    "jax": "farandole.keras._jax",
    "tensorflow": "farandole.keras._tensorflow",
    "torch": "farandole.keras._torch",
}


def backend() -> Any:
    """Its module, with `check` and `exchange_of`. Raises InvalidArgument where there is none."""
    name = keras.backend.backend()
    if name not in _BACKENDS:
        raise InvalidArgument(
            f"Keras runs on {name}, on which farandole does not train; set KERAS_BACKEND to "
            + ", ".join(_BACKENDS)
        )
    return importlib.import_module(_BACKENDS[name])
