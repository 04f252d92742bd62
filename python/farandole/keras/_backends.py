"""How gradients are exchanged on the backend that Keras runs on."""

from __future__ import annotations

import importlib
from typing import Any

import keras

from farandole._core import InvalidArgument

_BACKENDS = {"jax": "ProgramExchange", "tensorflow": "GraphExchange", "torch": "HookedExchange"}


def backend() -> Any:
    """The class of its exchanges. Raises InvalidArgument where there is none."""
    name = keras.backend.backend()
    if name not in _BACKENDS:
        raise InvalidArgument(
            f"Keras runs on {name}, on which farandole does not train; set KERAS_BACKEND to "
            + ", ".join(_BACKENDS)
        )
    return getattr(importlib.import_module(f"farandole.keras._{name}"), _BACKENDS[name])
