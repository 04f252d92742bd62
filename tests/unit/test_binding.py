"""The processors of each rank: `farandole run --bind`, and the benchmarks' own order."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from farandole._bench.placement import cores_in_order
from farandole._launch.binding import shares
from farandole._launch.job import LaunchError


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two nodes of two cores; processors n and n + 4 are threads of one core."""
    for node, cpus in enumerate(["0-1,4-5\n", "2-3,6-7\n"]):
        (tmp_path / f"node/node{node}").mkdir(parents=True)
        (tmp_path / f"node/node{node}/cpulist").write_text(cpus)
    for cpu in range(8):
        folder = tmp_path / f"cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    return tmp_path


def test_each_rank_has_whole_cores_of_its_own(machine: Path) -> None:
    assert shares("none", 2, machine) == []
    assert shares("core", 4, machine) == [{0, 4}, {1, 5}, {2, 6}, {3, 7}]
    assert shares("core", 2, machine) == [{0, 1, 4, 5}, {2, 3, 6, 7}]
    assert shares("core", 3, machine) == [{0, 4}, {1, 5}, {2, 3, 6, 7}]


def test_ranks_are_dealt_out_to_nodes_in_order(machine: Path) -> None:
    first, second = {0, 1, 4, 5}, {2, 3, 6, 7}
    assert shares("numa", 4, machine) == [first, first, second, second]
    assert shares("numa", 1, machine) == [first]


def test_only_usable_processors_count(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 6, 7})
    assert shares("core", 2, machine) == [{2, 6}, {7}]
    assert shares("numa", 2, machine) == [{2, 6, 7}] * 2
    with pytest.raises(LaunchError, match="3 ranks are to have cores of their own, and 2 are"):
        shares("core", 3, machine)


def test_a_kernel_that_knows_no_nodes_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert shares("core", 2, tmp_path) == [{0}, {1}]
    assert shares("numa", 2, tmp_path) == [{0, 1}] * 2


def test_benchmarks_take_cores_before_their_threads(machine: Path) -> None:
    assert cores_in_order(set(range(8)), machine) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert cores_in_order({0, 4, 5}, machine) == [0, 5, 4]
