"""Operations by name on arrays of devices, by ranks over the fake driver: what comes of them is
what comes of the host's arrays, in the order of their owners' streams."""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
from fake_device import KINDS, Rank, WithFunctions, contents
from fault_work import how_it_went_wrong, is_rank_1s, let_fail
from test_device_collectives import extra_calls

import farandole as fd
from farandole import _core
from harness import World

Start = Callable[..., World]


def submit(kind: str, name: str, x: Any, out: Any, shape: tuple[int, ...], **how: Any) -> int:
    names = _core.names_of(fd.world())
    return names.submit(kind, name, [(x, out, shape)], result=out, **how)


def wait(handle: int) -> Any:
    return _core.wait_by_number(handle)


def in_any_order(kind: str) -> int:
    """Small ones travel together, and some of one rank's lie on the host. How many kernels were
    launched."""
    rank = Rank(kind)
    sizes = [1, 3, 1000, 0, 50_003, 7, 200_001]
    dtypes = ["float32", "float32", "int64"]
    wanted, calls = [], []
    for i, (count, dtype) in enumerate((n, d) for n in sizes for d in dtypes):
        x, on_host = rank.pair(count, dtype)
        expected = rank.host(count, dtype)
        fd.all_reduce(on_host.array, out=expected.array)
        given: Any = on_host if fd.rank() == 1 and i % 3 == 0 else x
        out: Any = given
        if i % 2:
            out = rank.host(count, dtype) if given is on_host else rank.array(count, dtype)
        calls.append((f"tensor {i}", given, out, count))
        wanted.append((out, expected.get()))
    random.Random(fd.rank()).shuffle(calls)
    handles = []
    for name, given, out, count in calls:
        arrays = [getattr(each, "array", each) for each in (given, out)]
        if given is out:
            arrays[1] = arrays[0]
        handles.append((submit("all_reduce", name, *arrays, (count,)), arrays[1]))
    for handle, result in handles:
        assert wait(handle) is result
    for out, expected_bits in wanted:
        assert out.get() == expected_bits
    launched = rank.machine.launched()
    rank.end()
    return launched


@pytest.mark.parametrize("kind", KINDS)
def test_in_any_order(start: Start, kind: str) -> None:
    assert start(3, FAKE_CUDA_JITTER="3").run(in_any_order, kind) == [0, 0, 0]


@pytest.mark.parametrize("kind", ["dlpack", "functions"])
def test_large_ones_where_they_lie(by_steps: Start, kind: str) -> None:
    assert min(by_steps(3, FAKE_CUDA_JITTER="8").run(in_any_order, kind)) > 0


def broadcasts() -> int:
    """And a grouped call, of which the large ones go where they lie."""
    rank = Rank()
    x, hx = rank.pair(60_000, "float64")
    y = rank.array(60_000, "float64")
    expected = rank.host(60_000, "float64")
    fd.broadcast(hx.array, 1, out=expected.array)
    assert wait(submit("broadcast", "b", x, y, x.shape, root=1)).get() == expected.get()
    pairs = [rank.pair(n, "float32") for n in (5, 50_000, 7, 40_000)]
    for _, on_host in pairs:
        fd.all_reduce(on_host.array, out=on_host.array)
    names = _core.names_of(fd.world())
    handle = names.submit("all_reduce", "many", [(each, each, each.shape) for each, _ in pairs])
    wait(handle)
    for each, on_host in pairs:
        assert each.get() == on_host.get()
    del names
    launched = rank.machine.launched()
    rank.end()
    return launched


def test_a_broadcast_and_a_group_where_they_lie(by_steps: Start) -> None:
    assert min(by_steps(2, FAKE_CUDA_JITTER="2").run(broadcasts)) > 0


def stands_in() -> None:
    """A rank that has joined has no array on any device."""
    rank = Rank()
    names = _core.names_of(fd.world())
    x = rank.array(60_000, "int64")
    raw = contents("int64", x.count, 5)
    x.put(raw)
    for _ in range(2 if fd.rank() == 0 else 0):
        wait(submit("all_reduce", "x", x, x, x.shape))
        assert x.get() == raw
    assert wait(names.join()) == 0
    del names
    rank.end()


@pytest.mark.parametrize("path", ["staged", "step"])
def test_a_rank_that_has_joined(by_steps: Start, path: str) -> None:
    by_steps(2, FARANDOLE_DEVICE_PATH=path).run(stands_in)


def every_collective(rounds: int) -> None:
    rank = Rank()
    p, r, dtype = fd.size(), fd.rank(), "float16"
    names = _core.names_of(fd.world())  # which keeps the world

    def brought(made: list[Any], _: Any) -> list[bytes]:
        results = []
        for memory, its_dtype, shape in made:
            assert its_dtype == dtype
            result = rank.array(shape, dtype)
            memory.deliver(result)
            results.append(result.get())
        return results

    for n in (0, 5, 30_000):
        x, hx = rank.pair((n, 2), dtype)
        root = p - 1
        expected = rank.host(2 * n, dtype)
        fd.world().run("broadcast", hx.array, expected.array, root=root)
        y = rank.array((n, 2), dtype)
        assert wait(submit("broadcast", "b", x, y, (n, 2), root=root)).get() == expected.get()
        rows, hrows = rank.pair((n, 2), dtype)
        mine = n // p + (r < n % p)
        expected = rank.host(2 * mine, dtype)
        counts = [2 * (n // p + (i < n % p)) for i in range(p)]
        fd.world().run("reduce_scatter", hrows.array, expected.array, counts=counts)
        y = rank.array((mine, 2), dtype)
        assert wait(submit("reduce_scatter", "s", rows, y, (n, 2))).get() == expected.get()

        uneven, huneven = rank.pair((n + r, 2), dtype)
        gathered = rank.host(sum(2 * (n + i) for i in range(p)), dtype)
        counts = [2 * (n + i) for i in range(p)]
        fd.world().run("all_gather", huneven.array, gathered.array, counts=counts)
        for _ in range(rounds):
            handle = names.submit(
                "all_gather", "g", [(uneven, None, (n + r, 2)), (x, None, (n, 2))], finish=brought
            )
            first, second = wait(handle)
            assert first == gathered.get()
            assert len(second) == p * x.nbytes
        splits = [i % 2 + n for i in range(p)]
        sent, _ = rank.pair((sum(splits), 3), dtype)
        handle = names.submit(
            "all_to_all", "t", [(sent, None, sent.shape)], splits=splits, finish=brought
        )
        theirs = [contents(dtype, sent.count, 1000 * i + rank.seed) for i in range(p)]
        begin, length = 6 * sum(splits[:r]), 6 * splits[r]
        assert wait(handle) == [b"".join(each[begin : begin + length] for each in theirs)]
    del names
    rank.end()


@pytest.mark.parametrize("size", [1, 3])
def test_every_collective(start: Start, size: int) -> None:
    start(size, FAKE_CUDA_JITTER="7").run(every_collective, 2)


def begins_when_its_arrays_have_come() -> None:
    """The rank whose device is late; the others' have come, and a name of theirs goes ahead."""
    rank = Rank("functions")
    pairs = [rank.pair(n, "float32") for n in (40, 90_000, 50)]
    expected = []
    for _, on_host in pairs:
        expected.append(rank.host(len(on_host.get()) // 4, "float32"))
        fd.all_reduce(on_host.array, out=expected[-1].array)
    if fd.rank() == 1:
        rank.machine.control.hold(True)
    handles = [submit("all_reduce", f"{i}", x, x, x.shape) for i, (x, _) in enumerate(pairs)]
    for _ in range(200 if fd.rank() == 1 else 0):  # the other rank's go on when this one's do
        assert not any(_core.done_by_number(handle) for handle in handles)
    rank.machine.control.hold(False)
    for handle, (x, _), result in zip(handles, pairs, expected, strict=True):
        wait(handle)
        x.look()
        assert x.read() == result.get()
    rank.end()


def test_a_name_begins_when_its_arrays_have_come(start: Start) -> None:
    start(2).run(begins_when_its_arrays_have_come)


def waits_for_no_device() -> None:
    """Later work in the stream comes after the result; the host goes on."""
    rank = Rank("functions")
    x, on_host = rank.pair(100_000, "float32")
    fd.all_reduce(on_host.array, out=on_host.array)
    handle = submit("all_reduce", "x", x, x, x.shape)
    while not _core.done_by_number(handle):
        pass
    rank.machine.call("cuStreamSynchronize", rank.machine.arrivals)
    rank.machine.control.hold(True)
    y = rank.array(5, "float32")
    WithFunctions.current = x.stream
    wait(handle)
    x.look()
    rank.machine.control.hold(False)
    assert x.read() == on_host.get()
    del y
    rank.end()


def test_wait_does_not_wait_for_the_device(start: Start) -> None:
    start(2).run(waits_for_no_device)


def steady() -> list[str]:
    rank = Rank("interface")
    arrays = [rank.array(n, "float32") for n in (3, 1000, 70_001)]

    def step() -> None:
        handles = [submit("all_reduce", f"{i}", x, x, x.shape) for i, x in enumerate(arrays)]
        for handle in handles:
            wait(handle)
        rank.machine.call("cuStreamSynchronize", rank.machine.streams[0])

    step()
    rank.machine.control.hold(True)  # more in flight at once than ever afterwards
    handles = [submit("all_reduce", f"{i}", x, x, x.shape) for i, x in enumerate(20 * arrays)]
    rank.machine.control.hold(False)
    for handle in handles:
        wait(handle)
    step()
    extra = extra_calls(rank, step, 20)
    rank.end()
    return extra


@pytest.mark.parametrize("path", ["staged", "step"])
def test_a_steady_step_neither_allocates_nor_waits_for_the_device(
    by_steps: Start, path: str
) -> None:
    for extra in by_steps(2, FARANDOLE_DEVICE_PATH=path).run(steady):
        assert extra == ["cuStreamSynchronize"] * 20, "the test's own, once a step"


# ---- what goes wrong ----


def goes_wrong(call: str, nth: int) -> tuple[str, int | None, list[str]]:
    rank = Rank("interface")
    x, _ = rank.pair(1001, "float32")
    wait(submit("all_reduce", "x", x, x, x.shape))
    let_fail(rank, call, nth)

    def steps() -> None:
        for _ in range(3):  # what the rank copies back is its own; the next one is everybody's
            wait(submit("all_reduce", "x", x, x, x.shape))

    with pytest.raises(fd.DeviceError) as caught:
        steps()
    with contextlib.suppress(fd.Error):
        fd.shutdown()
    found = caught.value.verdict, caught.value.rank
    del caught
    gc.collect()
    return *found, list(rank.machine.leave())


@pytest.mark.parametrize(
    ("call", "nth"), [("cuMemcpyAsync", 1), ("cuMemcpyAsync", 2), ("cuStreamWriteValue32", 1)]
)
def test_a_call_of_the_driver_that_fails(start: Start, call: str, nth: int) -> None:
    is_rank_1s(*how_it_went_wrong(start(2), goes_wrong, call, nth))


def differing() -> None:
    """Refused on every rank; the arrays are as they were, and the next call works."""
    rank = Rank()
    x, before = rank.pair(4 + fd.rank(), "float32")
    with pytest.raises(fd.Mismatch, match="'x'"):
        wait(submit("all_reduce", "x", x, x, x.shape))
    assert x.get() == before.get()
    y, _ = rank.pair(9, "float32")
    wait(submit("all_reduce", "x", y, y, y.shape))
    with pytest.raises(fd.InvalidArgument, match="is not registered"):
        submit("all_reduce", "x", y, y, y.shape, set=7)
    rank.end()


def test_tensors_that_differ(start: Start) -> None:
    start(2).run(differing)
