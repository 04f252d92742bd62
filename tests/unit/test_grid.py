"""The tables that tests are drawn from leave out no pair."""

from __future__ import annotations

import itertools

import pytest

import grid

DIMENSIONS = [[1, 2, 3, 5], ["sum", "min"], [True, False], ["a", "b", "c"]]


def pairs(rows: list[grid.Row]) -> set[tuple[tuple[int, object], ...]]:
    return {pair for row in rows for pair in itertools.combinations(enumerate(row), 2)}


def fits(size: int, op: str, *_: object) -> bool:
    return (size, op) != (5, "min")


@pytest.fixture(autouse=True)
def usual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRID", "pairs")
    monkeypatch.setenv("GRID_SEED", "1")


def test_every_pair_of_values_that_fit_occurs() -> None:
    every = [row for row in itertools.product(*DIMENSIONS) if fits(*row)]
    rows = grid.combinations(*DIMENSIONS, fits=fits)
    assert pairs(rows) == pairs(every)
    assert len(rows) < len(every) / 2
    assert all(fits(*row) for row in rows)


def test_full_is_every_combination(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRID", "full")
    assert grid.combinations(*DIMENSIONS) == list(itertools.product(*DIMENSIONS))


def test_many_seeds_see_every_combination(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    for seed in range(200):
        monkeypatch.setenv("GRID_SEED", str(seed))
        rows = grid.combinations(*DIMENSIONS)
        assert rows == grid.combinations(*DIMENSIONS), "a seed repeats"
        seen.update(rows)
    assert seen == set(itertools.product(*DIMENSIONS))
