"""Ranks that read the same data, each by itself, notice where these differ, and say in which batch:
however far each of them has read ahead."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import farandole as fd
from farandole.data import ReadBatches
from harness import World


def note(read: ReadBatches, batches: int, odd: int | None = None) -> None:
    """A pass; `odd`: the batch that is other data."""
    of_pass = read.begin()
    for number in range(batches):
        batch = {"x": np.full((8, 3), of_pass + number), "y": [np.arange(8), None]}
        if number == odd:
            batch["x"][7, 1] += 1
        read.note(of_pass, number, batch)


def reads_alike() -> None:
    fd.init()
    read, me = ReadBatches(), fd.rank()
    read.compare("nothing")
    note(read, 3 + me)  # some have read ahead
    read.compare("fit()")
    assert read.compared == 3
    note(read, 5 - me)
    read.compare("fit()")
    assert read.compared == 3 + 5 - (fd.size() - 1)
    read.compare("fit()")  # nothing twice
    assert read.compared == 3 + 5 - (fd.size() - 1)
    note(read, 4, odd=3 if me == 1 else None)
    with pytest.raises(fd.Mismatch) as told:
        read.compare("fit()", "do better")
    assert "different batches in fit(): batch 4 of pass 3 over the data" in str(told.value)
    assert "advice: do better" in str(told.value)
    if fd.size() == 3:
        assert "on rank 1 than on rank 0" in str(told.value)
        read = ReadBatches()
        note(read, 4, odd=2 if me == 0 else None)
        with pytest.raises(fd.Mismatch, match=r"batch 3 .* on rank 0 than on rank 1"):
            read.compare("fit()")


@pytest.mark.parametrize("ranks", [2, 3])
def test_other_batches_are_named_on_every_rank(
    standing: Callable[[int], World], ranks: int
) -> None:
    standing(ranks).run(reads_alike)
