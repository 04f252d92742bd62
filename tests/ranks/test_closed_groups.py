"""A group that one rank has closed: who still waits in it gets an error at once, and no other."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import farandole as fd
from harness import World, split

Spawn = Callable[..., World]
HOSTS: dict[str, dict[str, Any]] = {"one host": {}, "two hosts": split("1,2")}
LATE: dict[str, Callable[[fd.Group], object]] = {
    "all_reduce": lambda group: fd.all_reduce(np.ones(3), group=group, name="late"),
    "large all_reduce": lambda group: fd.all_reduce(np.ones(1 << 20), group=group, name="late"),
    "barrier": lambda group: fd.barrier(group=group, name="late"),
    "send": lambda group: fd.send(np.ones(3), 1, group=group, name="late"),
    "recv": lambda group: fd.recv(np.ones(3), 1, group=group, name="late"),
    "split": lambda group: fd.split(0, group=group),
}


def closes(late: str) -> None:
    """Rank 1 closes it, and goes on in the world; the others begin something more."""
    fd.init()
    group = fd.split(0)
    assert group is not None
    for _ in range(3):
        fd.all_reduce(np.ones(3), group=group)
    if fd.rank() == 1:
        del group
    elif fd.rank() == 0 or "reduce" in late:
        begun = time.monotonic()
        with pytest.raises(fd.EarlyExit) as caught:
            LATE[late](group)
        assert time.monotonic() - begun < 1
        error = caught.value
        assert error.rank == 1
        kind = {"split": "all_gather", "large all_reduce": "all_reduce"}.get(late, late)
        assert f"closed the group of ranks 0-2 before {kind} #" in error.verdict
        assert error.tensor == ("split" if late == "split" else "late")
        with pytest.raises(fd.EarlyExit):  # the group has failed
            fd.barrier(group=group)
    again = fd.split(0)
    assert np.array_equal(fd.all_reduce(np.ones(3), group=again), np.full(3, 3.0))


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("late", LATE)
def test_who_waits_in_it_is_told_at_once(spawn: Spawn, hosts: str, late: str) -> None:
    spawn(3, env=HOSTS[hosts]).run(closes, late)


def shares_a_host() -> None:
    """Both ends of a message are on one host, and the group is on two."""
    fd.init()
    group = fd.split(0)
    if fd.rank() == 1:
        del group
    elif fd.rank() == 2:
        with pytest.raises(fd.EarlyExit, match=r"rank 1 .* closed the group of ranks 0-2"):
            fd.recv(np.ones(3), 1, group=group)
    fd.barrier()


def test_messages_within_a_host_of_several(spawn: Spawn) -> None:
    spawn(3, env=split("1,2")).run(shares_a_host)


def ends_at_different_times(rounds: int) -> None:
    """Each rank closes it when its own operations are done; some are late for the last one."""
    fd.init()
    rank, size = fd.rank(), fd.size()
    for turn in range(rounds):
        group = fd.split(0)
        assert group is not None
        works = [fd.all_reduce(np.full(n, 1.0), group=group, async_op=True) for n in (3, 100_000)]
        if rank == turn % size:
            time.sleep(0.3)  # the others wait in the last one, or have closed it
        last = fd.broadcast(np.full(5, float(rank)), root=turn % size, group=group, async_op=True)
        del group
        for work, count in zip(works, (3, 100_000), strict=True):
            assert np.array_equal(work.wait(), np.full(count, float(size)))
        assert np.array_equal(last.wait(), np.full(5, float(turn % size)))


@pytest.mark.parametrize("hosts", HOSTS)
def test_ranks_that_end_at_different_times_are_no_error(spawn: Spawn, hosts: str) -> None:
    spawn(3, env=HOSTS[hosts]).run(ends_at_different_times, 6)


def waits_for_the_late_one() -> None:
    """Rank 1 has done its share and closes the group, while the others wait for rank 2."""
    fd.init()
    group = fd.split(0)
    assert group is not None
    if fd.rank() == 2:
        time.sleep(0.7)
    if fd.rank() == 1:
        fd.broadcast(np.ones(3), root=1, group=group, async_op=True)
        del group
    else:
        assert np.array_equal(fd.broadcast(np.zeros(3), root=1, group=group), np.ones(3))
    fd.barrier()


@pytest.mark.parametrize("hosts", HOSTS)
def test_what_the_rank_has_begun_goes_on(spawn: Spawn, hosts: str) -> None:
    spawn(3, env=HOSTS[hosts]).run(waits_for_the_late_one)
