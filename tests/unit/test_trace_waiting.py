"""Waits of ranks for each other, in traces made by hand. Times are in microseconds."""

from __future__ import annotations

from pathlib import Path

from test_trace import MAIN, Part

from farandole import _trace
from farandole._trace.waiting import Awaited, Waits, awaited, stood_still


def waits_of(directory: Path) -> tuple[list[_trace.parts.Part], Waits]:
    parts = _trace.load(directory).parts
    return parts, awaited(parts)


def of_rank(waits: Waits, rank: int) -> list[list[Awaited]]:
    return [found for operation, found in waits.items() if operation.rank == rank]


def test_the_time_until_the_last_rank_has_submitted_is_waiting_for_that_rank(
    tmp_path: Path,
) -> None:
    for rank, launched in enumerate((10, 100, 70)):
        Part(rank, size=3).operation(1, launched, launched, 120).write(tmp_path)
    _, waits = waits_of(tmp_path)
    assert of_rank(waits, 0) == [[Awaited(10, 100, 1)]]
    assert of_rank(waits, 1) == [[]]
    assert of_rank(waits, 2) == [[Awaited(70, 100, 1)]]


def test_submitted_everywhere_it_waits_for_the_rank_on_which_its_turn_comes_last(
    tmp_path: Path,
) -> None:
    Part(0).operation(1, 10, 50, 100).write(tmp_path)
    Part(1).operation(1, 10, 80, 100).write(tmp_path)
    _, waits = waits_of(tmp_path)
    assert of_rank(waits, 0) == [[Awaited(50, 80, 1)]]  # from 10 to 50 it was in the queue


def test_what_one_rank_ends_before_another_begins_ends_its_wait(tmp_path: Path) -> None:
    Part(0).operation(1, 10, 10, 30).write(tmp_path)
    Part(1).operation(1, 90, 95, 100).write(tmp_path)
    _, waits = waits_of(tmp_path)
    assert of_rank(waits, 0) == [[Awaited(10, 30, 1)]]


def test_a_program_stands_still_for_the_operation_whose_turn_it_is(tmp_path: Path) -> None:
    """Rank 1 submits both late. While the first one moves data, no rank waits for another."""
    mine = Part(0).operation(1, 10, 10, 60).operation(2, 20, 60, 110)
    mine.wait(30, 110, final=True).wait(31, 60).write(tmp_path)
    Part(1).operation(1, 40, 40, 60).operation(2, 80, 80, 110).wait(90, 110).write(tmp_path)
    parts, waits = waits_of(tmp_path)
    assert of_rank(waits, 0) == [[Awaited(10, 40, 1)], [Awaited(20, 80, 1)]]
    assert stood_still(parts[0], waits, (0, 200)) == [Awaited(30, 40, 1), Awaited(60, 80, 1)]
    assert stood_still(parts[0], waits, (70, 75)) == [Awaited(70, 75, 1)]
    assert stood_still(parts[1], waits, (0, 200)) == []


def test_waits_on_several_threads_for_one_rank_count_once(tmp_path: Path) -> None:
    mine = Part(0).operation(1, 0, 0, 60).wait(10, 30).wait(20, 50, thread=MAIN + 1)
    mine.write(tmp_path)
    Part(1).operation(1, 50, 50, 60).write(tmp_path)
    parts, waits = waits_of(tmp_path)
    assert stood_still(parts[0], waits, (0, 60)) == [Awaited(10, 50, 1)]
