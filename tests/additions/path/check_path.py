"""A new path: listed, explained, measured, simulated, and run by ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import harness
from core_testing import testing
from farandole import _core, cli
from farandole._tune import kept
from harness import World

sys.path.append(str(Path(harness.__file__).parent / "ranks"))
import test_collectives


def test_info_explains_it(capfd) -> None:
    assert cli.main(["info", "--why", "1K", "--ranks", "2"]) == 0
    assert "\ndetour " in capfd.readouterr().out


def test_tune_measures_it(tmp_path: Path) -> None:
    file = tmp_path / "table.txt"
    assert cli.main(["tune", "-np", "2", "--output", str(file)]) == 0
    assert kept.read(str(file)).seconds["detour_start"] != 1e-3


def test_it_is_simulated() -> None:
    assert "detour" in [path["name"] for path in _core.tuning.paths()]  # which worlds draw from
    assert all(testing.simulate(seed, ranks=3).complaint == "" for seed in range(40))


def test_ranks_run_it(standing: Callable[[int], World]) -> None:
    """All collectives, with the tests' own check of every path and planner."""
    for size in (1, 3):
        ran = standing(size).run(test_collectives.check_forced)[0]
        assert {kind for kind, name in ran if name == "detour"} == set(test_collectives.KINDS)
