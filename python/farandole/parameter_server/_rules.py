"""Rules by which a server applies gradients: optimizers on numpy arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from farandole._arguments import shown
from farandole._core import InvalidArgument
from farandole.parameter_server._rows import Gradient, Rows

Variables = Mapping[str, np.ndarray]
Gradients = Mapping[str, Gradient]


class Rule(Protocol):
    """An optimizer, as a server uses it. Called by one thread at a time.

    A server has a part of the variables, and of some of these a part of the rows.
    """

    def apply(self, variables: Variables, gradients: Gradients, version: int) -> None:
        """Changes the variables in place.

        Args:
            variables: by name; all that the server has.
            gradients: by name; a variable may have none. Arrays of the variable's shape, or
                :class:`Rows`.
            version: how many updates there were before.
        """

    def state(self) -> Mapping[str, np.ndarray]:
        """The state that a snapshot keeps."""
        ...

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Goes on from what ``state()`` gave."""


LearningRate = float | Callable[[int], float]


def _rate(rate: LearningRate, version: int) -> float:
    return float(rate(version)) if callable(rate) else rate


def _check_rate(rate: LearningRate) -> None:
    if not callable(rate) and not (isinstance(rate, int | float) and rate >= 0):
        raise InvalidArgument(
            f"learning_rate is {shown(rate)}; it is a number of at least 0, or a function of the "
            "number of updates"
        )


def _number_for(gradient: np.ndarray, number: float, name: str) -> Any:
    """The number in the gradient's dtype. As an integer 0.5 would be 0, so it is refused."""
    made = gradient.dtype.type(number)
    if gradient.dtype.kind in "biu" and made != number:
        raise InvalidArgument(
            f"the gradient of '{name}' is {gradient.dtype}, which {number:g} cannot multiply\n"
            "  advice: a variable of floating point, or assign() for one that is not trained"
        )
    return made


class SGD(Rule):
    """Stochastic gradient descent: ``v = momentum * v - rate * g; w = w + v``.

    With :class:`Rows`, only these rows change, and only their momentum decays.

    Args:
        learning_rate: a number, or a function of the number of updates so far.
        momentum: from 0 to below 1.

    Raises:
        InvalidArgument: a value out of range.
    """

    def __init__(self, learning_rate: LearningRate = 0.01, momentum: float = 0.0) -> None:
        _check_rate(learning_rate)
        if not 0 <= momentum < 1:
            raise InvalidArgument(f"momentum is {shown(momentum)}; it is from 0 to below 1")
        self.learning_rate = learning_rate
        self.momentum = momentum
        self._speed: dict[str, np.ndarray] = {}

    def apply(self, variables: Variables, gradients: Gradients, version: int) -> None:
        rate = _rate(self.learning_rate, version)
        for name, gradient in gradients.items():
            variable = variables[name]
            at, value = (
                (gradient.indices, gradient.values)
                if isinstance(gradient, Rows)
                else (..., gradient)
            )
            move = value * _number_for(value, -rate, name)
            if self.momentum:
                speed = self._speed.setdefault(name, np.zeros_like(variable))
                move += speed[at] * _number_for(value, self.momentum, name)
                speed[at] = move
            variable[at] += move

    def state(self) -> Mapping[str, np.ndarray]:
        return self._speed

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        self._speed = {name: np.array(value) for name, value in state.items()}


class Adagrad(Rule):
    """Adagrad, ``a = a + g²; w = w - rate * g / (sqrt(a) + epsilon)``, which suits rows: those that
    come seldom move further.

    Args:
        learning_rate: a number, or a function of the number of updates so far.
        initial: what ``a`` begins with.
        epsilon: above 0.

    Raises:
        InvalidArgument: a value out of range.
    """

    def __init__(
        self, learning_rate: LearningRate = 0.01, initial: float = 0.1, epsilon: float = 1e-7
    ) -> None:
        _check_rate(learning_rate)
        if not initial >= 0 or not epsilon > 0:
            raise InvalidArgument(
                f"initial is {shown(initial)} and epsilon {shown(epsilon)}; the first is at least "
                "0, the second above 0"
            )
        self.learning_rate = learning_rate
        self.initial, self.epsilon = initial, epsilon
        self._squares: dict[str, np.ndarray] = {}

    def apply(self, variables: Variables, gradients: Gradients, version: int) -> None:
        rate = _rate(self.learning_rate, version)
        for name, gradient in gradients.items():
            variable = variables[name]
            squares = self._squares.setdefault(name, np.full_like(variable, self.initial))
            at, value = (
                (gradient.indices, gradient.values)
                if isinstance(gradient, Rows)
                else (..., gradient)
            )
            epsilon = _number_for(value, self.epsilon, name)
            squares[at] += value * value
            move = _number_for(value, rate, name) * value / (np.sqrt(squares[at]) + epsilon)
            variable[at] -= move

    def state(self) -> Mapping[str, np.ndarray]:
        return self._squares

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        self._squares = {name: np.array(value) for name, value in state.items()}
