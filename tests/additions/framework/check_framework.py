"""A new framework: all ranks average, train, tell failures apart, and leave traces."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import farandole as fd
from harness import World, listen, tell


def train() -> list[float]:
    import farandole.dummy as hvd

    hvd.init()
    mine = float(hvd.rank())
    assert hvd.allreduce([mine, 1.0], "x") == [(hvd.size() - 1) / 2, 1.0]
    assert hvd.allreduce([mine], "y", op=hvd.Max) == [hvd.size() - 1]
    weights = {"w": [1.0, 2.0]}
    optimizer = hvd.Optimizer(weights, rate=0.5)
    for _ in range(2):
        optimizer.step({"w": [mine, 4.0]})
    return weights["w"]


def start_apart() -> None:
    import farandole.dummy as hvd

    hvd.init()
    with pytest.raises(fd.Mismatch, match="'w'"):
        hvd.Optimizer({"w": [float(hvd.rank())]}, rate=1.0).step({"w": [0.0]})


def wait_for_the_dead() -> None:
    import farandole.dummy as hvd

    hvd.init()
    tell("ready")
    if hvd.rank() == 1:
        listen()
    hvd.allreduce([1.0], "late")


def test_ranks_train_as_one(spawn: Callable[..., World]) -> None:
    assert spawn(2, "dummy").run(train) == [[0.5, -2.0]] * 2


def test_weights_are_compared(spawn: Callable[..., World]) -> None:
    spawn(2, "dummy").run(start_apart)


def test_a_death_is_a_verdict(spawn: Callable[..., World]) -> None:
    world = spawn(2, "dummy")
    world.start(wait_for_the_dead)
    world.hear_all()
    world.signal(1, signal.SIGKILL)
    lost = world.outcome(0)
    assert (lost.error, lost.rank) == ("PeerLost", 1)


def test_its_operations_are_in_the_trace(spawn: Callable[..., World], tmp_path: Path) -> None:
    world = spawn(2, "dummy", env={"FARANDOLE_TRACE": os.fspath(tmp_path)})
    world.run(train)
    world.close()
    assert "gradient of w" in json.dumps([p.read_text() for p in tmp_path.rglob("*.json")])
