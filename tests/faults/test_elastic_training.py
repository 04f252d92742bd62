"""Trainings under `farandole run --min-np`, while ranks die and join."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_elastic_jobs import QUICK, worlds

from harness import World, launch

Spawn = Callable[..., World]
pytestmark = pytest.mark.xdist_group("elastic training")  # its job runs once


def program(name: str, *packages: str) -> list[str]:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    return [sys.executable, str(Path(__file__).with_name(name))]


@pytest.fixture(scope="module")
def ends() -> list[dict[str, Any]]:
    """The results of the last three ranks of a job that lost three workers and took in three."""
    command = [*program("elastic_training.py", "torch"), "3"]
    done = launch(3, command, "--min-np=2", *QUICK)
    print(done.stderr)
    assert worlds(done) == [
        "workers 0, 1, 2", "workers 0, 2",
        "workers 0, 2, 3", "workers 2, 3",
        "workers 2, 3, 4", "workers 2, 3",
        "workers 2, 3, 5",
    ]  # fmt: skip
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_all_ranks_have_the_same_bits(ends: list[dict[str, Any]]) -> None:
    assert ends == ends[:1] * 3


def test_sums_over_ranks_give_what_one_process_comes_to(
    ends: list[dict[str, Any]], spawn: Spawn
) -> None:
    from elastic_training import serial

    (expected,) = spawn(1, "torch").run(serial)
    assert ends[0]["sums"] == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("size", [1, 4])
def test_logical_ranks_give_the_bits_of_a_job_that_loses_nobody(
    ends: list[dict[str, Any]], spawn: Spawn, size: int
) -> None:
    from elastic_training import bits_of_any_number

    for losses, weights in spawn(size, "torch").run(bits_of_any_number):
        assert ends[0]["whole"] == [losses, weights]


def test_each_sample_of_an_epoch_is_processed_once(ends: list[dict[str, Any]]) -> None:
    """Counts exclude steps that were undone, whose samples are processed again."""
    assert ends[0]["counts"] == [2] * 60


def test_fit_goes_on_with_the_ranks_that_are_left() -> None:
    """Four batches of an epoch on each of three ranks, six on each of two."""
    command = program("elastic_fit.py", "keras", "tensorflow")
    rests = ("--blacklist-cooldown-range", "100", "100", "--no-prefix")
    done = launch(
        3, command, "--min-np=2", *rests, KERAS_BACKEND="tensorflow", TF_CPP_MIN_LOG_LEVEL="3"
    )
    assert worlds(done) == ["workers 0, 1, 2", "workers 0, 2"]
    ends = [json.loads(line) for line in done.stdout.splitlines()]
    assert ends == ends[:1] * 2
    assert ends[0]["begun"] == [[3, 0, 0], [2, 1, 1]]
    assert ends[0]["epoch"] == 3
    assert ends[0]["steps"] == 4 + 2 + 6 + 6
