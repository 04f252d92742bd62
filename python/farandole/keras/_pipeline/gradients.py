"""Forward and backward of a stage, as each backend has them.

An *engine* keeps what backward needs from one call to the other. Inputs and outputs are flat lists
of tensors. Those of floating point have gradients; others have None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import keras

from farandole.keras._pipeline.computing import Computing


class Made(NamedTuple):
    """The results of a forward pass."""

    outputs: list[Any]
    loss: Any  # this stage's part; None: nothing
    kept: Any  # for backward


class Engine(Protocol):
    def train(self, inputs: Any, y: Any, w: Any, share: Any) -> Made:
        """The forward pass of a training step."""

    def test(self, inputs: Any, y: Any, w: Any, share: Any) -> Made:
        """A forward pass to the loss, without gradients."""

    def predict(self, inputs: Any) -> list[Any]:
        """The outputs, without gradients."""

    def backward(self, made: Made, gradients: Sequence[Any] | None) -> tuple[list[Any], list[Any]]:
        """The gradients of the inputs, and of the stage's trainable variables.

        Args:
            gradients: of the outputs; None on the last stage.
        """


def engine_of(computing: Computing) -> Engine:
    """The engine for the backend of Keras."""
    kinds: dict[str, Any] = {"tensorflow": _TensorFlow, "torch": _Torch, "jax": _Jax}
    engine: Engine = kinds[keras.backend.backend()](computing)
    return engine


def _is_number(tensor: Any) -> bool:
    return bool(keras.backend.is_float_dtype(keras.backend.standardize_dtype(tensor.dtype)))


def targets_of(made: Made, gradients: Sequence[Any] | None, one: Any) -> list[tuple[Any, Any]]:
    """The tensors that backward begins at, each with its gradient: outputs that a later stage has
    used, and the loss of this one.

    Args:
        one: the gradient of a loss.
    """
    pairs = [] if gradients is None else zip(made.outputs, gradients, strict=True)
    found = [(output, gradient) for output, gradient in pairs if gradient is not None]
    return found if made.loss is None else [*found, (made.loss, one)]


class _TensorFlow:
    """A tape around a compiled function, which keeps what its gradient needs."""

    def __init__(self, computing: Computing) -> None:
        import tensorflow as tf

        self._tf, self._module = tf, computing.module

        def compiled(function: Any) -> Any:
            if computing.module.run_eagerly:
                return function
            return tf.function(function, reduce_retracing=True, autograph=False)  # as Keras

        self._train, self._test = compiled(computing.train), compiled(computing.test)
        self._predict = compiled(computing.predict)

    def train(self, inputs: Any, y: Any, w: Any, share: Any) -> Made:
        tf = self._tf
        numbers = [each for each in keras.tree.flatten(inputs) if _is_number(each)]
        with tf.GradientTape() as tape:
            tape.watch(numbers)
            outputs, loss = self._train(inputs, y, w, tf.constant(share))
        return Made(outputs, loss, (tape, keras.tree.flatten(inputs)))

    def test(self, inputs: Any, y: Any, w: Any, share: Any) -> Made:
        outputs, loss = self._test(inputs, y, w, self._tf.constant(share))
        return Made(outputs, loss, None)

    def predict(self, inputs: Any) -> list[Any]:
        outputs: list[Any] = self._predict(inputs)
        return outputs

    def backward(self, made: Made, gradients: Sequence[Any] | None) -> tuple[list[Any], list[Any]]:
        tape, inputs = made.kept
        one = None if made.loss is None else self._tf.ones_like(made.loss)
        pairs = targets_of(made, gradients, one)
        variables = [v.value for v in self._module.trainable_variables]
        if not pairs:
            return [None] * len(inputs), [None] * len(variables)
        found = tape.gradient(
            [target for target, _ in pairs],
            [each if _is_number(each) else self._tf.constant(0.0) for each in inputs] + variables,
            output_gradients=[gradient for _, gradient in pairs],
        )
        # A gradient of an embedding's rows has no memory of its own to send.
        dense = [None if g is None else self._tf.convert_to_tensor(g) for g in found]
        return dense[: len(inputs)], dense[len(inputs) :]


class _Torch:
    """PyTorch's own graph."""

    def __init__(self, computing: Computing) -> None:
        import torch

        self._torch, self._computing = torch, computing

    def train(self, inputs: Any, y: Any, w: Any, share: Any) -> Made:
        begun = keras.tree.map_structure(self._begun, inputs)
        with self._torch.enable_grad():
            outputs, loss = self._computing.train(begun, y, w, share.tolist())
        return Made(outputs, loss, keras.tree.flatten(begun))

    @staticmethod
    def _begun(tensor: Any) -> Any:
        return tensor.detach().requires_grad_() if _is_number(tensor) else tensor

    def test(self, inputs: Any, y: Any, w: Any, share: Any) -> Made:
        with self._torch.no_grad():
            return Made(*self._computing.test(inputs, y, w, share.tolist()), None)

    def predict(self, inputs: Any) -> list[Any]:
        with self._torch.no_grad():
            return self._computing.predict(inputs)

    def backward(self, made: Made, gradients: Sequence[Any] | None) -> tuple[list[Any], list[Any]]:
        variables = [v.value for v in self._computing.module.trainable_variables]
        sources = [*made.kept, *variables]
        one = None if made.loss is None else self._torch.ones_like(made.loss)
        pairs = [(t, g) for t, g in targets_of(made, gradients, one) if t.requires_grad]
        places = [i for i, each in enumerate(sources) if each.requires_grad]
        found: list[Any] = [None] * len(sources)
        if pairs:
            values = self._torch.autograd.grad(
                [target for target, _ in pairs],
                [sources[i] for i in places],
                [gradient for _, gradient in pairs],
                allow_unused=True,
            )
            for i, value in zip(places, values, strict=True):
                found[i] = value
        return found[: len(made.kept)], found[len(made.kept) :]


class _Jax:
    """A function of the variables' values; backward is what jax.vjp gives."""

    def __init__(self, computing: Computing) -> None:
        import jax

        self._jax, self._module = jax, computing.module
        eager = computing.module.run_eagerly

        def pure(function: Any) -> Any:
            def call(trainable: Any, numbers: Any, rest: Any, others: Any, *data: Any) -> Any:
                module = self._module
                variables = [*module.trainable_variables, *self._others]
                mapping = list(zip(variables, [*trainable, *others], strict=True))
                inputs = keras.tree.map_structure(
                    lambda number, other: other if number is None else number,
                    numbers, rest, none_is_leaf=True,
                )  # fmt: skip
                with keras.StatelessScope(mapping, collect_losses=True) as scope:
                    outputs, loss = function(inputs, *data)
                after = [scope.get_current_value(v) for v in self._others]
                floating = [each if _is_number(each) else None for each in outputs]
                return (floating, loss), (outputs, loss, after)

            return call if eager else jax.jit(call)

        self._train, self._test = pure(computing.train), pure(computing.test)
        self._predict = pure(lambda inputs: (computing.predict(inputs), None))

    @property
    def _others(self) -> list[Any]:
        """Variables that a step changes by itself."""
        return [*self._module.non_trainable_variables, *self._module.metrics_variables]

    def _values(self) -> tuple[list[Any], list[Any]]:
        return (
            [v.value for v in self._module.trainable_variables],
            [v.value for v in self._others],
        )

    def _parted(self, inputs: Any) -> tuple[Any, Any]:
        def part(wanted: bool) -> Any:
            return keras.tree.map_structure(
                lambda each: each if _is_number(each) is wanted else None, inputs
            )

        return part(True), part(False)

    def _keep(self, after: Sequence[Any]) -> None:
        for variable, value in zip(self._others, after, strict=True):
            variable.assign(value)

    def train(self, inputs: Any, y: Any, w: Any, share: Any) -> Made:
        trainable, others = self._values()
        numbers, rest = self._parted(inputs)

        def call(trainable: Any, numbers: Any) -> Any:
            return self._train(trainable, numbers, rest, others, y, w, share)

        (floating, _), back, (outputs, loss, after) = self._jax.vjp(
            call, trainable, numbers, has_aux=True
        )
        self._keep(after)
        return Made(outputs, loss, (back, floating, inputs))

    def test(self, inputs: Any, y: Any, w: Any, share: Any) -> Made:
        trainable, others = self._values()
        _, (outputs, loss, after) = self._test(
            trainable, *self._parted(inputs), others, y, w, share
        )
        self._keep(after)
        return Made(outputs, loss, None)

    def predict(self, inputs: Any) -> list[Any]:
        trainable, others = self._values()
        outputs: list[Any]
        _, (outputs, _, _) = self._predict(trainable, *self._parted(inputs), others)
        return outputs

    def backward(self, made: Made, gradients: Sequence[Any] | None) -> tuple[list[Any], list[Any]]:
        back, floating, inputs = made.kept
        zeros = self._jax.numpy.zeros_like
        given = gradients if gradients is not None else [None] * len(floating)
        begins = [
            None if each is None else zeros(each) if gradient is None else gradient
            for each, gradient in zip(floating, given, strict=True)
        ]
        one = None if made.loss is None else self._jax.numpy.ones_like(made.loss)
        of_variables, of_numbers = back((begins, one))
        flat = (each for each in keras.tree.flatten(of_numbers) if each is not None)
        of_inputs = [
            next(flat) if _is_number(each) else None for each in keras.tree.flatten(inputs)
        ]
        return of_inputs, list(of_variables)
