"""Imports of optional packages: `from farandole.common._needs import torch` gives the module, or an
error of one line that says how to install it."""

from __future__ import annotations

import importlib
from types import ModuleType

# By module: its name in messages, and the extra that installs it.
EXTRAS = {
    "torch": ("PyTorch", "torch"),
    "tensorflow": ("TensorFlow", "tensorflow"),
    "keras": ("Keras", "keras"),
    "jax": ("JAX", "jax"),
    "optax": ("optax", "jax"),
    "matplotlib": ("matplotlib", "bench"),
    "mpi4py": ("mpi4py", "bench"),
    "ray": ("Ray", "ray"),
    "rich": ("rich", "cli"),
    "shtab": ("shtab", "cli"),
}


class MissingExtra(ModuleNotFoundError):
    """A package is not installed that an extra of farandole brings."""


def how_to_get(module: str) -> str:
    """'PyTorch is missing: pip install 'farandole[torch]'."""
    label, extra = EXTRAS[module]
    return f"{label} is missing: pip install 'farandole[{extra}]'"


def __getattr__(name: str) -> ModuleType:
    if name not in EXTRAS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:  # it is there, and lacks something itself
            raise
        raise MissingExtra(how_to_get(name), name=name) from None
