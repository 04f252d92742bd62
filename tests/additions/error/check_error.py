"""A new kind of error: a Python class, which is raised on every rank."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import numpy as np

import farandole as fd
import harness
from harness import World


def reduce() -> None:
    fd.init()
    fd.all_reduce(np.ones(9), algorithm="ring", level="fast")


def test_it_is_a_class() -> None:
    assert issubclass(fd.Dummy, fd.Error)
    assert issubclass(fd.Dummy, LookupError)
    assert fd.Dummy.__module__ == "farandole"
    assert fd.Dummy.advice == "look elsewhere"


def test_the_tests_of_errors_hold() -> None:
    tests = harness.HERE / "unit" / "test_errors.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


def test_every_rank_raises_it(spawn: Callable[..., World]) -> None:
    """The rank that raises the error, and the ranks that are notified."""
    world = spawn(2, each=[{"FARANDOLE_TEST_DUMMY": "raise"}, {}])
    world.start(reduce)
    for outcome in world.outcomes():
        assert outcome.error == "Dummy"
        assert "LookupError" in outcome.bases
        assert outcome.verdict == "the dummy raises"
        assert outcome.advice == "look elsewhere"
