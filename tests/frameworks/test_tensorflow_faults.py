"""The errors of a TensorFlow program when a rank dies or does not come, and its timelines."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

from harness import World, tell

Spawn = Callable[..., World]
START = 100.0  # seconds: two ranks trace, and others want the cores
LAYERS = 8
# By which a step reduces and updates.
WAYS = ("tape", "groups", "v1", "keras", "sparse", "loop", "fit", "model")
STEPS = 3


def begin() -> None:
    import tensorflow as tf

    import farandole.tensorflow as hvd

    tf.config.threading.set_inter_op_parallelism_threads(2)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.random.set_seed(1)  # the same weights on every rank
    hvd.init()


def make_step() -> Callable[[], object]:
    import tensorflow as tf

    import farandole.tensorflow as hvd

    layers = [tf.Variable(tf.random.normal([4, 4]), name=f"layer{i}") for i in range(LAYERS)]
    x = tf.random.normal([128, 4])

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            y = x
            for layer in layers:
                y = tf.tanh(y @ layer)
            loss = tf.reduce_mean(y)
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, layers)
        for layer, gradient in zip(layers, gradients, strict=True):
            layer.assign_sub(0.1 * gradient)

    return step


def train_until_the_end() -> None:
    step = make_step()
    step()
    tell("trains")
    while True:
        step()


def leave_a_name_to_rank_0() -> None:
    import tensorflow as tf

    import farandole.tensorflow as hvd

    step = make_step()
    step()
    if hvd.rank() == 0:
        tf.function(lambda: hvd.allreduce(tf.ones(2), name="alone"))()


def record_gated_steps(file: str) -> None:
    """Backprop goes on to a layer only when the gradient of the one behind it has been reduced.

    Both are ops that TensorFlow is told nothing of (stateless), so that they have no order but the
    data's. Gradients that were reduced at the end of a step would be waited for in vain.
    """
    import tensorflow as tf

    import farandole.tensorflow as hvd

    layers = [tf.Variable(tf.random.normal([4, 4]), name=f"layer{i}") for i in range(LAYERS)]
    reduced = [threading.Event() for _ in layers]

    class Noting:
        """No compression. It notes what is reduced, which a step gets only once all is."""

        order = cycle(reversed(range(LAYERS)))  # in which gradients are sent

        @classmethod
        def compress(cls, tensor: tf.Tensor) -> tuple[tf.Tensor, int]:
            return tensor, next(cls.order)

        @staticmethod
        def decompress(tensor: tf.Tensor, layer: int) -> tf.Tensor:
            return passing(tensor, reduced[layer].set)

    def wait_for(layer: int) -> None:
        assert reduced[layer].wait(START / 3), f"layer{layer} was not reduced during backprop"

    def passing(tensor: tf.Tensor, then: Callable[[], None]) -> tf.Tensor:
        def visit(value: np.ndarray) -> np.ndarray:
            then()
            return value

        result = tf.numpy_function(visit, [tensor], tensor.dtype, stateful=False)
        return tf.ensure_shape(result, tensor.shape)

    def gate(y: tf.Tensor, behind: int) -> tf.Tensor:
        forward = tf.custom_gradient(
            lambda y: (tf.identity(y), lambda dy: passing(dy, lambda: wait_for(behind)))
        )
        return forward(y)

    x = tf.random.normal([128, 4])

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            y = x
            for i, layer in enumerate(layers):
                y = gate(tf.tanh(y @ layer), i + 1) if i + 1 < LAYERS else y @ layer
            loss = tf.reduce_mean(y)
        tape = hvd.DistributedGradientTape(tape, compression=Noting)
        for layer, gradient in zip(layers, tape.gradient(loss, layers), strict=True):
            layer.assign_sub(0.1 * gradient)

    def gated_step() -> None:
        for event in reduced:
            event.clear()
        step()

    gated_step()
    hvd.barrier()
    hvd.start_timeline(file)
    for _ in range(STEPS):
        gated_step()
    hvd.stop_timeline()


def lose_a_rank_between_two_gradients(way: str) -> None:
    """The last variable's gradient is reduced first; then rank 1 ends, before the other's."""
    import tensorflow as tf

    import farandole.keras
    import farandole.strategy
    import farandole.tensorflow as hvd

    strategy = farandole.strategy.MirroredStrategy()

    def end() -> np.ndarray:
        time.sleep(0.2)  # the other gradient has been reduced, and could be applied
        if hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return np.float32(1)

    @tf.custom_gradient
    def slow(v: tf.Tensor) -> tuple[tf.Tensor, Callable[..., tf.Tensor]]:
        def gradient(dy: tf.Tensor) -> tf.Tensor:
            # A value that no graph optimizer can compute before the graph runs.
            waited = tf.numpy_function(lambda _: end(), [v], tf.float32, stateful=False)
            return dy * tf.ensure_shape(waited, [])

        return tf.identity(v), gradient

    first, second = tf.Variable(1.0, name="first"), tf.Variable([1.0], name="second")
    counts: list[tf.Variable] = []
    optimizer: Any = None
    if way == "v1":
        optimizer = hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.5))
    elif way not in ("tape", "groups"):
        import keras

        with strategy.scope() if way in ("loop", "fit") else contextlib.nullcontext():
            first, second = tf.Variable(1.0, name="first"), tf.Variable([1.0], name="second")
            optimizer = keras.optimizers.SGD(0.5, weight_decay=0.5)
            if way in ("fit", "model"):
                model = _model_of(slow)
                model.compile(optimizer, lambda _, out: out)
                model(tf.ones([1, 1]))
                first, second = (w.value for w in model.trainable_weights)
            optimizer.build([first, second])
        if way in ("keras", "sparse"):
            optimizer = hvd.DistributedOptimizer(optimizer)
        elif way == "loop":  # others count steps as Keras does, also one that fails
            counts = [optimizer.iterations.value]
    variables = [first, second]

    def loss_of() -> tf.Tensor:
        shown = tf.gather(second, [0]) if way == "sparse" else second
        return slow(first) * 2.0 + shown[0]

    def step() -> None:
        if way == "v1":
            optimizer.apply_gradients(optimizer.compute_gradients(loss_of, variables))
            return
        with tf.GradientTape() as tape:
            loss = loss_of()
        if way in ("tape", "groups"):
            tape = hvd.DistributedGradientTape(tape, groups=2 if way == "groups" else None)
        gradients = tape.gradient(loss, variables)
        if optimizer is None:
            for variable, gradient in zip(variables, gradients, strict=True):
                variable.assign_sub(0.5 * gradient)
        else:
            optimizer.apply_gradients(zip(gradients, variables, strict=True))

    def fit() -> None:
        trained = farandole.keras.Model(model) if way == "model" else model
        trained.fit(np.ones([2, 1]), np.ones([2, 1]), batch_size=2, verbose=0)

    run = (lambda: strategy.run(step)) if way == "loop" else step
    failed = pytest.raises((tf.errors.OpError, farandole.PeerLost), match="rank 1")
    with failed:
        (fit if way in ("fit", "model") else tf.function(run))()
    assert [float(v) for v in map(tf.squeeze, variables)] == [1.0, 1.0]
    assert [int(count) for count in counts] == [0] * len(counts)


def _model_of(slow: Any) -> Any:
    """Keras' model with the two variables."""
    import keras
    import tensorflow as tf

    class Slow(keras.layers.Layer):
        def build(self, _: object) -> None:
            self.first = self.add_weight(shape=(), initializer="ones", name="first")
            self.second = self.add_weight(shape=(1,), initializer="ones", name="second")

        def call(self, x: Any) -> Any:
            return x * (slow(tf.identity(self.first.value)) * 2.0 + self.second.value)

    return keras.Sequential([keras.Input((1,)), Slow()])


@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_fails_halfway_updates_nothing(spawn: Spawn, way: str) -> None:
    world = spawn(2, "tensorflow" if way in ("tape", "groups", "v1") else "keras on tensorflow")
    world.run(begin, timeout=START)
    world.start(lose_a_rank_between_two_gradients, way)
    outcome = world.outcomes(timeout=START, ranks=[0])[0]
    assert outcome.error is None, outcome.error


def test_survivors_name_the_killed_rank(spawn: Spawn) -> None:
    world = spawn(2, "tensorflow")
    world.run(begin, timeout=START)
    world.start(train_until_the_end)
    assert [world.hear(r, START) for r in range(2)] == ["trains"] * 2
    world.signal(1, signal.SIGKILL)
    outcome = world.outcome(0)
    assert outcome.error == "UnknownError", outcome.text
    assert outcome.text.startswith("farandole.PeerLost: rank 1"), outcome.text
    assert "killed by SIGKILL" in outcome.text or "SIGKILL" in outcome.text


def test_who_does_not_come_is_named_with_the_tensor(spawn: Spawn) -> None:
    world = spawn(2, "tensorflow", env={"FARANDOLE_WARN_AFTER": "0.3", "FARANDOLE_TIMEOUT": "2"})
    world.run(begin, timeout=START)
    world.start(leave_a_name_to_rank_0)
    first, second = world.outcomes(timeout=START)
    assert first.error == "DeadlineExceededError"
    alone = "all_reduce 'leave_a_name_to_rank_0.<lambda>/alone'"
    assert f"{alone} was not complete" in first.text
    assert "not submitted by rank 1" in first.text
    assert second.error is None
    assert f"{alone} has waited" in world.output(0)


def test_gradients_are_reduced_while_others_are_computed(spawn: Spawn, tmp_path: Path) -> None:
    world = spawn(2, "tensorflow")
    world.run(begin, timeout=START)
    file = tmp_path / "timeline.json"
    world.run(record_gated_steps, str(file), timeout=START)
    events = json.loads(file.read_text())["traceEvents"]
    for rank in range(2):
        reductions = sorted(
            # The last one's name says that the flag goes with it: "layer0 and 1 more".
            (e["ts"], e["ts"] + e["dur"], e["name"].rpartition("/")[2].partition(" ")[0])
            for e in events
            if e.get("cat") == "operation" and e["pid"] == rank and "/gradients/" in e["name"]
        )
        last_first = [f"layer{i}" for i in reversed(range(LAYERS))]
        assert [name for _, _, name in reductions] == last_first * STEPS
        for (_, end, name), (begin_of_next, _, _) in pairwise(reductions):
            assert end <= begin_of_next, f"{name} was not done when the next was asked for"
