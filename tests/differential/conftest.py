"""Ranks that train drawn programs, for all tests of a module."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from search import Runner

from harness import Nursery


@pytest.fixture(scope="module")
def runner(nurseries: Callable[[str], Nursery]) -> Iterator[Runner]:
    made = Runner(nurseries)
    yield made
    made.close()
