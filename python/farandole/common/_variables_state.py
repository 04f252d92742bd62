"""States of elastic training whose variables keep their values in a framework."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from farandole._arguments import type_of
from farandole._core import InvalidArgument
from farandole.common.elastic import ObjectState

Values = list[np.ndarray[Any, Any]]


class VariablesState(ObjectState):
    """Variables beside objects. A framework says which, and how they are read, written, shared.

    Args:
        kwargs: the objects' names and first values.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._saved_values = self._valued()

    def save(self) -> None:
        """Keeps copies in memory, which replace the former ones once they are whole."""
        valued = self._valued()
        super().save()
        self._saved_values = valued

    def restore(self) -> None:
        """Goes back to these."""
        self._write([variable for variable, _ in self._saved_values], self._saved_values_alone())
        super().restore()

    def sync(self) -> None:
        """Gives every rank what rank 0 has, and saves that. Collective."""
        self._share(self._shared())
        super().sync()
        self._saved_values = self._valued()

    def _valued(self) -> list[tuple[Any, np.ndarray[Any, Any]]]:
        variables = [*self._shared(), *self._own()]
        return list(zip(variables, self._read(variables), strict=True))

    def _saved_values_alone(self) -> Values:
        """Copies: a framework may take an array's memory for a variable's."""
        return [value.copy() for _, value in self._saved_values]

    def _shared(self) -> list[Any]:
        """The variables that ranks have alike, in the same order."""
        raise NotImplementedError

    def _own(self) -> list[Any]:
        """The variables that each rank has of its own."""
        return []

    def _read(self, variables: Sequence[Any]) -> Values:
        """Copies of their values."""
        return [np.array(variable.numpy(), order="C") for variable in variables]

    def _write(self, variables: Sequence[Any], values: Values) -> None:
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)

    def _share(self, variables: Sequence[Any]) -> None:
        """They get rank 0's values. Collective."""
        raise NotImplementedError


class ModelState(VariablesState):
    """A model of Keras and its optimizer. The seeds of random layers are each rank's own.

    Args:
        model: built.
        optimizer: default: the one that the model was compiled with, if it was. One that has no
            variables yet gets them here.
        kwargs: as of ``VariablesState``.

    Raises:
        InvalidArgument: the model has no weights yet.
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if not hasattr(model, "weights"):
            raise InvalidArgument(f"model is {type_of(model)}, not a model of Keras")
        self.model = model
        self._optimizer = optimizer
        super().__init__(**kwargs)

    @property
    def optimizer(self) -> Any:
        """The given optimizer, or else the model's; None if there is none."""
        if self._optimizer is not None:
            return self._optimizer
        return getattr(self.model, "optimizer", None)

    @optimizer.setter
    def optimizer(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def restore(self) -> None:
        self._settle()
        super().restore()

    def _settle(self) -> None:
        """On JAX, within `fit`, copies the present values into the model."""
        if hasattr(self.model, "jax_state_sync"):
            self.model.jax_state_sync()

    def _built_optimizer(self) -> Any:
        optimizer = self.optimizer
        # A new rank's optimizer has taken no step, which would have made its variables.
        if optimizer is not None and not getattr(optimizer, "built", True):
            optimizer.build(self.model.trainable_variables)
        return optimizer

    def _shared(self) -> list[Any]:
        if not getattr(self.model, "built", True):
            raise InvalidArgument(
                "the model has no weights yet, of which all ranks begin with rank 0's\n"
                "  advice: give it a keras.Input, or call model.build(shape), before the state"
            )
        self._settle()
        optimizer = self._built_optimizer()
        variables = getattr(optimizer, "variables", [])
        return [*self.model.weights, *(variables() if callable(variables) else variables)]

    def _own(self) -> list[Any]:
        weights = set(map(id, self.model.weights))
        return [v for v in self.model.variables if id(v) not in weights]
