"""The examples in docstrings, on a world of one."""

from __future__ import annotations

import doctest
import importlib
from collections.abc import Callable

import numpy as np
import pytest

import farandole as fd
from harness import World

MODULES = [
    *(f"_collectives.{name}" for name in ("whole", "rows", "pair", "grouped")),
    *("_memory", "_run", "horovod"),
]


def run_examples(name: str) -> tuple[int, int]:
    fd.init()
    module = importlib.import_module(f"farandole.{name}")
    results = doctest.testmod(module, extraglobs={"fd": fd, "np": np})
    return results.failed, results.attempted


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(standing: Callable[[int], World], name: str) -> None:
    world = standing(1)
    failed, attempted = world.run(run_examples, name)[0]
    assert failed == 0, world.report()
    assert attempted > 0
