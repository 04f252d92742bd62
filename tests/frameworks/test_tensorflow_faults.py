"""What a TensorFlow program sees when a rank dies or does not come, and what a timeline shows."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

from harness import World, tell

Spawn = Callable[..., World]
START = 100.0  # seconds: TensorFlow is imported on two cores by two ranks
LAYERS = 8
STEPS = 12


def begin() -> None:
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import tensorflow as tf

    import farandole.tensorflow as hvd

    tf.config.threading.set_inter_op_parallelism_threads(2)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()


def make_step(width: int = 4) -> Callable[[], object]:
    import tensorflow as tf

    import farandole.tensorflow as hvd

    layers = [
        tf.Variable(tf.random.normal([width, width], stddev=0.03), name=f"layer{i}")
        for i in range(LAYERS)
    ]
    x = tf.random.normal([128, width])

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


def record_some_steps(file: str) -> None:
    import farandole.tensorflow as hvd

    step = make_step(400)
    step()
    hvd.barrier()
    hvd.start_timeline(file)
    for _ in range(STEPS):
        step()
    hvd.stop_timeline()


def test_survivors_name_the_killed_rank(spawn: Spawn) -> None:
    world = spawn(2)
    world.run(begin, timeout=START)
    world.start(train_until_the_end)
    assert [world.hear(r, START) for r in range(2)] == ["trains"] * 2
    when = world.signal(1, signal.SIGKILL)
    outcome = world.outcome(0)
    assert outcome.error == "UnknownError", outcome.text
    assert "rank 1" in outcome.text
    assert "killed by SIGKILL" in outcome.text or "SIGKILL" in outcome.text
    assert outcome.ended - when < 5


def test_who_does_not_come_is_named_with_the_tensor(spawn: Spawn) -> None:
    world = spawn(2, env={"FARANDOLE_WARN_AFTER": "0.3", "FARANDOLE_TIMEOUT": "2"})
    world.run(begin, timeout=START)
    world.start(leave_a_name_to_rank_0)
    began = time.monotonic()
    first, second = world.outcomes(timeout=START)
    assert first.error == "DeadlineExceededError"
    alone = "all_reduce 'leave_a_name_to_rank_0.<lambda>/alone'"
    assert f"{alone} was not complete" in first.text
    assert "not submitted by rank 1" in first.text
    assert second.error is None
    assert time.monotonic() - began < START
    assert f"{alone} has waited" in world.output(0)


def test_gradients_are_reduced_while_others_are_computed(spawn: Spawn, tmp_path: Path) -> None:
    world = spawn(2)
    world.run(begin, timeout=START)
    file = tmp_path / "timeline.json"
    world.run(record_some_steps, str(file), timeout=START)
    events = json.loads(file.read_text())["traceEvents"]
    for rank in range(2):
        mine = [e for e in events if e.get("cat") == "operation" and e["pid"] == rank]
        steps = [e for e in mine if "/gradients of a step" in e["name"]]
        assert len(steps) == STEPS
        early = backwards = 0
        for at, step in enumerate(steps):
            until = steps[at + 1]["ts"] if at + 1 < len(steps) else float("inf")
            ops = sorted(
                (e["ts"], e["ts"] + e["dur"], e["name"])
                for e in mine
                if "/gradients/layer" in e["name"] and step["ts"] <= e["ts"] < until
            )
            assert len(ops) == LAYERS, ops
            backwards += f"/gradients/layer{LAYERS - 1}" in ops[0][2]
            busy = sum(end - begin for begin, end, _ in ops)
            # Back to back, they would take as long as they are busy.
            early += ops[-1][1] - ops[0][0] > 2 * busy
        # A rank that is not given a core submits late, and then all at once: not in every step.
        assert early >= 2, "gradients were reduced one after the other at the end of the steps"
        assert backwards >= 2, "the last layer's gradient is there first, but is not reduced first"
