"""A model that a function makes: on a rank, only the weights of its stage get values.

Keras has a scope in which variables wait for their values. They get them when the scope is left
or, as here, on request. The scope keeps values that are assigned meanwhile, as by ``load_weights``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras

from farandole._core import InvalidArgument

_WAITING = "uninitialized_variables"  # private: where Keras lists those that wait


def _check_needs_nothing(function: Callable[..., Any]) -> None:
    try:
        inspect.signature(function).bind()
    except ValueError:  # Python cannot say what it takes
        return
    except TypeError as error:
        name = getattr(function, "__qualname__", function)
        raise InvalidArgument(
            f"model is {name}, which cannot be called without arguments ({error}); pass a Keras "
            "model, or a function that makes one"
        ) from None


class Made:
    """The model that a function makes, or a given model, whose weights have values already."""

    def __init__(self, model: Any) -> None:
        self._scope: Any = None
        self._mine: set[int] = set()
        self.model = model
        if callable(model) and not isinstance(model, keras.Model):
            self.model = self._called(model)

    def _called(self, function: Callable[[], Any]) -> Any:
        _check_needs_nothing(function)
        before = set(map(id, _waiting()))
        self._scope = keras.StatelessScope(initialize_variables=False)
        try:
            with self._scope:
                return function()
        finally:
            self._mine = {id(v) for v in _waiting()} - before

    def give_values(self, variables: Sequence[Any]) -> None:
        """Gives values to these. The model's other variables stay without, and are never read."""
        if self._scope is None:
            return
        self.forget()
        for variable in variables:
            if id(variable) in self._mine:
                self._mine.discard(id(variable))
                variable._deferred_initialize()
            assigned = self._scope.get_current_value(variable)
            if assigned is not None:
                variable.assign(assigned)
        self._scope = None

    def forget(self) -> None:
        """Removes the model's variables from Keras' list, so that none gets a value by itself."""
        from keras.src.backend.common import global_state

        rest = [v for v in _waiting() if id(v) not in self._mine]
        global_state.set_global_attribute(_WAITING, rest)


def _waiting() -> list[Any]:
    from keras.src.backend.common import global_state

    return list(global_state.get_global_attribute(_WAITING) or ())
