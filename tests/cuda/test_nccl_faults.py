"""A failure in NCCL is one verdict for all ranks that names rank and operation; and no stream is
left waiting in it for a rank that does not come. Ranks over the fake driver and a fake NCCL."""

from __future__ import annotations

import contextlib
import gc
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from fake_nccl import NcclRank
from fault_work import Found, how_it_went_wrong, on_rank_1, waits_with

import farandole as fd
import harness
from harness import World

Start = Callable[..., World]

PATIENCE = 60.0  # seconds, of ranks whom NCCL lets wait

# Calls of NCCL by an operation, in order; an error code for each, and its meaning.
CALLS = [
    ("ncclRedOpCreatePreMulSum", 4, "it refuses an argument"),
    ("ncclGroupStart", 3, "it is in a state that it did not expect"),
    ("ncclAllReduce", 5, "it refuses how it is used"),
    ("ncclGroupEnd", 1, "a call of CUDA failed"),
    ("ncclCommGetAsyncError", 2, "a call of the system failed"),
    ("ncclRedOpDestroy", 3, "it is in a state that it did not expect"),
]


def left_of(rank: NcclRank) -> list[str]:
    with contextlib.suppress(fd.Error):
        fd.shutdown()
    gc.collect()
    return [*rank.machine.leave(), rank.nccl.left()]


def facts_of(act: Callable[[], None]) -> list[Any]:
    """The verdict, kind, rank and operation of the error that `act` raises."""
    try:
        act()
    except fd.Error as error:
        return [error.verdict, type(error).__name__, error.rank, error.operation]
    raise AssertionError("nothing went wrong")


def goes_wrong(call: str, code: int) -> list[Any]:
    rank = NcclRank("interface")
    x = rank.array(1001, "float32")
    fd.all_reduce(x, out=x)
    x.get()
    on_rank_1(lambda: rank.nccl.fail(call, 1, code))

    def reduce() -> None:
        for _ in range(3):
            fd.all_reduce(x, "mean", prescale=0.5, out=x, name="gradient")

    return [*facts_of(reduce), left_of(rank)]


@pytest.mark.parametrize(("call", "code", "meaning"), CALLS)
def test_a_call_that_fails(by_nccl: Start, call: str, code: int, meaning: str) -> None:
    fails_on_all(how_it_went_wrong(by_nccl(2), goes_wrong, call, code), 1, call, meaning)


def test_a_call_that_fails_between_hosts(by_nccl: Start) -> None:
    call, code, meaning = CALLS[2]
    answers = how_it_went_wrong(by_nccl(2, "1,1"), goes_wrong, call, code)
    fails_on_all(answers, 0, call, meaning)


def fails_on_all(answers: list[Any], device: int, call: str, meaning: str) -> None:
    one, other = answers
    assert one == other
    verdict, kind, rank, operation, left = one
    assert verdict == f"rank 1: {call} failed on device {device} (Fake GPU): {meaning}"
    assert (kind, rank) == ("DeviceError", 1)
    assert operation.startswith("all_reduce #")
    assert "'gradient'" in operation
    assert left == ["", "", ""]


def fails_under_way() -> list[Any]:
    """NCCL notices while the host has gone on."""
    rank = NcclRank("functions")
    x = rank.array(1001, "float32")
    fd.all_reduce(x, out=x, name="gradient")  # which the host may not have seen the end of
    x.get()
    fd.barrier()
    held = fd.rank() == 1
    rank.machine.control.hold(held)

    def reduce_and_go_on() -> None:
        fd.all_reduce(x, out=x, name="gradient")  # where rank 0 is slow, it is told here
        if held:
            rank.nccl.fail_later(6)
        else:
            x.get()
        while True:
            fd.barrier()

    facts = facts_of(reduce_and_go_on)
    rank.machine.control.hold(False)
    return [*facts, left_of(rank)]


def test_an_error_that_comes_later(by_nccl: Start) -> None:
    one, other = by_nccl(2).run(fails_under_way)
    assert one == other
    verdict, kind, rank, operation, left = one
    assert kind == "DeviceError"
    assert verdict.startswith("rank 1: ncclAllReduce failed on device 1 (Fake GPU): it has lost ")
    assert rank == 1
    assert "'gradient'" in operation
    assert left == ["", "", ""]


def waits(timeout: float | None = None) -> Found:
    rank = NcclRank("functions")
    *facts, left = waits_with(rank, "nccl", timeout=timeout)
    return *facts, [*left, rank.nccl.left()]


@pytest.mark.parametrize(("hosts", "notices"), [("", "0"), ("", "1"), ("1,2", "0"), ("2,1", "0")])
def test_a_rank_that_is_killed(by_nccl: Start, hosts: str, notices: str) -> None:
    """NCCL waits for it for ever, or comes to an error; it is aborted, and the streams go on."""
    world = by_nccl(3, hosts, FAKE_NCCL_NOTICES=notices)
    world.start(waits)
    world.hear_all()
    world.signal(1, signal.SIGKILL)
    survivors = [o.value for o in world.outcomes([0, 2])]
    assert survivors[0] == survivors[1]
    verdict, kind, _, left = survivors[0]
    if notices == "0":
        assert "rank 1 " in verdict
        assert " during all_reduce" in verdict
    if not hosts and notices == "0":
        assert "was killed by SIGKILL" in verdict
    assert kind in ("PeerLost", "DeviceError")
    assert left == ["", "", ""]


@pytest.mark.parametrize("hosts", ["", "1,1"])
def test_a_device_that_does_not_come_by(by_nccl: Start, hosts: str) -> None:
    world = by_nccl(2, hosts)
    world.start(waits, 0.5)
    world.hear_all()
    world.say(1, "go")
    one, other = (o.value for o in world.outcomes())
    assert one == other
    assert "'gradient' was not complete on device " in one[0], "NCCL does not tell who is late"
    assert one[1:] == ("Stalled", [], ["", "", ""])


def meets(killed: int) -> list[Any]:
    """That rank is killed while NCCL brings its ranks together."""
    rank = NcclRank()
    rank.nccl.hold(fd.rank() == killed)
    return [*facts_of(lambda: meet(rank)), left_of(rank)]


def meet(rank: NcclRank) -> None:
    x = rank.array(1001, "float32")
    handle = fd.all_reduce(x, out=x, async_op=True)

    def is_under_way() -> bool:
        return not handle.done() and rank.nccl.calls("ncclCommInitRankConfig") == 1

    harness.wait_until(is_under_way, "NCCL to begin")
    harness.tell("begun")
    handle.wait()


@pytest.mark.parametrize(
    ("size", "hosts", "killed"), [(2, "", 1), (2, "1,1", 1), (2, "1,1", 0), (3, "1,1,1", 0)]
)
def test_a_rank_that_is_killed_while_they_meet(
    by_nccl: Start, size: int, hosts: str, killed: int
) -> None:
    world = by_nccl(size, hosts)
    world.start(meets, killed)
    world.hear_all()
    world.signal(killed, signal.SIGKILL)
    verdicts = set()
    for survivor in set(range(size)) - {killed}:
        verdict, kind, *_, left = world.outcome(survivor).value
        verdicts.add(verdict)
        assert kind == "PeerLost"
        assert left == ["", "", ""]
    (verdict,) = verdicts
    assert f"rank {killed} " in verdict
    assert " during all_reduce" in verdict


def refuses_late(hosts: int) -> list[Any]:
    """Rank 1 cannot meet the others, who wait for it in NCCL; and go on at once."""
    rank = NcclRank()
    if fd.rank() == 1:
        rank.nccl.fail("ncclCommInitRankConfig", 1, 2)
    assert fd.cross_size() == hosts
    x = rank.array(1001, "float32").put(bytes(4004))
    begun = time.monotonic()
    fd.all_reduce(x, out=x)
    x.get()
    took = time.monotonic() - begun
    assert fd.world().last_path != "nccl"
    left = left_of(rank)
    return [took, rank.nccl.calls("ncclCommAbort"), left]


@pytest.mark.parametrize(("hosts", "number"), [("", 1), ("2,1", 2)])
def test_a_rank_that_cannot_meet_the_others_frees_them(
    by_nccl: Start, hosts: str, number: int
) -> None:
    ranks = by_nccl(3, hosts).run(refuses_late, number)
    for took, _, left in ranks:
        assert took < PATIENCE / 2
        assert left == ["", "", ""]
    assert [aborted for _, aborted, _ in ranks] == [1, 0, 1]


def ends_early() -> None:
    """A rank that shuts down waits until the others no longer need its device."""
    rank = NcclRank("functions")
    x = rank.array(50_000, "float32").put(bytes(200_000))
    y = rank.array(50_000, "float32")
    fd.all_reduce(x, out=y)
    if fd.rank() != 1:
        assert y.get() == bytes(200_000)
    rank.end()
    assert rank.nccl.calls("ncclCommAbort") == 0


@pytest.mark.parametrize("hosts", ["", "2,1"])
def test_a_rank_that_ends_at_once(by_nccl: Start, hosts: str) -> None:
    by_nccl(3, hosts, FAKE_CUDA_JITTER="29").run(ends_early)
