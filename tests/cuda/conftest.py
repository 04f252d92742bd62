"""Ranks that have the fake driver (fake_libcuda)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import harness
from farandole import _core
from harness import World

Start = Callable[..., World]


@pytest.fixture(scope="module")
def fake_driver() -> str:
    harness.build("fake_libcuda")
    return str(harness.TREE / "fake_libcuda" / "libcuda.so.1")


@pytest.fixture
def start(spawn: Callable[..., World], fake_driver: str) -> Start:
    """start(size, framework, FAKE_CUDA_…=…): ranks that find it where they look for it, and go by
    the host."""

    def started(size: int, framework: str = "", **env: str) -> World:
        told = {"FAKE_LIBCUDA": fake_driver, "FARANDOLE_DEVICE_PATH": "staged", **env}
        return spawn(size, framework, env={"CUDA_VISIBLE_DEVICES": None, **told})

    return started


@pytest.fixture
def in_pieces(start: Start) -> Start:
    """The same, for ranks that cut arrays of more than 4 KiB into pieces."""

    def started(size: int, framework: str = "", **env: str) -> World:
        return start(size, framework, **{"FARANDOLE_STAGED_PIECE_BYTES": "4096", **env})

    return started


@pytest.fixture
def by_steps(start: Start) -> Start:
    """The same, for ranks whose collectives go by steps, in pieces of 64 KiB."""
    if not _core.kernel_compiler():
        pytest.skip("this build has no kernels: there was no compiler for them")

    def started(size: int, **env: str) -> World:
        told = {"FARANDOLE_DEVICE_PATH": "step", "FARANDOLE_DEVICE_BUCKET_BYTES": "65536"}
        return start(size, **{**told, **env})

    return started


@pytest.fixture
def there(by_steps: Start) -> Start:
    """The same, for ranks of PyTorch that do not compare weights."""

    def started(size: int, **env: str) -> World:
        return by_steps(size, **{"framework": "torch", "FARANDOLE_CHECK_WEIGHTS": "off", **env})

    return started


@pytest.fixture(scope="module")
def fake_nccl() -> str:
    harness.build("fake_libnccl")
    return str(harness.TREE / "fake_libnccl" / "libnccl.so.2")


@pytest.fixture
def by_nccl(by_steps: Start, fake_nccl: str) -> Start:
    """The same, for ranks of level fast with a device each, which go by the fake NCCL. `hosts`: how
    many ranks each of several hosts has, as far as they know."""

    def started(size: int, hosts: str = "", **env: str) -> World:
        told = {
            "FAKE_LIBNCCL": fake_nccl,
            "FARANDOLE_NCCL": fake_nccl,
            "FARANDOLE_DEVICE_PATH": "nccl",
            "FARANDOLE_LEVEL": "fast",
            "FAKE_CUDA_DEVICES": str(size),
        }
        apart = {"FARANDOLE_SPLIT_HOSTS": hosts, "FARANDOLE_INSECURE": "1"} if hosts else {}
        return by_steps(size, **{**told, **apart, **env})

    return started
