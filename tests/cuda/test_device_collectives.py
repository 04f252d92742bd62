"""Collectives on arrays of devices, by ranks over the fake driver: the bits are the host's, for any
owner of the arrays; and nothing is left or done wrong in the driver's eyes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_device import KINDS, Array, OnHost, Rank, WithFunctions, all_come, contents

import farandole as fd
import harness
from farandole import _core
from harness import World

Start = Callable[..., World]

# May wait for all that runs on the device, kernels that wait for other ranks included.
LOADS = {"cuModuleLoadDataEx", "cuModuleGetFunction", "cuFuncLoad"}
NEVER_IN_A_STEADY_STEP = {
    *LOADS,
    "cuMemAlloc",
    "cuMemHostAlloc",
    "cuMemHostRegister",
    "cuMemHostUnregister",
    "cuStreamCreateWithPriority",
    "cuEventCreate",
    "cuStreamSynchronize",
    "cuEventSynchronize",
    "cuDevicePrimaryCtxRetain",
    "cuCtxGetStreamPriorityRange",
}


def calls_of(rank: Rank, step: Callable[[], None], times: int) -> list[str]:
    """The driver's calls of so many steps, which take no memory."""
    rank.machine.control.clear_log()
    before = rank.machine.alive()
    for _ in range(times):
        step()
    log = rank.machine.log()
    alive = rank.machine.alive()
    assert alive == before, f"{before}; then {alive}"
    return log


def extra_calls(rank: Rank, step: Callable[[], None], times: int) -> list[str]:
    """Those of so many steps that a steady one makes none of."""
    return [call for call in calls_of(rank, step, times) if call in NEVER_IN_A_STEADY_STEP]


# ---- the same bits ----


def folds(dtype: str, kind: str) -> None:
    rank = Rank(kind)
    for count in (0, 1, 1001, 200_003):
        x, on_host = rank.pair(count, dtype)
        y, expected = rank.array(count, dtype), rank.host(count, dtype)
        op = "max" if dtype == "bool" else "sum"
        fd.all_reduce(on_host.array, op, out=expected.array)
        assert fd.all_reduce(x, op, out=y) is y
        assert y.get() == expected.get()
        assert x.get() == on_host.get(), "the input is as it was"
        assert fd.all_reduce(x, op, out=x) is x
        assert x.get() == expected.get()
    rank.end()


@pytest.mark.parametrize("dtype", _core.dtypes)
def test_bits_are_those_of_the_host(start: Start, dtype: str) -> None:
    start(2, FAKE_CUDA_JITTER="3").run(folds, dtype, "both" if dtype != "bfloat16" else "dlpack")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 3])
def test_whoever_owns_the_arrays(start: Start, size: int, kind: str) -> None:
    start(size, FAKE_CUDA_JITTER="5").run(folds, "float32", kind)


def test_where_ranks_share_no_memory(start: Start) -> None:
    start(2, FARANDOLE_TRANSPORT="tcp").run(folds, "bfloat16", "dlpack")


def all_collectives(scale: int) -> None:
    rank = Rank()
    p, r, dtype = fd.size(), fd.rank(), "float16"
    n = 8 * scale + 3

    def same(result: Array, expected: OnHost) -> None:
        assert result.get() == expected.get()

    x, hx = rank.pair((n, 2), dtype)
    y = fd.all_reduce(x, "mean", prescale=0.5)
    assert y.shape == (n, 2)
    same(y, on_host("all_reduce", hx, rank.host(2 * n, dtype), op="mean", prescale=0.5))
    for root in {0, p - 1}:
        y = rank.array((n, 2), dtype)
        fd.broadcast(x, root, out=y)
        same(y, on_host("broadcast", hx, rank.host(2 * n, dtype), root=root))
        z, hz = rank.pair(n, dtype)
        fd.broadcast(z, root, out=z)
        same(z, on_host("broadcast", hz, rank.host(n, dtype), root=root))
        out = fd.reduce(x, "sum", root)
        expected = on_host("reduce", hx, rank.host(2 * n, dtype) if r == root else None, root=root)
        assert (out is None) == (r != root)
        if out is not None:
            same(out, expected)
        out = fd.gather(x, root)
        expected = on_host(
            "gather", hx, rank.host(2 * n * p, dtype) if r == root else None, root=root
        )
        if out is not None:
            same(out, expected)
        rows, hrows = rank.pair((p * n, 2), dtype)
        y = rank.array((n, 2), dtype)
        fd.scatter(rows if r == root else None, root, out=y)
        source = hrows if r == root else None
        same(y, on_host("scatter", source, rank.host(2 * n, dtype), root=root))
    same(fd.all_gather(x), on_host("all_gather", hx, rank.host(2 * n * p, dtype)))
    uneven, huneven = rank.pair((r + 1, 3), dtype)
    y = fd.all_gather(uneven, uneven=True)
    total = p * (p + 1) // 2
    assert y.shape == (total, 3)
    counts = [3 * (i + 1) for i in range(p)]
    same(y, on_host("all_gather", huneven, rank.host(3 * total, dtype), counts=counts))
    part = 2 * n // p + (r < 2 * n % p)
    same(fd.reduce_scatter(x), on_host("reduce_scatter", hx, rank.host(part, dtype)))
    rows, hrows = rank.pair((p * n, 2), dtype)
    same(fd.all_to_all(rows), on_host("all_to_all", hrows, rank.host(2 * n * p, dtype)))
    fd.barrier()
    rank.end()


def on_host(kind: str, x: OnHost | None, out: OnHost | None, **options: Any) -> Any:
    source, target = x.array if x else None, out.array if out else None
    fd.world().run(kind, source, target, **options)
    return out


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_collective(start: Start, size: int) -> None:
    start(size, FAKE_CUDA_JITTER="7").run(all_collectives, 100)


def mixed() -> None:
    """Where an array lies is its rank's affair."""
    rank = Rank()
    for count in (5, 100_001):
        x, on_host = rank.pair(count, "float64")
        expected = rank.host(count, "float64")
        fd.all_reduce(on_host.array, out=expected.array)
        if fd.rank() % 2:
            y: Any = rank.array(count, "float64")
            fd.all_reduce(x, out=y)
            assert y.get() == expected.get()
        else:
            result = rank.host(count, "float64")
            fd.all_reduce(on_host.array, out=result.array)
            assert result.get() == expected.get()
        there = np.empty(count)
        fd.all_reduce(x, out=there)
        assert there.tobytes() == expected.get()
        y = rank.array(count, "float64")
        fd.all_reduce(on_host.array, out=y)
        assert y.get() == expected.get()
    rank.end()


def test_some_arrays_on_the_host_some_on_devices(start: Start) -> None:
    start(3).run(mixed)


def two_devices() -> None:
    """From one to the other, and a third array on the host."""
    rank = Rank()
    x, on_host = rank.pair(3000, "int32")
    expected = rank.host(3000, "int32")
    fd.all_reduce(on_host.array, out=expected.array)
    far = rank.array(3000, "int32", device=1)
    assert fd.all_reduce(x, out=far).get() == expected.get()
    fd.all_reduce(far, out=far)
    rank.end()


def test_two_devices(start: Start) -> None:
    start(2, FAKE_CUDA_DEVICES="2", FAKE_CUDA_JITTER="2").run(two_devices)


GROUPED: dict[str, Callable[[int, int, int], int]] = {
    "all_reduce": lambda n, _p, _r: n,
    "broadcast": lambda n, _p, _r: n,
    "reduce_scatter": lambda n, p, r: n // p + (r < n % p),
    "all_gather": lambda n, p, _r: n * p,
}
MANY = [(3, "float32"), (200, "float64"), (0, "float32"), (50_003, "float32"), (7, "float32")]


def grouped(some_on_the_host: bool) -> None:
    """Small arrays travel together, large ones by themselves, whatever lies where."""
    rank = Rank()
    p, r = fd.size(), fd.rank()
    for kind, length in GROUPED.items():
        call = getattr(fd, f"grouped_{kind}")
        pairs = [rank.pair(*array) for array in MANY]
        expected = [rank.host(length(n, p, r), dtype) for n, dtype in MANY]
        call([on_host.array for _, on_host in pairs], out=[e.array for e in expected])
        wanted = [e.get() for e in expected]
        if some_on_the_host and r == 1:  # all of one rank's, and of the others every second
            again = [rank.host(length(n, p, r), dtype) for n, dtype in MANY]
            call([on_host.array for _, on_host in pairs], out=[a.array for a in again])
            assert [a.get() for a in again] == wanted
            continue
        xs: list[Any] = [x for x, _ in pairs]
        outs: Any = [rank.array(length(n, p, r), dtype) for n, dtype in MANY]
        if some_on_the_host:
            xs = [h.array if i % 2 else x for i, (x, h) in enumerate(pairs)]
        assert call(xs, out=outs) is not None
        assert [out.get() for out in outs] == wanted
        if not some_on_the_host:
            assert [result.get() for result in call(xs, async_op=True).wait()] == wanted
    rank.end()


@pytest.mark.parametrize("some_on_the_host", [False, True])
def test_many_arrays_in_one_call(start: Start, some_on_the_host: bool) -> None:
    start(3, FAKE_CUDA_JITTER="23").run(grouped, some_on_the_host)


def one_world_after_another() -> None:
    rank = Rank()
    for _ in range(3):
        fd.init()
        x, on_host = rank.pair(777, "int64")
        expected = rank.host(777, "int64")
        fd.all_reduce(on_host.array, out=expected.array)
        assert fd.all_reduce(x, out=x).get() == expected.get()
        fd.shutdown()
    rank.end()


def test_one_world_after_another(start: Start) -> None:
    start(2).run(one_world_after_another)


# ---- in flight ----


def in_flight(how_many: int) -> None:
    rank = Rank()
    pairs = [rank.pair(1 + 1237 * i, "float32") for i in range(how_many)]
    expected = [rank.host(x.count, "float32") for x, _ in pairs]
    for (_, on_host), result in zip(pairs, expected, strict=True):
        fd.all_reduce(on_host.array, out=result.array)
    rank.machine.control.hold(True)
    handles = [fd.all_reduce(x, out=x, async_op=True) for x, _ in pairs]
    assert not any(handle.done() for handle in handles)
    with pytest.raises(TimeoutError):
        handles[0].wait(timeout=0.01)
    rank.machine.control.hold(False)
    all_come(handles, [x for x, _ in pairs], expected)
    rank.end()


def test_many_in_flight(start: Start) -> None:
    start(2, FAKE_CUDA_JITTER="11").run(in_flight, 12)


def memory_in_between_is_used_again() -> None:
    """While results are still on their way back, and nobody has waited for them."""
    rank = Rank()
    pairs = [rank.pair(30_000, "float32") for _ in range(40)]
    handles, results = [], []
    for x, _ in pairs:
        results.append(rank.array(30_000, "float32"))
        handles.append(fd.all_reduce(x, out=results[-1], async_op=True))
        while not handles[-1].done():
            fd.world().turn()
    for handle, result, (_, on_host) in zip(handles, results, pairs, strict=True):
        handle.wait()
        fd.all_reduce(on_host.array, out=on_host.array)
        assert result.get() == on_host.get()
    del handle, handles
    rank.end()


def test_memory_in_between_is_used_again(start: Start) -> None:
    start(2, FAKE_CUDA_JITTER="19").run(memory_in_between_is_used_again)


def waits_elsewhere(rounds: int) -> None:
    """In another stream than that of the call: it is the one that is current then."""
    rank = Rank("functions")
    x, on_host = rank.pair(200_000, "float32")
    expected = rank.host(200_000, "float32")
    fd.all_reduce(on_host.array, out=expected.array)
    for _ in range(rounds):
        y = rank.array(200_000, "float32")
        y.stream = rank.machine.made("cuStreamCreateWithPriority", 1, 0)
        if fd.rank() == 1:
            harness.listen()
        handle = fd.all_reduce(x, out=y, async_op=True)
        if fd.rank() == 0:  # whose input has come, and whose result waits for the device
            rank.machine.call("cuStreamSynchronize", rank.machine.arrivals)
            rank.machine.control.hold(True)
            harness.tell("held")
        WithFunctions.current = y.stream
        assert handle.wait() is y, "which does not wait for the device"
        y.look()
        rank.machine.control.hold(False)
        assert y.read() == expected.get()
        rank.machine.call("cuStreamDestroy_v2", y.stream)
        WithFunctions.current = x.stream
    del handle
    rank.end()


def test_the_stream_that_is_current_in_wait(start: Start) -> None:
    world = start(2, FAKE_CUDA_JITTER="13")
    world.start(waits_elsewhere, 6)
    for _ in range(6):
        world.hear(0)
        world.say(1, "go")
    assert [o.error for o in world.outcomes()] == [None, None], world.report()


def messages() -> None:
    """Round in a circle, from host to device and on."""
    rank = Rank()
    p, r = fd.size(), fd.rank()
    for count in (0, 1, 50_001):
        x, _ = rank.pair(count, "int16")
        sent = contents("int16", count, 1000 * ((r - 1) % p) + rank.seed)
        y = rank.array(count, "int16")
        handle = fd.send(x, (r + 1) % p, tag=3, async_op=True)
        assert fd.recv(y, (r - 1) % p, tag=3) is y
        handle.wait()
        assert y.get() == sent
        there = rank.host(count, "int16")
        handle = fd.send(y, (r + 1) % p, async_op=True)
        fd.recv(there.array, (r - 1) % p)
        handle.wait()
        assert there.get() == contents("int16", count, 1000 * ((r - 2) % p) + rank.seed)
        later = fd.recv(x, (r - 1) % p, async_op=True)
        fd.send(there.array, (r + 1) % p)
        assert later.wait().get() == contents("int16", count, 1000 * ((r - 3) % p) + rank.seed)
    with pytest.raises(fd.InvalidArgument, match="which is this one"):
        fd.send(x, r)
    del handle, later  # which keep what they need
    rank.end()


def test_messages_between_two(start: Start) -> None:
    start(3, FAKE_CUDA_JITTER="17").run(messages)


def steady(kind: str) -> list[str]:
    rank = Rank(kind)
    arrays = [(rank.array(n, "float32"), rank.array(n, "float32")) for n in (3, 1000, 70_001)]

    def step(held: bool = False) -> None:
        rank.machine.control.hold(held)
        handles = [fd.all_reduce(x, out=y, async_op=True) for x, y in arrays]
        handles += [fd.all_gather(x, out=all_of_it, async_op=True) for x, all_of_it in gathered]
        rank.machine.control.hold(False)
        for handle in handles:
            handle.wait()
        for x, _ in arrays:
            fd.all_reduce(x, out=x)
        rank.machine.call("cuStreamSynchronize", rank.machine.streams[0])

    gathered = [(x, rank.array(fd.size() * x.count, "float32")) for x, _ in arrays]
    step(held=True)  # as much in flight at once as ever
    extra = extra_calls(rank, step, 20)
    rank.end()
    return extra


def test_a_steady_step_neither_allocates_nor_waits_for_the_device(start: Start) -> None:
    for extra in start(2).run(steady, "interface"):
        assert extra == ["cuStreamSynchronize"] * 20, "the test's own, once a step"
