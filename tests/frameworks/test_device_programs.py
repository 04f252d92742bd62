"""The programs of `make device` for each framework, with the host in place of devices."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import farandole as fd
from harness import World

FOLDER = Path(__file__).parent.parent.parent / "bench" / "device"
PROGRAMS = {
    "torch_hooks": "torch",
    "torch_groups": "torch",
    "jax_programs": "jax",
    "tensorflow_programs": "tensorflow",
}


def all_cases(program: str) -> dict[str, str]:
    """The outcome of each case, by name."""
    sys.path.append(str(FOLDER))
    cases = importlib.import_module("cases")
    cases.asked.device = "cpu"
    module = importlib.import_module(program)
    module.begin()
    said = {name: cases.outcome(case) for name, case in module.CASES.items()}
    getattr(module, "end", fd.shutdown)()
    return said


@pytest.mark.parametrize("program", PROGRAMS)
def test_cases(spawn: Callable[..., World], program: str) -> None:
    framework = PROGRAMS[program]
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    for said in spawn(2, framework).run(all_cases, program):
        assert any(line.startswith("ok: ") for line in said.values()), said
        assert all(line.startswith("ok: ") or "no optax" in line for line in said.values()), said
