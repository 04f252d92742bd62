"""Operations in flight: handles, many at once, groups side by side, others' arrays."""

from __future__ import annotations

import array
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import farandole as fd
import harness
from harness import World


def many_in_flight(how_many: int) -> None:
    fd.init()
    total = sum(range(1, fd.size() + 1))
    handles = [
        fd.all_reduce(np.full(1 + 37 * i, fd.rank() + 1.0), async_op=True) for i in range(how_many)
    ]
    for i, handle in reversed(list(enumerate(handles))):
        result = handle.wait()
        assert result.shape == (1 + 37 * i,)
        assert (result == total).all()
        assert handle.done()
        assert handle.wait() is result, "a second wait answers at once"


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_many_operations_in_flight(standing: Callable[[int], World], size: int) -> None:
    standing(size).run(many_in_flight, 200)


def late_rank() -> float:
    fd.init()
    fd.barrier()
    if fd.rank() == 0:
        harness.tell("I am late")
        assert harness.listen() == "go"
    handle = fd.all_reduce(np.ones(100_000), async_op=True)
    if fd.rank() != 0:
        assert not handle.done()
        with pytest.raises(TimeoutError):
            handle.wait(timeout=0.01)
        with pytest.raises(TimeoutError):
            handle.wait(0)
        harness.tell("timed out")
    return float(handle.wait()[-1])


def test_a_wait_that_times_out_can_be_repeated(standing: Callable[[int], World]) -> None:
    world = standing(3)
    world.start(late_rank)
    assert world.hear(0) == "I am late"
    world.hear_all([1, 2])
    world.say(0, "go")
    assert [o.value for o in world.outcomes()] == [3.0] * 3


def completes_unattended() -> None:
    """Nobody waits: progress is the engine's own business."""
    fd.init()
    handle = fd.all_reduce(np.ones(10_000), async_op=True)
    done = threading.Event()
    threading.Thread(target=lambda: (handle.wait(), done.set())).start()
    assert done.wait(20)
    handle = fd.all_reduce(np.ones(10_000), async_op=True)
    give_up = threading.Event()
    for _ in range(20_000):
        if handle.done():
            break
        give_up.wait(0.001)
    assert handle.done()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_operations_complete_without_a_waiter(standing: Callable[[int], World], size: int) -> None:
    standing(size).run(completes_unattended)


def dropped_handles() -> None:
    """The engine keeps the arrays of an operation whose handle nobody holds."""
    fd.init()
    for _ in range(50):
        fd.all_reduce(np.ones(3000), async_op=True)
        fd.all_gather(np.ones(3000), async_op=True)
    assert (fd.all_reduce(np.ones(10)) == fd.size()).all()


def test_handles_may_be_dropped(standing: Callable[[int], World]) -> None:
    standing(3).run(dropped_handles)


# ---- groups ----


def halves() -> list[int]:
    fd.init()
    parity = fd.split(fd.rank() % 2, key=-fd.rank())
    assert parity is not None
    members = [r for r in range(fd.size()) if r % 2 == fd.rank() % 2]
    assert parity.size == len(members)
    assert parity.ranks == members[::-1], "ordered by key"
    assert parity.ranks[parity.rank] == fd.rank()
    x = np.full(5000, 10.0 ** fd.rank())
    for _ in range(20):  # world's and the group's operations in flight together
        of_world = fd.all_reduce(x, async_op=True)
        of_group = fd.all_reduce(x, group=parity, async_op=True)
        second = fd.all_gather(np.array([fd.rank()]), group=parity, async_op=True)
        assert second.wait().tolist() == members[::-1]
        assert (of_group.wait() == sum(10.0**r for r in members)).all()
        assert (of_world.wait() == sum(10.0**r for r in range(fd.size()))).all()
    root = fd.broadcast(np.array([fd.rank()]), root=parity.size - 1, group=parity)
    assert root.tolist() == [members[0]]
    fd.barrier(group=parity)
    return parity.ranks


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_groups_beside_the_world(standing: Callable[[int], World], size: int) -> None:
    seen = standing(size).run(halves)
    assert sorted({r for ranks in seen for r in ranks}) == list(range(size))


def different_order() -> None:
    """Groups are streams of their own: ranks may come to them in any order."""
    fd.init()
    group = fd.split(0)
    assert group is not None
    for i in range(20):
        ways: list[Callable[[], Any]] = [
            lambda: fd.all_reduce(np.ones(40_000), async_op=True),
            lambda: fd.all_reduce(np.full(70, 2.0), group=group, async_op=True),
        ]
        if (fd.rank() + i) % 2:
            ways.reverse()
        results = sorted(float(handle.wait()[0]) for handle in [way() for way in ways])
        assert results == [fd.size(), 2 * fd.size()]


def test_groups_in_different_order(standing: Callable[[int], World]) -> None:
    standing(3).run(different_order)


def some_stay_out() -> int:
    fd.init()
    group = fd.split(None if fd.rank() == 1 else 4)
    if fd.rank() == 1:
        assert group is None
        return 0
    assert group is not None
    inner = fd.split(0, group=group)
    assert inner is not None
    total = int(fd.all_reduce(np.ones(1, int), group=inner)[0])
    with pytest.raises(fd.InvalidArgument, match="negative"):
        fd.split(-3)
    return total


def test_ranks_may_stay_out_of_a_split(standing: Callable[[int], World]) -> None:
    assert standing(3).run(some_stay_out) == [2, 0, 2]


def split_often(times: int) -> tuple[int, int]:
    fd.init()
    used = []
    for _ in range(times):
        group = fd.split(0)
        assert group is not None
        fd.all_reduce(np.ones(10), group=group)
        del group
        fd.barrier()
        used.append(fd.world().counters()["arena_bytes"])
    return used[times // 2], used[-1]


def test_groups_that_are_dropped_give_back_their_memory(spawn: Callable[..., World]) -> None:
    for half, end in spawn(3).run(split_often, 60):
        assert end <= half + (8 << 20)


def form_alone(times: int) -> tuple[list[float], int, int]:
    """The others of the world take no part, and need not come."""
    fd.init()
    world, mine = fd.world(), fd.rank()
    ways = [[0, 1], [2, 0], [2, 1, 0], [1]]
    totals, used = [], []
    for i in range(times):
        for w, members in enumerate(ways):
            if mine not in members:
                continue
            group = world.form(members, len(ways) * i + w)
            assert group.ranks == members, "in the order that was given"
            totals.append(float(fd.all_reduce(np.float64(10.0**mine), group=group)))
            del group
        used.append(world.counters()["arena_bytes"])
    for wrong, why in (([0, 1, 2, 3], "rank 3"), ([mine, mine], "twice"), ([], "without itself")):
        with pytest.raises(fd.InvalidArgument, match=why):
            world.form(wrong, 1000)
    return totals[: len(ways)], used[times // 2], used[-1]


def test_members_alone_form_a_group_and_give_it_back(spawn: Callable[..., World]) -> None:
    rows = spawn(3).run(form_alone, 40)
    assert [totals for totals, _, _ in rows] == [
        [11.0, 101.0, 111.0, 11.0], [11.0, 111.0, 10.0, 11.0], [101.0, 111.0, 101.0, 111.0],
    ]  # fmt: skip
    for _, half, end in rows:
        assert end <= half + (8 << 20)


def form_without_the_first() -> None:
    fd.init()
    if fd.rank() == 1:
        fd.world().form([0, 1], 7, timeout=0.3)


def test_a_group_whose_first_member_does_not_come_says_so(spawn: Callable[..., World]) -> None:
    world = spawn(2)
    world.start(form_without_the_first)
    assert world.outcome(0).error is None
    late = world.outcome(1)
    assert late.error == "Stalled"
    assert "rank 0 did not create the group in time" in late.text


# ---- arrays of other libraries ----


def other_arrays() -> None:
    fd.init()
    p = fd.size()
    numbers = array.array("d", [1.0, 2.0, 3.0])
    assert fd.all_reduce(numbers).tolist() == [p, 2 * p, 3 * p]
    fd.all_reduce(numbers, out=numbers)
    assert numbers.tolist() == [p, 2 * p, 3 * p]
    raw = bytearray([1, 2, 3])
    fd.all_reduce(memoryview(raw), "max", out=raw)
    assert raw == bytearray([1, 2, 3])
    assert fd.all_gather(b"ab").tobytes() == b"ab" * p
    view = memoryview(np.arange(6, dtype=np.int16)).cast("B").cast("h", (2, 3))
    assert fd.all_reduce(view).tolist() == [[0, p, 2 * p], [3 * p, 4 * p, 5 * p]]
    assert fd.all_reduce(np.arange(4)[1:3]).tolist() == [p, 2 * p]


@pytest.mark.parametrize("size", [1, 3])
def test_anything_with_the_buffer_protocol(standing: Callable[[int], World], size: int) -> None:
    standing(size).run(other_arrays)


def torch_tensors() -> None:
    import torch

    fd.init()
    p = fd.size()
    for dtype in (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.bool,
        torch.uint8,
    ):
        result = fd.all_reduce(torch.ones(2, 5000, dtype=dtype))
        assert isinstance(result, torch.Tensor)
        assert result.dtype == dtype
        assert result.shape == (2, 5000)
        assert (result == (True if dtype == torch.bool else p)).all()
    x = torch.arange(10.0)
    fd.all_reduce(x, out=x)
    assert x.tolist() == [i * p for i in range(10)]
    assert fd.all_gather(torch.full((2, 2), fd.rank())).shape == (2 * p, 2)
    handle = fd.broadcast(torch.full((3,), fd.rank()), root=p - 1, async_op=True)
    assert handle.wait().tolist() == [p - 1] * 3
    with pytest.raises(fd.InvalidArgument, match="contiguous"):
        fd.all_reduce(torch.ones(4, 4).t()[1:])
    with pytest.raises(fd.InvalidArgument):
        fd.all_reduce(torch.ones(4, requires_grad=True))
    with pytest.raises(fd.InvalidArgument):
        fd.all_reduce(torch.ones(4, dtype=torch.complex64))
    assert float(fd.all_reduce(torch.tensor(2.0))) == 2 * p


def test_torch_tensors(spawn: Callable[..., World]) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    spawn(2).run(torch_tensors, timeout=60)


# ---- names, mixed programs ----


def names() -> None:
    fd.init()
    assert (fd.all_reduce(np.ones(3), name="loss") == fd.size()).all()
    other = "mine" if fd.rank() == 0 else "theirs"
    for count in (3, 4000, 60_000):
        with pytest.raises(fd.Mismatch) as mismatch:
            fd.all_reduce(np.ones(count), name=other)
        assert mismatch.value.field == "name"
        assert mismatch.value.values == {"mine": [0], "theirs": list(range(1, fd.size()))}
        assert (fd.all_reduce(np.ones(count), name="x" * 500) == fd.size()).all()


@pytest.mark.parametrize("size", [2, 3])
def test_names_are_compared(standing: Callable[[int], World], size: int) -> None:
    standing(size).run(names)
