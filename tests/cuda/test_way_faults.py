"""Ranks that are killed, devices that are late and calls of the driver that fail, while a
collective goes by each of the devices' ways: all ranks hear who it was, and no stream is left
waiting. Ranks over the fake driver."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
from fake_device import Rank
from fault_work import (
    UNAVAILABLE,
    Found,
    all_hear,
    device_of_this_rank,
    failed_on_rank_1,
    how_it_went_wrong,
    waits_with,
)
from test_device_faults import goes_wrong

from harness import World

Start = Callable[..., World]

EACH_HAS_A_DEVICE = {"FAKE_CUDA_DEVICES": "3"}
# By which path, of how many elements, and what ranks are told.
WAYS: dict[str, tuple[str, int, dict[str, str]]] = {
    "steps": ("step", 50_000, {}),
    "steps with older handles": ("step", 50_000, {"FAKE_CUDA_VIRTUAL_MEMORY": "0"}),
    "steps without memory operations": (
        "step", 50_000, {**EACH_HAS_A_DEVICE, "FAKE_CUDA_MEMORY_OPERATIONS": "0"},
    ),
    "one kernel": ("spin", 1000, {}),
    "lanes": ("lanes", 1000, {}),
    "lanes in pieces": ("lanes", 50_000, {}),
}  # fmt: skip
OF_EACH_KIND = [way for way in WAYS if way not in ("steps with older handles", "lanes in pieces")]


def waits(path: str, count: int, timeout: float | None, **more: Any) -> Found:
    rank = Rank("functions")
    rank.device = device_of_this_rank()
    return waits_with(rank, path, count, timeout, **more)


def waits_for(late: tuple[int, ...], how: str, path: str, count: int, timeout: float) -> Found:
    return waits(path, count, timeout, late=late, how=how)


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_is_killed(by_steps: Start, way: str) -> None:
    path, count, env = WAYS[way]
    world = by_steps(3, FARANDOLE_DEVICE_PATH=path, **env)
    world.start(waits, path, count, None)
    world.hear_all()
    world.signal(1, signal.SIGKILL)
    verdict, kind, blamed = all_hear(world, killed=1)
    assert "rank 1" in verdict
    assert "was killed by SIGKILL during all_reduce" in verdict
    assert (kind, blamed) == ("PeerLost", [1])


def blamed_for(world: World, late: tuple[int, ...], how: str, path: str, count: int) -> str:
    """The verdict of all ranks, if these ranks' devices are late."""
    world.start(waits_for, late, how, path, count, 1.0)
    world.hear_all()
    for rank in late:
        world.say(rank, "go")
    verdict, kind, blamed = all_hear(world)
    assert "all_reduce #" in verdict
    assert "'gradient' was not complete after " in verdict
    assert (kind, blamed) == ("Stalled", list(late))
    return verdict


@pytest.mark.parametrize("way", OF_EACH_KIND)
def test_a_device_that_is_late(by_steps: Start, way: str) -> None:
    path, count, env = WAYS[way]
    world = by_steps(3, FARANDOLE_DEVICE_PATH=path, **env)
    said = blamed_for(world, (1,), "busy", path, count)
    assert said.endswith("; not reached by the device of rank 1")


def test_two_devices_that_are_late(by_steps: Start) -> None:
    said = blamed_for(by_steps(3), (1, 2), "busy", "step", 50_000)
    assert said.endswith("; not reached by the devices of ranks 1-2")


def test_a_device_that_answers_nothing(by_steps: Start) -> None:
    """It cannot say itself that it is late; the others can."""
    said = blamed_for(by_steps(2), (1,), "stopped", "step", 50_000)
    assert said.endswith("; not reached by the device of rank 1")


# The nth call of an operation, in their order, and what the rank tried. One operation went before.
# Those of steps: test_step_faults.py.
CALLS = [
    ("one kernel", "cuLaunchKernel", 1, "launch farandole_one_shot_float32"),
    ("lanes", "cuLaunchKernel", 1, "launch farandole_lanes_float32"),
]


@pytest.mark.parametrize(("way", "call", "nth", "tried"), CALLS)
def test_a_call_of_the_driver_that_fails(
    by_steps: Start, way: str, call: str, nth: int, tried: str
) -> None:
    path, _, env = WAYS[way]
    world = by_steps(2, FARANDOLE_DEVICE_PATH=path, **env)
    failed_on_rank_1(how_it_went_wrong(world, goes_wrong, call, nth, UNAVAILABLE, path), tried)
