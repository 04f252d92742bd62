"""Ranks that have the fake driver (fake_libcuda)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import harness
from harness import World

Start = Callable[..., World]


@pytest.fixture(scope="module")
def fake_driver() -> str:
    harness.build("fake_libcuda")
    return str(harness.TREE / "fake_libcuda" / "libcuda.so.1")


@pytest.fixture
def start(spawn: Callable[..., World], fake_driver: str) -> Start:
    """start(size, FAKE_CUDA_…=…): ranks that find it where they look for it."""

    def started(size: int, **env: str) -> World:
        return spawn(size, env={"FAKE_LIBCUDA": fake_driver, "CUDA_VISIBLE_DEVICES": None, **env})

    return started
