"""Failures while a long array of a device goes by the host in pieces: one verdict for all, which
names the operation, and nothing is left. Ranks over the fake driver."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import pytest
from fake_device import Array, Rank
from fault_work import UNAVAILABLE, assert_rank_1_was_killed, how_it_went_wrong, let_fail
from test_staged_pieces import PIECE, on_host

import farandole as fd
from harness import World

Start = Callable[..., World]


def error_of(operate: Callable[[], Any], times: int = 1) -> tuple[str, int | None]:
    """The verdict and rank of the error; its traceback, which would keep arrays, is dropped."""
    try:
        for _ in range(times):
            operate()
    except fd.Error as error:
        return error.verdict, error.rank
    raise AssertionError("nothing went wrong")


def left_by(rank: Rank) -> list[str]:
    with contextlib.suppress(fd.Error):
        fd.shutdown()
    gc.collect()
    return list(rank.machine.leave())


def goes_wrong(call: str, nth: int, kind: str = "all_reduce") -> tuple[str, int | None, list[str]]:
    rank = Rank("interface")
    x, _ = rank.pair(6 * PIECE // 4, "float32")
    y = x if kind == "all_reduce" else rank.array(fd.size() * 6 * PIECE // 4, "float32")
    operation: Any = getattr(fd, kind)
    operation(x, out=y)
    rank.machine.call("cuStreamSynchronize", x.stream)
    let_fail(rank, call, nth)
    said = error_of(lambda: operation(x, out=y, async_op=True, name="gradient").wait(), 3)
    return *said, left_by(rank)


@pytest.mark.parametrize(
    ("call", "nth"),
    [
        ("cuMemcpyAsync", 2),  # the second piece, before the operation begins
        ("cuMemcpyAsync", 3),  # the third, once the first has been reduced
        ("cuMemcpyAsync", 4),  # the first on its way back
        ("cuMemcpyAsync", 12),  # the last
        ("cuStreamWriteValue32", 4),
        ("cuStreamWaitEvent", 3),
        ("cuLaunchHostFunc", 5),
    ],
)
def test_a_call_of_the_driver_that_fails(in_pieces: Start, call: str, nth: int) -> None:
    one, other = how_it_went_wrong(in_pieces(2), goes_wrong, call, nth)
    assert one == other
    assert one[0].startswith("rank 1: cannot ")
    assert one[1:] == (1, ["", ""]), "all that was taken is given back"


def test_the_first_copy_of_shares_that_fails(in_pieces: Start) -> None:
    """The copy begins when all ranks have agreed."""
    one, other = how_it_went_wrong(in_pieces(2), goes_wrong, "cuMemcpyAsync", 1, "all_gather")
    assert one == other
    assert one[0].startswith("rank 1: cannot copy")
    assert one[1:] == (1, ["", ""])


def says_which() -> tuple[str | None, str | None]:
    """The operation and the tensor that a failure in the middle names."""
    rank = Rank("interface")
    x, _ = rank.pair(6 * PIECE // 4, "float32")
    let_fail(rank, "cuMemcpyAsync", 4, UNAVAILABLE)
    with pytest.raises(fd.DeviceError) as caught:
        fd.all_reduce(x, out=x, name="gradient")
    return caught.value.operation, caught.value.tensor


def test_a_verdict_names_the_operation(in_pieces: Start) -> None:
    for operation, tensor in how_it_went_wrong(in_pieces(2), says_which):
        assert operation is not None
        assert "'gradient'" in operation
        assert tensor == "gradient"


def is_late() -> tuple[str, list[str]]:
    rank = Rank()
    x, _ = rank.pair(2 * PIECE, "float32")
    fd.all_reduce(x, out=x)
    rank.machine.control.hold(fd.rank() == 1)
    verdict, _ = error_of(lambda: fd.all_reduce(x, out=x, timeout=0.5, name="gradient"))
    rank.machine.control.hold(False)
    return verdict, left_by(rank)


def test_a_device_that_does_not_come_by(in_pieces: Start) -> None:
    one, other = in_pieces(2).run(is_late)
    assert one == other
    assert "'gradient' was not complete after" in one[0]
    assert "rank 1" in one[0]
    assert one[1] == ["", ""]


def until_one_is_killed() -> tuple[str, int | None, list[str]]:
    rank = Rank()
    x, _ = rank.pair(10 * PIECE, "float32")
    y: Array = rank.array(10 * PIECE, "float32")
    fd.barrier()
    said = error_of(lambda: fd.all_reduce(x, out=y), 1000)
    return *said, left_by(rank)


@pytest.mark.parametrize("point", ["stream.post#8", "stream.post#20"])
def test_a_rank_that_is_killed_between_pieces(
    spawn_faulty: Callable[..., World], fake_driver: str, point: str
) -> None:
    env = {
        "CUDA_VISIBLE_DEVICES": None,
        "FAKE_LIBCUDA": fake_driver,
        "FARANDOLE_DEVICE_PATH": "staged",
        "FARANDOLE_STAGED_PIECE_BYTES": str(PIECE),
        "FARANDOLE_FAULT": f"rank=1,at={point},do=sigkill",
    }
    world = spawn_faulty(3, env=env)
    world.start(until_one_is_killed)
    assert_rank_1_was_killed(world)


def disagrees() -> str:
    """Arguments that differ are refused before anything is cut, and the next call works."""
    rank = Rank()
    x, hx = rank.pair(5 * PIECE // 4, "float32")
    verdict, _ = error_of(lambda: fd.all_reduce(x, "sum" if fd.rank() == 0 else "max", out=x))
    assert x.get() == hx.get()
    wanted = on_host("all_reduce", hx, "float32")
    assert fd.all_reduce(x, out=x).get() == wanted
    rank.end()
    return verdict


def test_ranks_that_disagree(in_pieces: Start) -> None:
    one, other = in_pieces(2).run(disagrees)
    assert one == other
    assert "ranks disagree on the op of all_reduce" in one
