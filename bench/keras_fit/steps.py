"""A training step of one's own over a GradientTape, and gradients that no library has touched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from models import loss_of, plain_optimizer

Gradients = Callable[[Any, Any, list[Any]], list[Any]]  # of a tape, a loss and variables


def step_of(net: Any, gradients: Gradients) -> Callable[[Any, Any], Any]:
    """The body of a ``tf.function`` for one batch, which returns the loss."""
    import tensorflow as tf

    variables, optimizer, loss = net.trainable_variables, plain_optimizer(), loss_of()
    optimizer.build(variables)

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            value = loss(y, net(x, training=True))
        optimizer.apply(gradients(tape, value, variables), variables)
        return value

    return step


def own_gradients(tape: Any, loss: Any, variables: list[Any]) -> list[Any]:
    return dense(tape.gradient(loss, variables))


def dense(gradients: Sequence[Any]) -> list[Any]:
    """Those of embeddings, too."""
    import tensorflow as tf

    return [tf.convert_to_tensor(g) for g in gradients]
