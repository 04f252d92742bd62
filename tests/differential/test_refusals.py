"""Each program that docs/refusals.md says is refused is refused, by one sentence on all ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import programs
from fronts import FRONTS
from search import Refused, Runner

LINES = [programs.short(program, FRONTS[program.front]) for program in programs.refused(FRONTS)]


@pytest.mark.xdist_group("programs that are refused")
@pytest.mark.parametrize("line", LINES, ids=lambda line: line.replace(" ", ","))
def test_it_is_refused(runner: Runner, line: str) -> None:
    with pytest.raises(Refused) as told:
        runner.check(programs.read(line, FRONTS), 2)
    assert "by the framework" not in str(told.value)
