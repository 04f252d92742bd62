"""A failure while collectives go by steps is one verdict for all ranks; and no stream is left
waiting for a rank that does not come. Ranks over the fake driver."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from fake_device import Array, Rank, interface_of, width_of
from fault_work import (
    UNAVAILABLE,
    Found,
    all_hear,
    barriers,
    failed_on_rank_1,
    how_it_went_wrong,
    waits_with,
)
from test_device_faults import bad_input, forks, goes_wrong

import farandole as fd
import harness
from harness import World

Start = Callable[..., World]

# The nth call of an operation, in their order, and what the rank tried. One operation went before.
CALLS = [
    ("cuEventRecord", 2, "record an event"),
    ("cuStreamWaitEvent", 2, "let a stream wait for an event"),
    ("cuMemcpyAsync", 1, "copy 2004 bytes"),  # the other rank's part
    ("cuStreamBatchMemOp", 1, "let a stream write words and wait for others"),
    ("cuLaunchKernel", 1, "launch farandole_fold_float32"),
    ("cuStreamBatchMemOp", 2, "let a stream write words and wait for others"),
    ("cuMemcpyAsync", 2, "copy 2004 bytes"),
    ("cuEventRecord", 3, "record an event"),
    ("cuStreamWriteValue32", 1, "let a stream write a word"),
    ("cuStreamWaitEvent", 3, "let a stream wait for an event"),  # the owner's
]


@pytest.mark.parametrize(("call", "nth", "tried"), CALLS)
def test_a_call_of_the_driver_that_fails(by_steps: Start, call: str, nth: int, tried: str) -> None:
    answers = how_it_went_wrong(by_steps(2), goes_wrong, call, nth, UNAVAILABLE, "step")
    failed_on_rank_1(answers, tried)


def waits(timeout: float | None = None, how: str = "stopped") -> Found:
    return waits_with(Rank("functions"), "step", timeout=timeout, how=how)


def hears_of_it() -> tuple[float, Found]:
    """When all streams and this rank's program had ended."""
    found = waits()
    return time.monotonic(), found


def test_a_rank_that_is_killed_is_known_within_two_seconds(by_steps: Start) -> None:
    world = by_steps(3)
    world.start(hears_of_it)
    world.hear_all()
    begin = time.monotonic()
    world.signal(1, signal.SIGKILL)
    for survivor in (0, 2):
        when, (verdict, _, _, left) = world.outcome(survivor).value
        assert when - begin < 2
        assert "was killed by SIGKILL" in verdict
        assert left == ["", ""]


def after_one(count: int) -> tuple[Rank, Array, Array]:
    """An operation has gone before, on all ranks; its arrays have so many elements."""
    rank = Rank("functions")
    x, _ = rank.pair(count, "float32")
    y = rank.array(count, "float32")
    fd.all_reduce(x, out=y)
    y.get()
    fd.barrier()
    return rank, x, y


def sums(x: Array, y: Array) -> None:
    while True:
        fd.all_reduce(x, out=y)


def runs_ahead() -> tuple[float, str]:
    """Rank 1's device does nothing, until the others' streams are nearly full."""
    rank, x, y = after_one(50_000)
    if fd.rank() == 1:
        rank.machine.control.configure(b"stream_room", b"5000")
        rank.machine.control.hold(True)
    harness.tell("held")
    with pytest.raises(fd.PeerLost) as caught:
        sums(x, y)
    when = time.monotonic()
    with contextlib.suppress(fd.Error):
        fd.shutdown()
    return when, caught.value.verdict


def test_ranks_that_have_run_ahead_hear_of_one_that_is_killed(by_steps: Start) -> None:
    """They wait for room in their streams by themselves, not in the driver, which hears nothing."""
    world = by_steps(3, FAKE_CUDA_STREAM_ROOM="500")
    world.start(runs_ahead)
    world.hear_all()
    time.sleep(1)  # in which a stream would be full
    begin = time.monotonic()
    world.signal(1, signal.SIGKILL)
    for survivor in (0, 2):
        when, verdict = world.outcome(survivor).value
        assert when - begin < 2
        assert "was killed by SIGKILL" in verdict


class Element:
    """One element of an array."""

    def __init__(self, array: Array, index: int) -> None:
        said = interface_of(array)
        address = array.address + index * width_of(array.dtype)
        self.__cuda_array_interface__ = {**said, "shape": (1,), "data": (address, False)}


def runs_ahead_with_many() -> tuple[float, str]:
    """Arrays at once, of each of many operations: they fill no stream, but the tables of where
    arrays lie, of which a bucket has few."""
    rank = Rank("interface")
    x, _ = rank.pair(MANY, "float32")
    arrays = [Element(x, i) for i in range(MANY)]
    fd.grouped_all_reduce(arrays[:2], out=arrays[:2])
    x.get()
    fd.barrier()
    if fd.rank() == 1:
        rank.machine.control.configure(b"stream_room", b"100000")
        rank.machine.control.hold(True)
    handles = [fd.grouped_all_reduce(arrays, out=arrays, async_op=True) for _ in range(24)]
    harness.tell("ahead")
    with pytest.raises(fd.PeerLost) as caught:
        barriers()
    when = time.monotonic()
    rank.machine.control.lose(700)  # what is left would take long here
    del handles
    with contextlib.suppress(fd.Error):
        fd.shutdown()
    return when, caught.value.verdict


MANY = 1030  # three tables


def test_ranks_that_have_run_ahead_with_many_arrays_hear_of_one_that_is_killed(
    by_steps: Start,
) -> None:
    world = by_steps(2, FAKE_CUDA_STREAM_ROOM="1000")
    world.start(runs_ahead_with_many)
    world.hear_all()
    time.sleep(1)
    begin = time.monotonic()
    world.signal(1, signal.SIGKILL)
    when, verdict = world.outcome(0).value
    assert when - begin < 2
    assert "was killed by SIGKILL" in verdict


def waits_for_room(how: str, timeout: float | None = None) -> tuple[str, list[int], str]:
    """In the middle of an operation, with nothing else in flight, since rank 1's device does
    nothing. An array is given up as soon as it has failed; `how`: rank 0's device is lost then."""
    rank, x, y = after_one(400 << 14)  # so many pieces
    control = rank.machine.control
    control.hold(fd.rank() == 1)
    harness.tell("held")
    if how == "lost" and fd.rank() == 0:
        threading.Timer(0.5, control.lose, [700]).start()
    with pytest.raises(fd.Error) as caught:
        fd.all_reduce(x, out=y, timeout=timeout, name="gradient")
    time.sleep(0.5)  # in which streams end
    if how == "killed":
        y.free()
        rank.machine.arrays.remove(y)
    misuse = rank.machine.misuse()
    control.hold(False)
    with contextlib.suppress(fd.Error):
        fd.shutdown()
    error = caught.value
    return error.verdict, error.values.get("missing", [error.rank]), misuse


def test_a_rank_that_is_killed_while_others_wait_for_room(by_steps: Start) -> None:
    world = by_steps(2)
    world.start(waits_for_room, "killed")
    world.hear_all()
    time.sleep(0.5)
    world.signal(1, signal.SIGKILL)
    verdict, blamed, misuse = world.outcome(0).value
    assert "was killed by SIGKILL" in verdict
    assert (blamed, misuse) == ([1], ""), "nothing uses its arrays any more"


def test_a_device_that_is_late_while_ranks_wait_for_room(by_steps: Start) -> None:
    for verdict, blamed, _ in by_steps(2).run(waits_for_room, "late", 0.5):
        assert verdict.endswith("; not reached by the device of rank 1")
        assert blamed == [1]


def test_a_device_that_is_lost_while_ranks_wait_for_room(by_steps: Start) -> None:
    """It is known at once, not when time is up."""
    for verdict, blamed, _ in by_steps(2).run(waits_for_room, "lost", 30):
        assert verdict.startswith("rank 0: ")
        assert "an address that is not its own" in verdict
        assert blamed == [0]


def test_a_rank_that_is_stopped(by_steps: Start) -> None:
    """Its peers go on at their deadline; what its device still does is left where it is harmless,
    and it hears the same when it goes on."""
    world = by_steps(3)
    world.start(waits, 0.5)
    world.hear_all()
    world.signal(1, signal.SIGSTOP)
    survivors = [o.value for o in world.outcomes([0, 2])]
    world.signal(1, signal.SIGCONT)
    world.say(1, "go")
    for verdict, kind, blamed, left in (*survivors, world.outcome(1).value):
        assert verdict.startswith("rank 1 is stopped: ")
        assert "'gradient' was not complete after " in verdict
        assert (kind, blamed) == ("PeerHung", [1])
        assert left == ["", ""]


def test_a_device_that_is_lost(by_steps: Start) -> None:
    world = by_steps(2)
    world.start(waits, None, "lost")
    world.hear_all()
    world.say(1, "go")
    verdict, kind, blamed = all_hear(world)
    assert verdict.startswith("rank 1: ")
    assert (kind, blamed) == ("DeviceError", [1])


def ends_early() -> None:
    """A rank that shuts down waits until the others no longer need its device."""
    rank = Rank("functions")
    x, on_host = rank.pair(50_000, "float32")
    fd.all_reduce(on_host.array, out=on_host.array)
    y = rank.array(50_000, "float32")
    fd.all_reduce(x, out=y)
    if fd.rank() != 1:
        assert y.get() == on_host.get()
    rank.end()


def test_a_rank_that_ends_at_once(by_steps: Start) -> None:
    by_steps(3, FAKE_CUDA_JITTER="29").run(ends_early)


def fails_without_an_end() -> bool:
    """On rank 1, in its second piece; the first one is in its streams. Whether its array is kept
    while it may be used."""
    rank, x, y = after_one(3 << 14)  # so many pieces
    rank.machine.control.hold(True)
    if fd.rank() == 1:
        for call, nth in (("cuLaunchKernel", 2), ("cuStreamWriteValue32", 1)):
            rank.machine.fail(call, nth, UNAVAILABLE)
    with contextlib.suppress(fd.DeviceError):
        fd.all_reduce(x, out=y)
        barriers()
    array = weakref.ref(y)
    rank.machine.arrays.remove(y)
    there = (y.address, y.aside)
    del y
    with contextlib.suppress(fd.Error):
        fd.all_reduce(x, out=x)  # lets go of what nothing uses any more
    gc.collect()
    kept = array() is not None
    rank.machine.control.hold(False)
    with contextlib.suppress(fd.Error):
        fd.shutdown()
    gc.collect()
    for address in there:
        rank.machine.call("cuMemFree_v2", ctypes.c_ulonglong(address))
    assert rank.machine.leave() == ("", "")
    return kept


def test_what_may_still_be_used_is_kept_where_its_end_cannot_be_known(by_steps: Start) -> None:
    assert by_steps(2).run(fails_without_an_end)[1]


def is_interrupted() -> float:
    """Rank 0, on the host of which nobody says a stream, while rank 1's device is late."""
    rank = Rank("dlpack")
    x, on_host = rank.pair(50_000, "float32")
    expected = rank.host(50_000, "float32")
    fd.all_reduce(on_host.array, out=expected.array)
    y = rank.array(50_000, "float32")
    fd.all_reduce(x, out=y)
    fd.barrier()
    rank.machine.control.hold(fd.rank() == 1)
    handle = fd.all_reduce(x, out=y, async_op=True)
    harness.wait_until(handle.done, "its launch")
    harness.tell("launched")
    if fd.rank() == 0:
        with pytest.raises(KeyboardInterrupt):
            handle.wait()
        when = time.monotonic()
        harness.tell("interrupted")
    else:
        harness.listen()
        when = 0.0
        rank.machine.control.hold(False)
    handle.wait()
    assert y.get() == expected.get()
    del handle
    rank.end()
    return when


def test_who_waits_for_a_device_on_the_host_hears_an_interruption(by_steps: Start) -> None:
    world = by_steps(2)
    world.start(is_interrupted)
    world.hear_all()
    time.sleep(0.1)
    begin = time.monotonic()
    world.signal(0, signal.SIGINT)
    world.hear(0)
    world.say(1, "go on")
    assert world.outcome(0).value - begin < 1
    assert world.outcome(1).error is None


def what_keeps(kept: str, handle: Any) -> object:
    """The engine, as programs do when they end."""
    return fd.world() if kept == "group" else handle


def ends_with(kept: str) -> bool:
    """While its device is late, which goes on meanwhile. Whether shutdown() waited for it."""
    rank, x, y = after_one(50_000)
    control = rank.machine.control
    goes_on = threading.Event()

    def go_on() -> None:
        goes_on.set()
        control.hold(False)

    control.hold(True)
    keeper = what_keeps(kept, fd.all_reduce(x, out=y, async_op=True))
    fd.barrier()
    threading.Timer(0.2, go_on).start()
    fd.shutdown()
    waited = goes_on.is_set()
    go_on()
    assert keeper is not None
    return waited


@pytest.mark.parametrize("kept", ["handle", "group"])
def test_a_rank_that_ends_with_a_handle_or_a_group(by_steps: Start, kept: str) -> None:
    assert by_steps(2).run(ends_with, kept) == [True, True]


def ends_before_the_other(kept: str) -> tuple[str, str]:
    """Rank 1, whose device is late, is then killed. The stream of rank 0 waits for no rank."""
    rank, x, y = after_one(50_000)
    rank.machine.control.hold(fd.rank() == 1)
    handle = fd.all_reduce(x, out=y, async_op=True)
    handle.wait()
    keeper = what_keeps(kept, handle)
    del handle
    harness.tell("launched")
    if fd.rank() == 1:
        harness.listen()
    with contextlib.suppress(fd.Error):
        fd.shutdown()
    y.get()  # whatever it is
    del keeper
    gc.collect()
    return rank.machine.leave()


@pytest.mark.parametrize("kept", ["handle", "group"])
def test_a_rank_that_is_killed_while_another_one_ends(by_steps: Start, kept: str) -> None:
    world = by_steps(2)
    world.start(ends_before_the_other, kept)
    world.hear_all()
    time.sleep(0.3)  # in which it ends
    world.signal(1, signal.SIGKILL)
    assert world.outcome(0).value == ("", "")


def test_a_forked_child(by_steps: Start) -> None:
    assert by_steps(2).run(forks) == [7, 7]


def test_bad_input(by_steps: Start) -> None:
    by_steps(1, FAKE_CUDA_DEVICES="2").run(bad_input)
