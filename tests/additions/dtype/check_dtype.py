"""A new dtype: folds, scales and neutral elements of the core, and numpy's results on ranks."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import farandole as fd
import harness
from core_testing import testing
from farandole import _core, _world, cli
from harness import World

sys.path.append(str(Path(harness.__file__).parent / "ranks"))
import test_collectives

NUMPY = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum,
         "product": np.multiply}  # fmt: skip
MOST = np.iinfo(np.int64).max


def by_address(array: np.ndarray[Any, Any]) -> _core.Buffer:
    """numpy has one letter for int64 and longlong."""
    return _core.Buffer(array.ctypes.data, array.size, "longlong", array)


def check_on_ranks() -> None:
    fd.init()
    size, factors = fd.size(), np.arange(1, fd.size() + 1)
    for count in (1, 1000, 100_003):
        x = np.arange(count) * (fd.rank() + 1)
        out = np.zeros_like(x)
        fd.all_reduce(by_address(x), out=by_address(out))
        assert (out == np.arange(count) * factors.sum()).all()
        fd.all_reduce(by_address(x), op="mean", out=by_address(out))
        assert (out == np.arange(count) * factors.sum() // size).all()
    for kind in test_collectives.KINDS:
        for op in NUMPY if kind in test_collectives.FOLDING else ["sum"]:
            test_collectives.check(kind, "longlong", 509, op)


def check_by_name() -> None:
    """Where a rank tells the others what it has, and packs it with others."""
    fd.init()
    names = _core.names_of(_world.world())
    arrays = [np.full(9, fd.rank() + 1, np.int64) for _ in range(3)]
    handles = [
        names.submit("all_reduce", f"x{i}", [(by_address(x), by_address(x), x.shape)])
        for i, x in enumerate(arrays)
    ]
    for handle in handles:
        _core.wait_by_number(handle)
    assert all((x == fd.size() * (fd.size() + 1) // 2).all() for x in arrays)


def numbers(seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(-MOST, MOST, 100, np.int64)


@pytest.mark.parametrize("op", NUMPY)
def test_folds_are_those_of_its_type(op: str) -> None:
    lower, upper = numbers(1), numbers(2)
    for isa in _core.instruction_sets():
        folded = testing.fold("longlong", op, lower, upper, isa)
        assert folded == NUMPY[op](lower, upper).tobytes()


def test_it_is_scaled() -> None:
    values = numbers(3)
    for factor, divide in ((1.0, 3), (0.5, 1), (2.0, 1)):
        scaled = testing.scale("longlong", values, factor, divide)
        assert scaled == testing.scale("int64", values, factor, divide)


@pytest.mark.parametrize("check", [check_on_ranks, check_by_name])
def test_ranks_have_numpys_results(spawn: Callable[..., World], check: Callable[[], None]) -> None:
    spawn(3).run(check)


def test_commands_know_it(capfd) -> None:
    assert cli.main("info --why 1K --ranks 2 --dtype longlong".split()) == 0
    assert "longlong" in capfd.readouterr().out
    words = "bench all_reduce -np 2 --dtype longlong --sizes 1K --iterations 3"
    assert cli.main(words.split()) == 0


@pytest.mark.parametrize("framework", ["torch", "tensorflow", "jax"])
def test_frameworks_do_without_it(framework: str) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not here")
    script = f"import farandole.{framework} as hvd; hvd.init(); hvd.barrier()"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
