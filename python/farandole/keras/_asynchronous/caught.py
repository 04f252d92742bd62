"""Replaces the optimizer on a worker: it keeps the gradients, and changes no weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras as _keras

from farandole.keras._exchange import dense

keras: Any = _keras  # untyped


class Caught(keras.optimizers.Optimizer):  # type: ignore[misc]
    """Keeps gradients in variables, so it works within the compiled steps of every backend."""

    def __init__(self) -> None:
        super().__init__(learning_rate=0.0, name="caught")
        self._kept: list[Any] = []
        self._has: list[bool] = []  # a gradient, as the step was traced

    def build(self, variables: Sequence[Any]) -> None:
        if self.built:
            return
        super().build(variables)
        self._kept = self.add_optimizer_variables(variables, "gradient")
        self._has = [False] * len(variables)

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        variables = (
            self._trainable_variables if trainable_variables is None else trainable_variables
        )
        for gradient, variable in zip(grads, variables, strict=True):
            at = self._get_variable_index(variable)
            self._has[at] = gradient is not None
            if gradient is not None:  # assigned rows would leave those of the step before
                self.assign(self._kept[at], dense(gradient))
        self.iterations.assign_add(1)

    @property
    def gradients(self) -> list[Any]:
        """The last step's gradients, as numpy arrays in the order of the variables; None where a
        variable had none."""
        return [
            keras.ops.convert_to_numpy(kept) if has else None
            for kept, has in zip(self._kept, self._has, strict=True)
        ]
