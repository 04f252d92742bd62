"""What goes wrong while collectives go by steps is one verdict for all ranks; and no stream is left
waiting for a rank that does not come. Ranks over the fake driver."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from collections.abc import Callable

import pytest
from fake_device import Rank
from fault_work import UNAVAILABLE, how_it_went_wrong
from test_device_faults import bad_input, forks, goes_wrong

import farandole as fd
import harness
from harness import World

Start = Callable[..., World]

# The nth call of an operation, in their order, and what the rank tried. One operation went before.
CALLS = [
    ("cuEventRecord", 2, "record an event"),
    ("cuStreamWaitEvent", 2, "let a stream wait for an event"),
    ("cuMemcpyAsync", 1, "copy 4004 bytes"),
    ("cuLaunchKernel", 1, "launch farandole_arrive"),
    ("cuStreamWaitValue32", 1, "let a stream wait for a word"),
    ("cuLaunchKernel", 2, "launch farandole_two_shot_float32"),
    ("cuLaunchKernel", 3, "launch farandole_arrive"),
    ("cuStreamWaitValue32", 2, "let a stream wait for a word"),
    ("cuMemcpyAsync", 2, "copy 4004 bytes"),
    ("cuEventRecord", 3, "record an event"),
    ("cuStreamWaitEvent", 3, "let a stream wait for an event"),
    ("cuStreamWriteValue32", 1, "let a stream write a word"),
    ("cuLaunchHostFunc", 1, "let a stream call a function"),
    ("cuStreamWaitEvent", 4, "let a stream wait for an event"),  # the owner's
]


@pytest.mark.drawn(3)
@pytest.mark.parametrize(("call", "nth", "tried"), CALLS)
def test_a_call_of_the_driver_that_fails(by_steps: Start, call: str, nth: int, tried: str) -> None:
    answers = how_it_went_wrong(by_steps(2), goes_wrong, call, nth, UNAVAILABLE, "step")
    of_rank_0, of_rank_1 = answers
    assert of_rank_0[0] == of_rank_1[0], "one verdict for all"
    verdict, kind = of_rank_0[0]
    assert verdict.startswith(f"rank 1: cannot {tried}")
    assert kind == "DeviceError"
    assert {*of_rank_0[1], *of_rank_1[1]} == {1}
    assert of_rank_0[2] == of_rank_1[2] == ["", ""], "all that was taken is given back"


def barriers() -> None:
    while True:
        fd.barrier()


def waits_for_one(
    timeout: float | None = None, lost: bool = False, path: str = "step", count: int = 50_000
) -> tuple[str, str, list[str]]:
    """Steps of all are launched, and those of rank 1 do not run. What the others' programs wait for
    ends nevertheless."""
    rank = Rank("functions")
    rank.device = fd.rank() % int(os.environ.get("FAKE_CUDA_DEVICES", "1"))
    return waits_with(rank, timeout, lost, path, count)


def waits_with(
    rank: Rank, timeout: float | None, lost: bool, path: str, count: int
) -> tuple[str, str, list[str]]:
    x, _ = rank.pair(count, "float32")
    y = rank.array(count, "float32")
    for _ in range(2):
        fd.all_reduce(x, out=y)
    y.get()
    fd.barrier()
    held = fd.rank() == 1
    rank.machine.control.hold(held)
    fd.all_reduce(x, out=y, timeout=timeout, name="gradient")
    assert fd.world().last_path == path
    harness.tell("launched")
    if not held:
        y.get()  # whatever it is
    else:
        harness.listen()
        if lost:
            rank.machine.control.lose(700)
    with pytest.raises(fd.Error) as caught:
        barriers()
    if held:
        rank.machine.control.hold(False)
    with contextlib.suppress(fd.Error):
        fd.shutdown()
    gc.collect()
    if lost and held:
        rank.machine.control.forget()
        return caught.value.verdict, caught.type.__name__, ["", ""]
    return caught.value.verdict, caught.type.__name__, list(rank.machine.leave())


DRIVERS = {
    "all that there is": {},
    "older handles": {"FAKE_CUDA_VIRTUAL_MEMORY": "0"},
    "no memory operations": {"FAKE_CUDA_MEMORY_OPERATIONS": "0", "FAKE_CUDA_DEVICES": "3"},
}


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_rank_that_is_killed(by_steps: Start, driver: str) -> None:
    world = by_steps(3, **DRIVERS[driver])
    world.start(waits_for_one)
    world.hear_all()
    world.signal(1, signal.SIGKILL)
    survivors = [o.value for o in world.outcomes([0, 2])]
    assert survivors[0] == survivors[1]
    verdict, kind, left = survivors[0]
    assert "rank 1" in verdict
    assert "was killed by SIGKILL during all_reduce" in verdict
    assert kind == "PeerLost"
    assert left == ["", ""]


def hears_of_it() -> tuple[float, tuple[str, str, list[str]]]:
    """When all streams and this rank's program had ended."""
    found = waits_for_one()
    return time.monotonic(), found


def test_a_rank_that_is_killed_is_known_within_two_seconds(by_steps: Start) -> None:
    world = by_steps(3)
    world.start(hears_of_it)
    world.hear_all()
    begin = time.monotonic()
    world.signal(1, signal.SIGKILL)
    for survivor in (0, 2):
        when, (verdict, _, left) = world.outcome(survivor).value
        assert when - begin < 2
        assert "was killed by SIGKILL" in verdict
        assert left == ["", ""]


def test_a_rank_that_is_stopped(by_steps: Start) -> None:
    """Its peers go on at their deadline; what its device still does is left where it is harmless,
    and it hears the same when it goes on."""
    world = by_steps(3)
    world.start(waits_for_one, 0.5)
    world.hear_all()
    world.signal(1, signal.SIGSTOP)
    survivors = [o.value for o in world.outcomes([0, 2])]
    world.signal(1, signal.SIGCONT)
    world.say(1, "go")
    for verdict, kind, left in (*survivors, world.outcome(1).value):
        assert "'gradient' was not complete on device 0 in time" in verdict
        assert kind == "Stalled"
        assert left == ["", ""]


def test_a_rank_that_is_killed_while_kernels_spin(by_steps: Start) -> None:
    world = by_steps(3, FARANDOLE_DEVICE_PATH="spin")
    world.start(waits_for_one, None, False, "spin", 1000)
    world.hear_all()
    world.signal(1, signal.SIGKILL)
    for survivor in (0, 2):
        verdict, kind, left = world.outcome(survivor).value
        assert "was killed by SIGKILL during all_reduce" in verdict
        assert kind == "PeerLost"
        assert left == ["", ""]


def test_a_device_that_does_not_come_by(by_steps: Start) -> None:
    world = by_steps(2)
    world.start(waits_for_one, 0.5)
    world.hear_all()
    world.say(1, "go")
    one, other = (o.value for o in world.outcomes())
    assert one == other
    verdict, kind, left = one
    assert "'gradient' was not complete on device 0 in time" in verdict
    assert kind == "Stalled"
    assert left == ["", ""]


def test_a_device_that_is_lost(by_steps: Start) -> None:
    world = by_steps(2)
    world.start(waits_for_one, None, True)
    world.hear_all()
    world.say(1, "go")
    outcomes = world.outcomes()
    assert [o.error for o in outcomes] == [None, None], world.report()
    one, other = (o.value for o in outcomes)
    assert one == other
    assert one[0].startswith("rank 1: ")
    assert one[1] == "DeviceError"
    assert one[2] == ["", ""]


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
    by_steps(1).run(bad_input)
