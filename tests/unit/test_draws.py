"""Every row of every table runs in one of eight runs, and the odds are told rightly."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import draws
import grid

RUNS = 400


class Item:
    """As much of pytest's as a draw asks. `marks`: by name, the arguments of one mark."""

    name = originalname = "test_x"

    def __init__(self, row: int, file: str = "tests/unit/x.py", **marks: Any) -> None:
        self.nodeid = f"{file}::test_x[{row}]"
        self.path = Path(file)
        self._marks = [SimpleNamespace(name=n, args=args, kwargs={}) for n, args in marks.items()]

    def iter_markers(self, name: str) -> list[Any]:
        return [mark for mark in self._marks if mark.name == name]


def rows(count: int, **kind: Any) -> list[Any]:
    return [Item(row, **kind) for row in range(count)]


@pytest.fixture
def odds_are_true(monkeypatch: pytest.MonkeyPatch) -> Any:
    def check(items: list[Any]) -> float:
        ran = dict.fromkeys(items, 0)
        for seed in range(RUNS):
            monkeypatch.setenv("GRID_SEED", str(seed))
            made = draws.draw(items)
            for each in items:
                ran[each] += each not in made.left_out
        [table] = made.tables()
        for count in ran.values():
            assert abs(count / RUNS - table.odds) < 0.1
        return table.odds

    monkeypatch.setenv("GRID", "pairs")
    return check


def test_a_table_runs_whole(odds_are_true: Any) -> None:
    assert odds_are_true(rows(5)) == 1


def test_one_row_in_three_runs(odds_are_true: Any) -> None:
    assert odds_are_true(rows(6, drawn=(3,))) == pytest.approx(1 / 3)


def test_of_a_costly_table_half_of_what_is_left_runs(odds_are_true: Any) -> None:
    assert odds_are_true(rows(12, drawn=(3,), file="tests/faults/x.py")) == pytest.approx(1 / 6)


def test_a_row_that_runs_seldom_is_left_out_no_further(odds_are_true: Any) -> None:
    assert odds_are_true(rows(30, drawn=(5,), file="tests/faults/x.py")) == pytest.approx(1 / 5)


def test_combinations_are_told_as_the_seldom_ones_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRID_SEED", "1")
    table = ("a", grid.Combinations([(1,), (2,)]))
    [made] = draws.draw(rows(2, parametrize=table, file="tests/faults/x.py")).tables()
    assert made == draws.Table("tests/faults/x.py::test_x", 2, 1 / 8)
