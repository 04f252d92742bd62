"""A server's rule: the optimizer that the model was compiled with."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from farandole._core import InvalidArgument
from farandole.parameter_server import Rows


class KerasRule:
    """Applies gradients to the model's own variables, and copies them to the server's.

    Gradients of rows become whole ones: then the result is what Keras' optimizers give on one
    process, whose moments decay in every row.
    """

    def __init__(self, variables: Mapping[str, Any]) -> None:
        """`variables`: the model's, by name; of these the server has some."""
        self._variables = variables
        self._optimizer: Any = None
        self._to_restore: Mapping[str, np.ndarray] | None = None

    def use(self, optimizer: Any, names: list[str]) -> None:
        """From now on, for these variables."""
        self._variables = {name: self._variables[name] for name in names}
        if not optimizer.built:
            optimizer.build(list(self._variables.values()))
        self._optimizer = optimizer
        if self._to_restore is not None:
            state, self._to_restore = self._to_restore, None
            self._assign(state)

    def apply(
        self, variables: Mapping[str, np.ndarray], gradients: Mapping[str, Any], version: int
    ) -> None:
        del version  # the optimizer counts itself
        with _no_grad():
            self._optimizer.apply(
                [
                    keras.ops.convert_to_tensor(
                        g.dense(variables[name].shape) if isinstance(g, Rows) else g
                    )
                    for name, g in gradients.items()
                ],
                [self._variables[name] for name in gradients],
            )
        for name in gradients:
            variables[name][...] = keras.ops.convert_to_numpy(self._variables[name])

    def state(self) -> dict[str, np.ndarray]:
        if self._optimizer is None:
            return {}
        return {
            f"{i} {v.path}": np.array(keras.ops.convert_to_numpy(v))
            for i, v in enumerate(self._optimizer.variables)
        }

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        self._to_restore = state  # the optimizer has no variables yet

    def _assign(self, state: Mapping[str, np.ndarray]) -> None:
        own = self._optimizer.variables
        shapes = [tuple(v.shape) for v in own]
        if shapes != [value.shape for value in state.values()]:
            raise InvalidArgument(
                f"the snapshot has the state of another optimizer than "
                f"{type(self._optimizer).__name__}: {len(state)} variables, and here {len(own)}\n"
                "  advice: compile the model as before, or take another folder"
            )
        for variable, value in zip(own, state.values(), strict=True):
            variable.assign(value)


def _no_grad() -> contextlib.AbstractContextManager[Any]:
    if keras.backend.backend() != "torch":
        return contextlib.nullcontext()
    import torch

    return torch.no_grad()


def check_optimizer(optimizer: Any, servers: int) -> None:
    """Raises InvalidArgument for one that servers cannot apply."""
    name = type(optimizer).__name__
    if optimizer is None:
        raise InvalidArgument("the model was not compiled with an optimizer")
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise InvalidArgument(
            "the parameter server has no loss scaling, which mixed_float16 needs\n"
            "  advice: mixed_bfloat16, or compile(…, auto_scale_loss=False)"
        )
    if hasattr(optimizer, "_farandole"):
        raise InvalidArgument(f"{name} shares gradients itself; compile with a plain optimizer")
    if optimizer.global_clipnorm is not None and servers > 1:
        raise InvalidArgument(
            f"global_clipnorm={optimizer.global_clipnorm} with {servers} servers: each of them "
            "knows the norm of its own variables only\n  advice: one server, or clipnorm"
        )
