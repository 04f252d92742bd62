"""A new transport: the conformance tests pass through it, and so do ranks and their failures."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import farandole as fd
import harness
from farandole import _core
from harness import World, listen, tell

PLANNERS = [p["name"] for p in _core.schedule.planners(collective="all_reduce")]


def reduce(algorithm: str) -> None:
    fd.init()
    mine = np.full(5000, fd.rank() + 1.0)
    total = fd.all_reduce(mine, algorithm=algorithm, level="fast")
    assert (total == fd.size() * (fd.size() + 1) / 2).all()


def wait_for_the_dead() -> None:
    reduce("ring")
    tell("ready")
    if fd.rank() == 1:
        listen()
    reduce("ring")


@pytest.mark.parametrize("test", ["channels", "chaos", "simulated_worlds", "threads_as_ranks"])
def test_the_conformance_tests_pass_through_it(test: str, tmp_path: Path) -> None:
    used = tmp_path / "used"
    program = [harness.TREE / "farandole_tests", test]
    env = os.environ | {"FARANDOLE_TEST_DUMMY": str(used)}
    done = subprocess.run(program, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    assert used.exists()


@pytest.mark.parametrize("algorithm", PLANNERS)
def test_ranks_use_it(spawn: Callable[..., World], algorithm: str, tmp_path: Path) -> None:
    used = tmp_path / "used"
    spawn(3, env={"FARANDOLE_TEST_DUMMY": str(used)}).run(reduce, algorithm)
    assert used.exists()


def test_a_death_is_a_verdict(spawn: Callable[..., World]) -> None:
    world = spawn(2)
    world.start(wait_for_the_dead)
    world.hear_all()
    world.signal(1, signal.SIGKILL)
    lost = world.outcome(0)
    assert (lost.error, lost.rank) == ("PeerLost", 1)
