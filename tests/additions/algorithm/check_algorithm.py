"""A new algorithm: proved, simulated, drawn as a plan, and run by ranks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import farandole as fd
from core_testing import testing
from farandole import _core, cli
from harness import World


def reduce_by_it() -> None:
    fd.init()
    for count in (0, 1, 1000, 300_001):
        mine = np.arange(count) * (fd.rank() + 1)
        total = fd.all_reduce(mine, algorithm="dummy", level="fast")
        assert (total == np.arange(count) * sum(range(1, fd.size() + 1))).all()
        assert fd.world().last_path == "schedule"


def test_it_is_proved() -> None:
    sizes, counts = range(1, 10), (0, 1, 7, 1000)
    proved, failures = testing.prove_all("all_reduce", "dummy", sizes, counts, [1, 3], [1, 2])
    assert failures == []
    assert proved == 2 * len(sizes) * len(counts) * 2 * 2


def test_it_is_simulated() -> None:
    rows = [row["name"] for row in _core.schedule.planners(collective="all_reduce")]
    assert "dummy" in rows  # which simulated worlds draw from
    assert all(testing.simulate(seed, ranks=3).complaint == "" for seed in range(40))


def test_plan_shows_it(capfd) -> None:
    words = "plan all_reduce --algorithm dummy --ranks 3 --count 6".split()
    assert cli.main(words) == 0
    shown = capfd.readouterr().out
    assert "dummy" in shown
    assert "rank 2" in shown


def test_ranks_run_it(spawn: Callable[..., World]) -> None:
    for size in (1, 2, 4):
        spawn(size).run(reduce_by_it)


def test_the_bench_runs_it(capfd) -> None:
    words = "bench all_reduce -np 2 --algorithm dummy --sizes 1K --iterations 3"
    assert cli.main([*words.split(), "--level", "fast"]) == 0
    assert " schedule " in capfd.readouterr().out
