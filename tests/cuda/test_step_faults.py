"""What goes wrong while collectives go by steps is one verdict for all ranks; and no stream is left
waiting for a rank that does not come. Ranks over the fake driver."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable

import pytest
from fake_device import Array, Rank
from fault_work import (
    UNAVAILABLE,
    Found,
    all_hear,
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
    ("cuLaunchKernel", 1, "launch farandole_two_shot_float32"),
    ("cuStreamBatchMemOp", 2, "let a stream write words and wait for others"),
    ("cuMemcpyAsync", 2, "copy 2004 bytes"),
    ("cuEventRecord", 3, "record an event"),
    ("cuStreamWriteValue32", 1, "let a stream write a word"),
    ("cuEventRecord", 4, "record an event"),
    ("cuStreamWaitEvent", 3, "let a stream wait for an event"),
    ("cuLaunchHostFunc", 1, "let a stream call a function"),
    ("cuStreamWaitEvent", 4, "let a stream wait for an event"),  # the owner's
]


@pytest.mark.drawn(3)
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


def sums(x: Array, y: Array) -> None:
    while True:
        fd.all_reduce(x, out=y)


def runs_ahead() -> tuple[float, str]:
    """Of a device that does nothing on rank 1, until the others' streams are nearly full."""
    rank = Rank("functions")
    x, _ = rank.pair(50_000, "float32")
    y = rank.array(50_000, "float32")
    fd.all_reduce(x, out=y)
    y.get()
    fd.barrier()
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


def waits_for_room(how: str, timeout: float | None = None) -> tuple[str, list[int], str]:
    """In the middle of an operation, with nothing else in flight, since rank 1's device does
    nothing. An array is given up as soon as it has failed; `how`: rank 0's device is lost then."""
    rank = Rank("functions")
    x, _ = rank.pair(400 << 14, "float32")  # so many pieces
    y = rank.array(400 << 14, "float32")
    fd.all_reduce(x, out=y)
    y.get()
    fd.barrier()
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
        assert "'gradient' was not complete after " in verdict
        assert verdict.endswith("; not reached by the device of rank 1")
        assert (kind, blamed) == ("Stalled", [1])
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
    """Whoever shuts down waits for what others need of its device."""
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


def test_a_forked_child(by_steps: Start) -> None:
    assert by_steps(2).run(forks) == [7, 7]


def test_bad_input(by_steps: Start) -> None:
    by_steps(1, FAKE_CUDA_DEVICES="2").run(bad_input)
