"""The draw of the tests that a run leaves out, and the odds that each test runs.

`GRID=full` (make test-all), and tests asked for by name or as one file, leave out nothing. Else:

* of a table over several dimensions (grid.combinations) all pairs of values and one row in eight;
* of a table marked ``drawn(n)`` one row in n, and of several functions marked ``drawn(n, of="…")``
  together one row in n of what is left;
* of every table in COSTLY one row in so many of what is left; and of a file there, half of the
  tests that have one row then;
* of all tests in LONG together as many as one in eight runs of each takes.

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
# Folders and files whose tests cost most, as they start ranks or compile: one row in N is run.
COSTLY = {
    "tests/cuda": 4,
    "tests/differential": 4,
    "tests/faults": 4,
    "tests/frameworks": 4,
    "tests/ranks": 4,
    "tests/test_examples": 4,
}
# Tests that take ten seconds or more on two cores.
LONG = {
    "tests/cuda/test_device_report.py::test_report",
    "tests/cuda/test_ptx.py::test_the_kernels_have_no_faults",
    "tests/faults/test_elastic_jobs.py::test_too_few_workers_are_waited_for_and_then_it_ends",
    "tests/faults/test_elastic_training.py::test_all_ranks_have_the_same_bits",
    "tests/faults/test_elastic_training.py::test_fit_goes_on_with_the_ranks_that_are_left",
    "tests/faults/test_hosts_faults.py::test_an_unreachable_rank_is_told_to_all",
    "tests/faults/test_links.py::test_a_link_that_becomes_slow_with_a_deep_queue_loses_nobody",
    "tests/frameworks/test_elastic_tensorflow.py::test_functions_go_on_in_worlds_of_other_sizes",
    "tests/frameworks/test_torchrun_hosts.py::test_ranks_meet_again_after_each_of_two_deaths",
    "tests/ranks/test_hosts.py::test_a_rank_that_does_not_answer_is_named_in_seconds",
    "tests/ranks/test_ray.py::test_nodes_may_be_hosts",
    "tests/test_examples.py::test_digits_train_alike_under_farandole_run_and_torchrun_and_alone",
    "tests/unit/test_additions.py::test_they_compile_together",
    "tests/unit/test_horovod.py::test_modules_that_programs_import_are_there_and_are_ours",
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
        """Keeps one row in `one_in` of those that are not left out yet, with equal odds."""
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
    # pytest gives a function's mark before a row's mark, and rows are drawn first.
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
    _take_of_long(made)
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


def _take_of_long(made: Draw) -> None:
    tests: dict[int, list[pytest.Item]] = defaultdict(list)
    for item, odds in made.odds.items():
        if table_of(item) in LONG:
            tests[int(odds / LEAST)].append(item)
    for one_in, rows in tests.items():
        if any(row not in made.left_out for row in rows):
            made.take(f"long {one_in}", rows, one_in)


def _cost_of(item: pytest.Item) -> int:
    """The value of the longest entry of COSTLY that the test's path begins with."""
    fits = [path for path in COSTLY if item.nodeid.startswith(path)]
    return COSTLY[max(fits, key=len)] if fits else 1


def _odds_of_combination(item: pytest.Item) -> float:
    tables = (mark.args[1] for mark in item.iter_markers("parametrize"))
    return 1 / grid.DRAWN if any(isinstance(rows, grid.Combinations) for rows in tables) else 1.0


def table_of(item: pytest.Item) -> str:
    return f"{item.nodeid.partition('::')[0]}::{_function_of(item)}"


def _function_of(item: pytest.Item) -> str:
    return str(getattr(item, "originalname", item.name))
