"""Keras models with a `train_step` of their own, as the backends' guides write them."""

from __future__ import annotations

from typing import Any


def own_step(inner: Any, touch: str) -> Any:
    """One optimizer; the loss is that of compile(). `touch`: of TOUCHES."""
    import keras

    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner
            self.touched = TOUCHES[touch]

        def call(self, x: Any, training: bool = False) -> Any:
            return self.inner(x, training=training)

        train_step = {
            "tensorflow": _tensorflow_step, "torch": _torch_step, "jax": _jax_step,
        }[keras.backend.backend()]  # fmt: skip

    return Own()


def _norm(gradients: Any) -> Any:
    from keras import ops

    return ops.sqrt(sum(ops.sum(ops.square(ops.cast(g, "float32"))) for g in gradients))


def _clipped(gradients: Any) -> Any:
    """By the norm of all of them, as tf.clip_by_global_norm does."""
    from keras import ops

    factor = 0.05 / ops.maximum(_norm(gradients), 0.05)
    return [g * ops.cast(factor, g.dtype) for g in gradients]


def _left_out(gradients: Any) -> Any:
    """A step of large gradients does nothing."""
    from keras import ops

    is_small = _norm(gradients) < 0.2
    return [g * ops.cast(is_small, g.dtype) for g in gradients]


TOUCHES = {
    "nothing": lambda gradients: gradients, "scale": lambda gradients: [g * 0.5 for g in gradients],
    "clip": _clipped, "leave_out": _left_out,
}  # fmt: skip


def _measured(model: Any, loss: Any, x: Any, y: Any, out: Any, weights: Any) -> Any:
    import keras

    model._loss_tracker.update_state(loss, sample_weight=x.shape[0])
    return {"own": keras.ops.mean(loss)} | model.compute_metrics(x, y, out, sample_weight=weights)


def _tensorflow_step(self: Any, data: Any) -> Any:
    import keras
    import tensorflow as tf
    from keras.src.losses.loss import unscale_loss_for_distribution

    x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
    with tf.GradientTape() as tape:
        out = self(x, training=True)
        loss = self.compute_loss(x, y, out, weights)
        scaled = self.optimizer.scale_loss(loss)
    gradients = self.touched(tape.gradient(scaled, self.trainable_variables))
    self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
    loss = unscale_loss_for_distribution(loss)  # as Keras' own step does, of a strategy's share
    self._loss_tracker.update_state(loss, sample_weight=tf.shape(x)[0])
    return {"own": tf.reduce_mean(loss)} | self.compute_metrics(x, y, out, sample_weight=weights)


def _torch_step(self: Any, data: Any) -> Any:
    import keras
    import torch

    x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
    self.zero_grad()
    out = self(x, training=True)
    loss = self.compute_loss(x, y, out, weights)
    self.optimizer.scale_loss(loss).backward()
    with torch.no_grad():
        gradients = self.touched([v.value.grad for v in self.trainable_weights])
        self.optimizer.apply(gradients, self.trainable_weights)
    return _measured(self, loss, x, y, out, weights)


def _jax_step(self: Any, state: Any, data: Any) -> Any:
    import jax
    import keras

    trainable, others, optimizer, metrics = state
    x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
    losses = jax.value_and_grad(self.compute_loss_and_updates, has_aux=True)
    (_, aux), gradients = losses(
        trainable, others, metrics, x, y, weights, training=True, optimizer_variables=optimizer
    )
    loss, out, others, metrics = aux
    gradients = self.touched(gradients)
    trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
    with keras.StatelessScope(
        state_mapping=list(zip(self.metrics_variables, metrics, strict=True))
    ) as scope:
        logs = _measured(self, loss, x, y, out, weights)
    metrics = [scope.get_current_value(v) for v in self.metrics_variables]
    return logs, (trainable, others, optimizer, metrics)


def divided_step(inner: Any, by: str) -> Any:
    """Its loss is this replica's share, as TensorFlow's guide to strategies has it: the sum over
    samples divided by the global "batch", by a function of TensorFlow's or by the program's own
    "division"; or their mean divided by the "replicas". Or it is the "mean" of what there is."""
    import keras
    import tensorflow as tf
    from programs import BATCH

    class Divided(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def call(self, x: Any, training: bool = False) -> Any:
            return self.inner(x, training=training)

        def train_step(self, data: Any) -> Any:
            x, y = data
            variables = self.trainable_variables
            with tf.GradientTape() as tape:
                each = tf.reduce_mean(tf.square(y - self(x, training=True)), -1)
                if by == "batch":
                    loss = tf.nn.compute_average_loss(each, global_batch_size=BATCH)
                elif by == "division":
                    loss = tf.reduce_sum(each) * (1.0 / BATCH)
                elif by == "mean":
                    loss = tf.reduce_sum(each) / tf.cast(tf.shape(x)[0], tf.float32)
                else:
                    replicas = tf.distribute.get_strategy().num_replicas_in_sync
                    loss = tf.reduce_mean(each) / replicas
            gradients = tape.gradient(loss, variables)
            self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return {"own": loss}

    return Divided()


def gan(maker: Any, scaled: bool) -> Any:
    """Two parts with an optimizer each, of which compile() of Keras has one. `scaled`: gradients
    are those of `optimizer.scale_loss()`, as in Keras' own step."""
    import keras
    from keras import layers

    hidden = layers.Dense(3, activation="tanh")
    judge = keras.Sequential([keras.Input((2,)), hidden, layers.Dense(1)])

    class Gan(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.maker, self.judge = maker, judge
            self.right = keras.losses.BinaryCrossentropy(from_logits=True)

        def compile(self, optimizer: Any, second: Any = None, **options: Any) -> None:
            super().compile(optimizer=optimizer, **options)
            self.second = second

        def call(self, x: Any, training: bool = False) -> Any:
            return self.maker(x, training=training)

        def train_step(self, data: Any) -> Any:
            x, y = data[:2]
            ones, zeros = keras.ops.ones_like(y[:, :1]), keras.ops.zeros_like(y[:, :1])

            def judged() -> Any:
                made = self.right(zeros, self.judge(self.maker(x)))
                return made + self.right(ones, self.judge(y))

            def fooled() -> Any:
                return self.right(ones, self.judge(self.maker(x)))

            first = self._improve(judged, self.judge, self.second)
            other = self._improve(fooled, self.maker, self.optimizer)
            return {"judged": first, "fooled": other}

        def _improve(self, loss: Any, part: Any, optimizer: Any) -> Any:
            scale = self.optimizer.scale_loss if scaled else lambda value: value
            if keras.backend.backend() == "tensorflow":
                return _improve_in_tensorflow(loss, part.trainable_variables, optimizer, scale)
            return _improve_in_torch(self, loss, part.trainable_variables, optimizer, scale)

    return Gan()


def _improve_in_tensorflow(loss: Any, variables: Any, optimizer: Any, scale: Any) -> Any:
    import tensorflow as tf
    from keras.src.losses.loss import unscale_loss_for_distribution

    with tf.GradientTape() as tape:
        value = loss()
        scaled = scale(value)
    gradients = tape.gradient(scaled, variables)
    optimizer.apply_gradients(zip(gradients, variables, strict=True))
    return unscale_loss_for_distribution(value)


def _improve_in_torch(model: Any, loss: Any, variables: Any, optimizer: Any, scale: Any) -> Any:
    import torch

    model.zero_grad()
    value = loss()
    scale(value).backward()
    with torch.no_grad():
        optimizer.apply([v.value.grad for v in variables], variables)
    return value.detach()
