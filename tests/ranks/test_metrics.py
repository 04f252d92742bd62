"""farandole.metrics(): a rank's counters, as they grow."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np
import pytest

import farandole as fd
import harness
from farandole._live.pages import of_process
from harness import World

LATE = 0.3  # seconds


def counted() -> list[float]:
    fd.init()
    before = fd.metrics()
    for _ in range(10):
        fd.all_reduce(np.ones(1000))
    after = fd.metrics()
    return [after[name] - before[name] for name in ("operations", "input_bytes", "steps")]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_operations_and_bytes_are_counted(standing: Callable[[int], World], size: int) -> None:
    assert standing(size).run(counted) == [[10, 80_000, 0]] * size


def waited(how: str) -> tuple[float, float]:
    """Rank 1 comes late."""
    fd.init()
    fd.barrier()
    before = fd.metrics()
    if fd.rank() == 1:
        time.sleep(LATE)
    if how == "in order":
        fd.all_reduce(np.ones(1000))
    elif how == "by name":
        fd.all_reduce(np.ones(1000), name="x")
    else:
        fd.all_reduce(np.ones(1000), async_op=True).wait()
    after = fd.metrics()
    names = ("waited_for_ranks_seconds", "waited_for_data_seconds")
    for_ranks, for_data = (after[name] - before[name] for name in names)
    return for_ranks, for_data


@pytest.mark.parametrize("how", ["in order", "by name", "in flight"])
def test_who_waits_for_a_late_rank_counts_it(standing: Callable[[int], World], how: str) -> None:
    first, second, third = standing(3).run(waited, how)
    for early, for_data in (first, third):
        assert early > LATE / 2
        assert for_data < LATE / 2
    assert second[0] < min(first[0], third[0])


def overlapped() -> float:
    """Rank 0 computes while its operation waits for rank 1."""
    fd.init()
    fd.barrier()
    before = fd.metrics()["waited_for_ranks_seconds"]
    if fd.rank() == 1:
        time.sleep(LATE)
    handle = fd.all_reduce(np.ones(1000), async_op=True)
    if fd.rank() == 0:
        time.sleep(2 * LATE)
    handle.wait()
    return fd.metrics()["waited_for_ranks_seconds"] - before


def test_what_goes_on_beside_the_programs_work_is_no_wait(
    standing: Callable[[int], World],
) -> None:
    first, _ = standing(2).run(overlapped)
    assert first < LATE / 2


def next_worlds() -> list[float]:
    fd.init()
    fd.all_reduce(np.ones(10))
    kept = fd.world()
    fd.shutdown()
    fd.init()
    found = [status for status in of_process(os.getpid()) if status.rank == fd.rank()]
    fd.barrier()
    assert kept is not fd.world()
    return [found[0].operations, len(found)]


def test_the_page_of_the_present_world_is_read(spawn: Callable[..., World]) -> None:
    for operations, pages in spawn(2).run(next_worlds):
        assert operations <= 2  # of init() alone
        assert pages == 1


def shown_waits() -> None:
    fd.init()
    if fd.rank() == 1:
        assert harness.listen() == "go"
    else:
        harness.tell("I wait")
    fd.barrier()


def test_what_a_rank_waits_in_can_be_read_from_outside(spawn: Callable[..., World]) -> None:
    world = spawn(2)
    world.start(shown_waits)
    assert world.hear(0) == "I wait"
    pid = world.pids[0]

    def waits() -> bool:
        return any(status.waits_for == [1] for status in of_process(pid))

    harness.wait_until(waits, "rank 0 to show its wait")
    (status,) = of_process(pid)
    assert status.waits_in.startswith("barrier #")
    assert status.job == world.run_id
    world.say(1, "go")
    world.outcomes()
