"""Which tests a run leaves out, and how likely it is that each runs.

`GRID=full` (make test-all), and tests asked for by name or as one file, leave out nothing. Else:

* of a table over several dimensions (grid.combinations) all pairs of values and one row in eight;
* of a table marked ``drawn(n)`` one row in n, and of several functions marked ``drawn(n, of="…")``
  together one row in n of what is left;
* of every table in COSTLY one row in so many of what is left; and of a file there, half of the
  tests that have one row then.

A run's seed decides which (grid.seed). No row may run less often than once in eight runs: pytest
refuses to collect it. `pytest --collect-only -q --odds` prints how often the rows of each table
run.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import pytest

import grid

LEAST = 1 / 8
# Folders and files whose tests start ranks, or compile, and so cost most: one row in so many runs.
COSTLY = {
    "tests/cuda": 4,
    "tests/differential": 2,
    "tests/faults": 4,
    "tests/frameworks": 4,
    "tests/ranks": 4,
    "tests/test_examples": 4,
}


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
        """Leaves one in so many of the rows that are not left out yet, all of equal odds."""
        standing = [row for row in rows if row not in self.left_out]
        kept = grid.drawn(name, standing, one_in)
        self.left_out.update(set(standing) - set(kept))
        for row in rows:
            self.odds[row] *= len(kept) / len(standing)

    def tables(self) -> list[Table]:
        found: dict[str, list[float]] = defaultdict(list)
        for item, odds in self.odds.items():
            found[table_of(item)].append(odds)
        return [Table(name, len(odds), min(odds)) for name, odds in found.items()]


def draw(items: list[pytest.Item]) -> Draw:
    made = Draw(odds={item: _odds_of_combination(item) for item in items})
    # pytest gives a function's mark first, then that of the row: rows are drawn first.
    for which in (1, 0):
        tables: dict[tuple[str, int], list[pytest.Item]] = defaultdict(list)
        for item in items:
            marks = list(item.iter_markers("drawn"))
            if which < len(marks):
                of = marks[which].kwargs.get("of", _function_of(item))
                tables[f"{item.path}::{of}", marks[which].args[0]].append(item)
        for (name, one_in), rows in tables.items():
            made.take(name, rows, one_in)
    _take_of_costly(made)
    _take_of_lone(made)
    return made


def _take_of_costly(made: Draw) -> None:
    tables: dict[tuple[str, int], list[pytest.Item]] = defaultdict(list)
    for item, odds in made.odds.items():
        if one_in := min(_cost_of(item), int(odds / LEAST)):
            tables[table_of(item), one_in].append(item)
    for (name, one_in), rows in tables.items():
        if one_in > 1 and any(row not in made.left_out for row in rows):
            made.take(f"costly {name}", rows, one_in)


def _take_of_lone(made: Draw) -> None:
    tables: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in made.odds:
        if _cost_of(item) > 1:
            tables[table_of(item)].append(item)
    files: dict[str, list[list[pytest.Item]]] = defaultdict(list)
    for name, rows in tables.items():
        standing = [row for row in rows if row not in made.left_out]
        if len(standing) == 1 and all(made.odds[row] >= 2 * LEAST for row in rows):
            files[name.partition("::")[0]].append(rows)
    for file, lone in files.items():
        kept = grid.drawn(f"lone {file}", lone, 2)
        for rows in lone:
            made.left_out.update(rows if rows not in kept else ())
            for row in rows:
                made.odds[row] *= len(kept) / len(lone)


def _cost_of(item: pytest.Item) -> int:
    """The number of the longest entry of COSTLY that its path begins with."""
    fits = [path for path in COSTLY if item.nodeid.startswith(path)]
    return COSTLY[max(fits, key=len)] if fits else 1


def _odds_of_combination(item: pytest.Item) -> float:
    tables = (mark.args[1] for mark in item.iter_markers("parametrize"))
    return 1 / grid.DRAWN if any(isinstance(rows, grid.Combinations) for rows in tables) else 1.0


def table_of(item: pytest.Item) -> str:
    return f"{item.nodeid.partition('::')[0]}::{_function_of(item)}"


def _function_of(item: pytest.Item) -> str:
    return str(getattr(item, "originalname", item.name))
