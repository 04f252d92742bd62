"""What a TensorFlow program sees when a rank dies or does not come, and what a timeline shows."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

from harness import World, tell

Spawn = Callable[..., World]
START = 100.0  # seconds: two ranks trace, and others want the cores
LAYERS = 8
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
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, layers)
        for layer, event, gradient in zip(layers, reduced, gradients, strict=True):
            layer.assign_sub(0.1 * passing(gradient, event.set))

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
            (e["ts"], e["ts"] + e["dur"], e["name"].rpartition("/")[2])
            for e in events
            if e.get("cat") == "operation" and e["pid"] == rank and "/gradients/" in e["name"]
        )
        last_first = [f"layer{i}" for i in reversed(range(LAYERS))]
        assert [name for _, _, name in reductions] == last_first * STEPS
        for (_, end, name), (begin_of_next, _, _) in pairwise(reductions):
            assert end <= begin_of_next, f"{name} was not done when the next was asked for"
