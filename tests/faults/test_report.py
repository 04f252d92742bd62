"""docs/reliability.md: it has the rows of report_rows.py, and the tests that it names exist."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_program import FAULTS
from report_rows import ELSEWHERE, ROWS

ROOT = Path(__file__).parents[2]


def test_the_page_has_every_row() -> None:
    lines = (ROOT / "docs" / "reliability.md").read_text().splitlines()
    heads = [line.split(" | ")[:2] for line in lines if line.startswith("| ")]
    rows = [[f"| {row.number}", row.done] for row in ROWS]
    rows += [[f"| {number}", what] for number, what, _ in ELSEWHERE]
    assert [head for head in heads if head[0] not in ("| row", "| fault")] == rows


def test_every_fault_of_the_program_is_a_row() -> None:
    assert set(FAULTS) <= {row.how for row in ROWS}


@pytest.mark.parametrize("test", sorted({test for *_, tests in ELSEWHERE for test in tests}))
def test_the_tests_that_the_page_names_exist(test: str) -> None:
    file, _, name = test.partition("::")
    text = (ROOT / file).read_text()
    assert f"def {name}(" in text or not name
