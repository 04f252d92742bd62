"""The programs of `make device` for JAX and TensorFlow, with the host in place of devices. Those
for PyTorch run in tests/cuda/test_device_report.py."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import World

PROGRAMS = Path(__file__).parent.parent.parent / "bench" / "device"


def all_cases(program: str) -> dict[str, str]:
    """What each says."""
    sys.path.append(str(PROGRAMS))
    cases = importlib.import_module("cases")
    cases.asked.device = "cpu"
    module = importlib.import_module(program)
    module.begin()
    return {name: cases.outcome(case) for name, case in module.CASES.items()}


@pytest.mark.parametrize("framework", ["jax", "tensorflow"])
def test_cases(spawn: Callable[..., World], framework: str) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    for said in spawn(2, framework).run(all_cases, f"{framework}_programs"):
        assert said["training"].startswith("ok: "), said
        assert all(each.startswith("ok: ") or "no optax" in each for each in said.values()), said
