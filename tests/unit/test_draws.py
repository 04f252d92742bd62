"""Every row of every table runs in one of eight runs, and the odds are told rightly."""

from __future__ import annotations

import subprocess
import sys
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
        self._marks = [SimpleNamespace(name=n, args=args) for n, args in marks.items()]

    def iter_markers(self, name: str) -> list[Any]:
        return [mark for mark in self._marks if mark.name == name]


def rows(count: int, **kind: Any) -> list[Any]:
    return [Item(row, **kind) for row in range(count)]


@pytest.fixture
def odds_are_true(monkeypatch: pytest.MonkeyPatch) -> Any:
    def check(items: list[Any], seconds: dict[str, float] | None = None) -> float:
        ran = dict.fromkeys(items, 0)
        for seed in range(RUNS):
            monkeypatch.setenv("GRID_SEED", str(seed))
            made = draws.draw(items, seconds or {})
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


@pytest.mark.parametrize(("count", "odds"), [(12, 1 / 4), (3, 1 / 3), (1, 1)])
def test_of_a_table_that_starts_ranks_one_row_in_four_runs(
    odds_are_true: Any, count: int, odds: float
) -> None:
    assert odds_are_true(rows(count, file="tests/faults/x.py")) == pytest.approx(odds)


def test_of_costly_tests_of_all_files_one_row_in_eight_runs(odds_are_true: Any) -> None:
    files = [f"tests/unit/x{number}.py" for number in range(8)]
    items = [row for file in files for row in rows(3, file=file)]
    assert odds_are_true(items, {f"{file}::test_x": 2.0 for file in files}) == 1 / 8


def test_a_run_has_one_of_eight_rows_that_take_about_as_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quick, slow = (rows(8, of=name) for name in ("test_quick", "test_slow"))
    seconds = {"tests/unit/x.py::test_quick": 1.0, "tests/unit/x.py::test_slow": 9.0}
    for seed in range(20):
        monkeypatch.setenv("GRID_SEED", str(seed))
        left_out = draws.draw([*quick, *slow], seconds).left_out
        assert [sum(row not in left_out for row in table) for table in (quick, slow)] == [1, 1]


def test_costly_tests_are_there() -> None:
    for name in draws.costly():
        file, _, function = name.partition("::")
        assert function in (ROOT / file).read_text(), name


def test_the_list_of_costly_tests_follows_from_reports(tmp_path: Path) -> None:
    times = {"a[1]": 2.0, "a[2]": 3.0, "quick": 0.9, "slower": 5.0, "listed": 1.5}
    cases = [
        f'<testcase classname="tests.test_x" name="test_{name}" time="{seconds}" />'
        for name, seconds in times.items()
    ]
    (tmp_path / "report.xml").write_text(f"<testsuite>{''.join(cases)}</testsuite>")
    names = ("a", "quick", "slower", "listed", "elsewhere")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_x.py").write_text("".join(f"def test_{n}(): ...\n" for n in names))
    before = {"slower": 4.0, "listed": 6.0, "elsewhere": 2.0, "gone": 7.0}
    costly = tmp_path / "tests/costly.txt"
    costly.write_text("".join(f"{s} tests/test_x.py::test_{n}\n" for n, s in before.items()))

    command = [sys.executable, str(ROOT / ".ci" / "costly.py"), "report.xml"]
    subprocess.run(command, cwd=tmp_path, check=True)
    lines = [line.split(" tests/test_x.py::test_") for line in costly.read_text().splitlines()]
    after = {name: float(seconds) for seconds, name in lines}
    assert after == {"a": 3.0, "slower": 5.0, "listed": 6.0, "elsewhere": 2.0}


def test_combinations_are_told_as_the_seldom_ones_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRID_SEED", "1")
    table = ("a", grid.Combinations([(1,), (2,)]))
    [made] = draws.draw(rows(2, parametrize=table, file="tests/faults/x.py"), {}).tables()
    assert made == draws.Table("tests/faults/x.py::test_x", 2, 1 / 8)
