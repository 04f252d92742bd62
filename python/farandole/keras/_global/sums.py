"""Sums over ranks inside the program of a step."""

from __future__ import annotations

from typing import Any

import keras

from farandole.common._reduction import Sum


def sum_over_ranks(value: Any, name: str) -> Any:
    """On any backend. Its gradient is that of the sum of all ranks' losses."""
    backend = keras.backend.backend()
    if backend == "tensorflow":
        from farandole.tensorflow.ops import allreduce as of_tensorflow

        # Scopes of names have numbers of models in them, which other ranks may have made.
        return of_tensorflow(value, op=Sum, name=name, ignore_name_scope=True)
    if backend == "torch":
        from farandole.torch.ops import allreduce as of_torch

        return of_torch(value, op=Sum, name=name)
    from farandole.jax.ops import allreduce as of_jax

    return of_jax(value, "sum", name=name)
