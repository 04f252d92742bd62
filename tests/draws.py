"""The draw of the tests that a run leaves out, and the odds that each test runs.

`GRID=full` (make test-all), and tests asked for by name or as one file, leave out nothing. Else:

* of a table over several dimensions (grid.combinations) all pairs of values and one row in eight;
* of all other tests in costly.txt together one row in eight;
* of the rest, in folders whose tests start ranks, one row in four of each table.

A run's seed decides which (grid.seed). So no row runs less often than once in eight runs.
`pytest --collect-only -q --odds` prints how often the rows of each table run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import pytest

import grid

LEAST = 8  # runs, of which each row is in one
STARTS_RANKS = tuple(
    f"tests/{name}"
    for name in ("cuda", "differential", "faults", "frameworks", "ranks", "test_examples")
)


def costly() -> dict[str, float]:
    """The seconds of a row, by the name of its table: those that take one or more. Written by
    .ci/costly.py, from reports of pytest."""
    lines = Path(__file__).with_name("costly.txt").read_text().splitlines()
    return {name: float(seconds) for seconds, name in map(str.split, lines)}


@dataclass
class Table:
    """The rows of one test function."""

    name: str
    rows: int
    odds: float


@dataclass
class Draw:
    left_out: set[pytest.Item] = field(default_factory=set)
    odds: dict[pytest.Item, float] = field(default_factory=dict)

    def take(self, name: str, rows: list[pytest.Item], one_in: int) -> None:
        """Keeps one row in `one_in`, with equal odds."""
        kept = grid.drawn(name, rows, one_in)
        self.left_out.update(set(rows) - set(kept))
        self.odds.update(dict.fromkeys(rows, len(kept) / len(rows)))

    def tables(self) -> list[Table]:
        found: dict[str, list[float]] = defaultdict(list)
        for item, odds in self.odds.items():
            found[table_of(item)].append(odds)
        return [Table(name, len(odds), min(odds)) for name, odds in found.items()]


def draw(items: list[pytest.Item], seconds: Mapping[str, float]) -> Draw:
    """`seconds`: of a row of the tests that are costly, by table."""
    made = Draw(odds={item: 1 / grid.DRAWN if _combined(item) else 1 for item in items})
    rest = [item for item in items if not _combined(item)]
    slow = [item for item in rest if table_of(item) in seconds]
    # Of rows that take about as long one each, so that all runs take about as long.
    slow.sort(key=lambda item: (-seconds[table_of(item)], item.nodeid))
    for begin in range(0, len(slow), LEAST):
        made.take(f"costly {begin}", slow[begin : begin + LEAST], LEAST)
    quick = [item for item in rest if table_of(item) not in seconds]
    for name, table in groupby(sorted(quick, key=table_of), table_of):
        if name.startswith(STARTS_RANKS):
            made.take(name, list(table), 4)
    return made


def _combined(item: pytest.Item) -> bool:
    tables = (mark.args[1] for mark in item.iter_markers("parametrize"))
    return any(isinstance(rows, grid.Combinations) for rows in tables)


def table_of(item: pytest.Item) -> str:
    function = getattr(item, "originalname", item.name)
    return f"{item.nodeid.partition('::')[0]}::{function}"
