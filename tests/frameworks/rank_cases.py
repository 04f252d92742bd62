"""Many cases in one set of ranks, forked from a process that has imported the framework.

A test module marks functions with ``@on_ranks(2, 3)`` and ends with ``test_on_ranks =
make_tests(__name__, "torch")``: every (function, number of ranks) is a test of its own. Its
function `prepare` is called first on new ranks. A rank on which a case fails leaves, and the cases
after it have new ranks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

_F = TypeVar("_F", bound=Callable[[], None])
_registered: dict[str, list[tuple[Callable[[], None], tuple[int, ...]]]] = {}


def on_ranks(*sizes: int) -> Callable[[_F], _F]:
    def register(function: _F) -> _F:
        _registered.setdefault(function.__module__, []).append((function, sizes))
        return function

    return register


def make_tests(
    module: str, framework: str, *, cases_of: Sequence[str] = (), without: Sequence[str] = ()
) -> Any:
    """`module`: which has the cases, unless others have them, `cases_of`. `framework`: as a nursery
    is told (harness.py). `without`: names of cases that do not work there."""
    cases = [case for each in cases_of or [module] for case in _registered[each]]
    table = [(f, n) for f, sizes in cases for n in sizes if f.__name__ not in without]
    table.sort(key=lambda row: row[1])
    prepare = vars(sys.modules[module])["prepare"]

    @pytest.mark.timeout(250)  # more than the ranks have (conftest.py), who say more
    @pytest.mark.parametrize(("case", "ranks"), table, ids=[f"{f.__name__}[{n}]" for f, n in table])
    def test_on_ranks(case: Callable[[], None], ranks: int, run_case: Callable[..., None]) -> None:
        run_case(ranks, framework, prepare, case)

    return test_on_ranks


@contextmanager
def checking_weights(when: str) -> Iterator[None]:
    """On a rank: models made meanwhile are compared then (FARANDOLE_CHECK_WEIGHTS)."""
    os.environ["FARANDOLE_CHECK_WEIGHTS"] = when
    try:
        yield
    finally:
        del os.environ["FARANDOLE_CHECK_WEIGHTS"]
