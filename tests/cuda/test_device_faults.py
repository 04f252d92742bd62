"""A failure of a device on one rank is the same verdict on all; nothing hangs, and what was taken
is given back. Ranks over the fake driver."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from fake_device import Rank, WithDlpack, WithVersion
from fault_work import (
    MEMORY,
    UNAVAILABLE,
    assert_rank_1_was_killed,
    device_of_this_rank,
    failed_on_rank_1,
    how_it_went_wrong,
    let_fail,
)

import farandole as fd
import harness
from harness import World

Start = Callable[..., World]

# The nth call from before the operation on, with each of these codes in the driver's terms; what
# stands after it is what the rank tried. In the order in which a first operation calls them.
BEFORE = [
    ("cuDevicePrimaryCtxRetain", 1, "use device 0"),
    ("cuCtxPushCurrent", 1, "enter the context"),
    ("cuMemHostAlloc", 1, "allocate 4 bytes of the host's memory"),
    ("cuMemHostAlloc", 2, "allocate 4 bytes of the host's memory"),
    ("cuMemHostGetDevicePointer", 1, "map the host's memory"),
    ("cuEventCreate", 1, "make an event"),
    ("cuCtxGetStreamPriorityRange", 1, "ask for the priorities"),
    ("cuStreamCreateWithPriority", 1, "make a stream"),
    ("cuStreamCreateWithPriority", 2, "make a stream"),
    ("cuPointerGetAttribute", 1, "find the device that has an address"),
    ("cuEventRecord", 1, "record an event"),
    ("cuStreamWaitEvent", 1, "let a stream wait for an event"),
    ("cuMemHostRegister", 1, "register 65536 bytes of a segment"),
    ("cuMemHostGetDevicePointer", 3, "map the host's memory"),
    ("cuMemcpyAsync", 1, "copy 4004 bytes"),
    ("cuStreamWriteValue32", 1, "let a stream write a word"),
    ("cuLaunchHostFunc", 1, "let a stream call a function"),
]
AFTER = [
    ("cuMemcpyAsync", 2, "copy 4004 bytes"),
    ("cuStreamWriteValue32", 2, "let a stream write a word"),
    ("cuEventRecord", 2, "record an event"),
    ("cuStreamWaitEvent", 2, "let a stream wait for an event"),
]


def goes_wrong(
    call: str, nth: int, code: int, before: str = ""
) -> tuple[list[str], list[Any], list[str]]:
    """`before`: by which way an operation goes that precedes it."""
    rank = Rank("interface")
    rank.device = device_of_this_rank()
    x, _ = rank.pair(1001, "float32")
    if before:
        fd.all_reduce(x, out=x)
        assert fd.world().last_path == before
        x.get()
    let_fail(rank, call, nth, code)
    verdicts, kinds, ranks = [], [], []
    for _ in range(3):  # what the rank copies back is its own; the next operation is everybody's
        try:
            fd.all_reduce(x, out=x, async_op=True).wait()
        except fd.Error as error:
            verdicts.append(error.verdict)
            kinds.append(type(error).__name__)
            ranks.append(error.rank)
    assert len(verdicts) >= 2, "a group that has failed stays so"
    assert len(set(verdicts)) == 1
    with contextlib.suppress(fd.Error):
        fd.shutdown()
    gc.collect()
    alive, misuse = rank.machine.leave()
    return [verdicts[0], kinds[0]], ranks, [alive, misuse]


@pytest.mark.parametrize(("call", "nth", "tried"), [*BEFORE, *AFTER])
def test_a_call_of_the_driver_that_fails(start: Start, call: str, nth: int, tried: str) -> None:
    failed_on_rank_1(how_it_went_wrong(start(2), goes_wrong, call, nth, UNAVAILABLE), tried)


def test_no_memory_is_left(start: Start) -> None:
    both = how_it_went_wrong(start(2), goes_wrong, "cuMemHostRegister", 1, MEMORY)
    for (verdict, kind), ranks, left in both:
        assert verdict.startswith("rank 1: cannot register 65536 bytes of a segment")
        assert kind == "ResourceError"
        assert set(ranks) == {1}
        assert left == ["", ""]


def cannot_register() -> tuple[str, str]:
    rank = Rank()
    x, _ = rank.pair(10, "float32")
    with pytest.raises(fd.DeviceError) as caught:
        fd.all_reduce(x, out=x)
    return caught.value.verdict, caught.value.advice


def test_a_device_that_cannot_use_the_hosts_memory(start: Start) -> None:
    one, other = start(2, FAKE_CUDA_HOST_REGISTER="0").run(cannot_register)
    assert one == other
    assert "cannot use memory that others have allocated" in one[0]


def loses_its_device() -> tuple[str, str, Any]:
    """While the copy to the host is under way: nothing will ever come of it."""
    rank = Rank("interface")
    x, _ = rank.pair(100_000, "float32")
    fd.all_reduce(x, out=x)
    fd.barrier()
    if fd.rank() == 1:
        rank.machine.control.hold(True)
    handle = fd.all_reduce(x, out=x, async_op=True)
    if fd.rank() == 1:
        rank.machine.control.lose(700)
    with pytest.raises(fd.DeviceError) as caught:
        handle.wait()
    del handle
    with contextlib.suppress(fd.Error):
        fd.shutdown()
    rank.machine.control.hold(False)
    rank.machine.control.forget()
    return caught.value.verdict, caught.value.evidence, caught.value.rank


def test_a_device_that_is_lost(start: Start) -> None:
    one, other = start(2).run(loses_its_device)
    assert one == other
    assert one[0].startswith("rank 1: ")
    assert "illegal address" in one[0] + one[1] or "700" in one[1]
    assert one[2] == 1


def is_late(timeout: float) -> tuple[str, str, list[str]]:
    rank = Rank()
    x, _ = rank.pair(5000, "float32")
    fd.all_reduce(x, out=x)
    rank.machine.control.hold(fd.rank() == 1)
    try:
        fd.all_reduce(x, out=x, timeout=timeout, name="gradient")
    except fd.Stalled as error:
        found = error.verdict
    rank.machine.control.hold(False)
    with contextlib.suppress(fd.Error):
        fd.shutdown()
    gc.collect()
    return found, "Stalled", list(rank.machine.leave())


def test_a_device_that_does_not_come_by(start: Start) -> None:
    one, other = start(2).run(is_late, 0.5)
    assert one == other
    assert "'gradient' was not complete after" in one[0]
    assert "rank 1" in one[0]
    assert one[2] == ["", ""]


def one_is_killed() -> tuple[str, int, list[str]]:
    rank = Rank()
    x, _ = rank.pair(300_000, "float32")
    y = rank.array(300_000, "float32")
    fd.all_reduce(x, out=x)
    fd.barrier()
    if fd.rank() == 1:
        fd.all_reduce(x, out=y)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            fd.all_reduce(x, out=y)
    except fd.PeerLost as error:
        verdict, lost = error.verdict, error.rank
    with contextlib.suppress(fd.Error):
        fd.shutdown()
    gc.collect()
    return verdict, lost, list(rank.machine.leave())


def test_a_rank_that_is_killed(start: Start) -> None:
    world = start(3)
    world.start(one_is_killed)
    assert_rank_1_was_killed(world)


def one_is_killed_while_input_is_late() -> tuple[str, list[str]]:
    """The survivor gets the verdict although it still waits for its own input."""
    rank = Rank()
    x, _ = rank.pair(1000, "float32")
    fd.all_reduce(x, out=x)
    rank.machine.control.hold(True)
    handle = fd.all_reduce(x, out=x, async_op=True)
    harness.tell("under way")
    with pytest.raises(fd.PeerLost) as caught:
        handle.wait()
    rank.machine.control.hold(False)
    del handle
    with contextlib.suppress(fd.Error):
        fd.shutdown()
    gc.collect()
    return caught.value.verdict, list(rank.machine.leave())


def test_a_rank_that_is_killed_while_another_waits_for_its_device(start: Start) -> None:
    world = start(2)
    world.start(one_is_killed_while_input_is_late)
    world.hear_all()
    world.signal(1, signal.SIGKILL)
    verdict, left = world.outcome(0).value
    assert "rank 1" in verdict
    assert "was killed by SIGKILL" in verdict
    assert left == ["", ""]


def forks() -> int:
    rank = Rank()
    x, _ = rank.pair(10, "float32")
    handle = fd.all_reduce(x, out=x, async_op=True)
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            for call in (handle.wait, lambda: fd.all_reduce(x, out=x)):
                with pytest.raises(fd.ForkedEngine):
                    call()
            del handle
            assert rank.machine.misuse() == ""
            os._exit(7)
        os._exit(1)
    handle.wait()
    del handle
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    rank.end()
    return code


def test_a_forked_child(start: Start) -> None:
    assert start(2).run(forks) == [7, 7]


BAD = {
    "not contiguous": "is not contiguous",
    "of a strange type": "unsupported element type",
    "read-only": "is read-only",
    "too short": "output has 3 elements",
    "in two dtypes": "output is float64",
    "masked": "has a mask",
    "at nobody's address": "input is not on a CUDA device: .* knows no memory at 0x40\n",
    "freed": "input is not on a CUDA device: the CUDA driver knows no memory at 0x",
    "freed, by DLPack": "output is not on a CUDA device: the CUDA driver knows no memory at 0x",
    "in managed memory": r"input is in managed memory of CUDA \(DLPack's kind 13\), which is not",
    "of ROCm": r"output is on a ROCm device \(DLPack's kind 10\), which is not supported",
    "elsewhere": "input is on device 1 as its owner says .*, and lies on device 0\n",
}


def bad_input() -> None:
    """Refused on this rank, before anything is copied; the next call works."""
    rank = Rank("interface")
    x, _ = rank.pair((4, 2), "float32")
    described = dict(x.__cuda_array_interface__)  # type: ignore[attr-defined]

    def but(**changes: Any) -> Any:
        return type("Changed", (), {"__cuda_array_interface__": described | changes})()

    def as_said(*device: int) -> Any:
        said = {  # in no stream: it would be of another device
            "__dlpack_device__": lambda _: device,
            "__dlpack__": lambda self, **_: WithDlpack.__dlpack__(self, stream=-1),
        }
        return type("Said", (WithDlpack,), said)(rank.machine, (8,), "float32")

    gone = WithDlpack(rank.machine, (8,), "float32")
    freed = gone.address
    gone.free()
    rank.machine.arrays.remove(gone)
    calls = {
        "not contiguous": lambda: fd.all_reduce(but(strides=(4, 16)), out=x),
        "of a strange type": lambda: fd.all_reduce(but(typestr="<c8"), out=x),
        "read-only": lambda: fd.all_reduce(x, out=but(data=(x.address, True))),
        "too short": lambda: fd.all_reduce(x, out=rank.array(3, "float32")),
        "in two dtypes": lambda: fd.all_reduce(x, out=rank.array(8, "float64")),
        "masked": lambda: fd.all_reduce(but(mask=1), out=x),
        "at nobody's address": lambda: fd.all_reduce(but(data=(0x40, False)), out=x),
        "freed": lambda: fd.all_reduce(but(data=(freed, False)), out=x),
        "freed, by DLPack": lambda: fd.grouped_all_reduce([x, x], out=[x, gone]),
        "in managed memory": lambda: fd.all_reduce(as_said(13, 0), out=x),
        "of ROCm": lambda: fd.all_reduce(x, out=as_said(10, 0)),
        "elsewhere": lambda: fd.all_reduce(as_said(2, 1), out=x),
    }
    assert calls.keys() == BAD.keys()
    rank.machine.control.clear_log()
    for name, call in calls.items():
        with pytest.raises(fd.InvalidArgument, match=BAD[name]):
            call()
    immutable = WithVersion(rank.machine, (8,), "float32")
    immutable.read_only = True
    with pytest.raises(fd.InvalidArgument, match="output is read-only"):
        fd.all_reduce(x, out=immutable)
    with pytest.raises(fd.InvalidArgument, match="does not say how to make another one"):
        fd.all_reduce(but())
    with pytest.raises(fd.InvalidArgument, match="needs out= on every rank"):
        fd.scatter(x)
    assert rank.machine.control.calls(b"cuMemcpyAsync") == 0
    fd.all_reduce(x, out=x)
    rank.end()


def test_bad_input(start: Start) -> None:
    start(1, FAKE_CUDA_DEVICES="2").run(bad_input)
