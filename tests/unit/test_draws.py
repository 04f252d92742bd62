"""Every row of every table runs in one of eight runs, and the odds are told rightly."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import draws
import grid

ROOT = Path(__file__).resolve().parents[2]
RUNS = 400


class Item:
    """As much of pytest's as a draw asks. `marks`: by name, the arguments of one mark."""

    def __init__(
        self, row: int, file: str = "tests/unit/x.py", of: str = "test_x", **marks: Any
    ) -> None:
        self.name = self.originalname = of
        self.nodeid = f"{file}::{of}[{row}]"
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
        [odds] = {table.odds for table in made.tables()}
        for count in ran.values():
            assert abs(count / RUNS - odds) < 0.1
        return odds

    monkeypatch.setenv("GRID", "pairs")
    return check


def test_a_table_runs_whole(odds_are_true: Any) -> None:
    assert odds_are_true(rows(5)) == 1


def test_one_row_in_three_runs(odds_are_true: Any) -> None:
    assert odds_are_true(rows(6, drawn=(3,))) == pytest.approx(1 / 3)


def test_of_a_costly_table_one_in_four_runs(odds_are_true: Any) -> None:
    assert odds_are_true(rows(12, file="tests/faults/x.py")) == pytest.approx(1 / 4)


def test_of_a_drawn_and_costly_table_no_row_runs_too_seldom(odds_are_true: Any) -> None:
    assert odds_are_true(rows(12, drawn=(3,), file="tests/faults/x.py")) == pytest.approx(1 / 6)


def test_a_row_that_runs_seldom_is_left_out_no_further(odds_are_true: Any) -> None:
    assert odds_are_true(rows(30, drawn=(5,), file="tests/faults/x.py")) == pytest.approx(1 / 5)


def test_half_of_the_lone_tests_of_a_costly_file_run(odds_are_true: Any) -> None:
    lone = [Item(0, of=name, file="tests/faults/x.py") for name in ("test_a", "test_b")]
    assert odds_are_true(lone) == 1 / 2


def test_what_is_left_of_a_small_table_is_a_lone_test(odds_are_true: Any) -> None:
    small = [r for of in ("test_a", "test_b") for r in rows(3, of=of, file="tests/faults/x.py")]
    assert odds_are_true(small) == pytest.approx(1 / 6)


def test_the_lone_tests_of_other_files_run(odds_are_true: Any) -> None:
    assert odds_are_true([Item(0, of=name) for name in ("test_a", "test_b")]) == 1


def test_of_long_tests_of_all_files_one_in_eight_runs(
    odds_are_true: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [f"tests/unit/x{number}.py" for number in range(16)]
    monkeypatch.setattr(draws, "LONG", {f"{file}::test_x" for file in files})
    assert odds_are_true([Item(0, file=file) for file in files]) == 1 / 8


def test_long_tests_are_there() -> None:
    for name in draws.LONG:
        file, _, function = name.partition("::")
        assert f"def {function}(" in (ROOT / file).read_text(), name


def test_combinations_are_told_as_the_seldom_ones_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRID_SEED", "1")
    table = ("a", grid.Combinations([(1,), (2,)]))
    [made] = draws.draw(rows(2, parametrize=table, file="tests/faults/x.py")).tables()
    assert made == draws.Table("tests/faults/x.py::test_x", 2, 1 / 8)
