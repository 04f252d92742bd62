"""Many cases in one set of rank processes, since importing a framework costs seconds.

A test module marks functions with ``@on_ranks(2, 3)`` and ends with ``test_on_ranks =
make_tests(__name__)``: every (function, number of ranks) is a test of its own. When a case fails on
a rank, that rank leaves, and the cases after it are reported as not run.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest

from farandole.testing import RanksFailed, run_ranks

_F = TypeVar("_F", bound=Callable[[], None])
_registered: dict[str, list[tuple[Callable[[], None], tuple[int, ...]]]] = {}
_outcomes: dict[tuple[str, int], list[dict[str, str]] | RanksFailed] = {}


def on_ranks(*sizes: int) -> Callable[[_F], _F]:
    def register(function: _F) -> _F:
        _registered.setdefault(function.__module__, []).append((function, sizes))
        return function

    return register


def make_tests(
    module: str,
    *,
    timeout: float = 100.0,
    prepare: str = "prepare",
    home: str | None = None,
    without: Sequence[str] = (),
) -> Any:
    """`timeout`: seconds for all cases together. `home`: the module that has the cases and
    `prepare`, if not the test's own. `without`: names of cases that are not for this module."""
    table = [
        (f.__name__, n)
        for f, sizes in _registered[home or module]
        for n in sizes
        if f.__name__ not in without
    ]
    table.sort(key=lambda row: row[1])

    @pytest.mark.timeout(timeout + 20)
    @pytest.mark.parametrize(("name", "ranks"), table, ids=[f"{f}[{n}]" for f, n in table])
    def test_on_ranks(name: str, ranks: int, request: pytest.FixtureRequest) -> None:
        if (module, ranks) not in _outcomes:
            chosen = [
                item.callspec.params["name"]
                for item in request.session.items
                if isinstance(item, pytest.Function)
                and item.module.__name__ == module
                and getattr(item, "callspec", None) is not None
                and item.callspec.params.get("ranks") == ranks
            ]
            try:
                _outcomes[module, ranks] = run_ranks(
                    ranks, run_cases, home or module, chosen, prepare, timeout=timeout
                )
            except RanksFailed as failure:
                _outcomes[module, ranks] = failure  # of all cases; they are not run again
        outcomes = _outcomes[module, ranks]
        if isinstance(outcomes, RanksFailed):
            raise outcomes
        problems = [f"rank {r}: {of[name]}" for r, of in enumerate(outcomes) if of[name]]
        assert not problems, f"case {name} on {ranks} ranks\n" + "\n".join(problems)

    return test_on_ranks


def run_cases(module: str, names: list[str], prepare: str) -> dict[str, str]:
    """On every rank: what went wrong, by case; empty where nothing did."""
    home = importlib.import_module(module)
    getattr(home, prepare)()
    outcome = {}
    for i, name in enumerate(names):
        try:
            getattr(home, name)()
            outcome[name] = ""
        except Exception:
            outcome[name] = traceback.format_exc()
            outcome.update((later, f"not run, since {name} failed") for later in names[i + 1 :])
            break
    return outcome
