"""Long arrays of devices that go by way of the host, in pieces that overlap: the bits are those of
the host's arrays, however they are cut and whatever lies where; and memory for it is bounded. Ranks
over the fake driver."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_device import OnHost, Rank, all_come
from test_device_collectives import extra_calls
from test_device_names import in_any_order, stands_in

import farandole as fd
import harness
from harness import World

Start = Callable[..., World]

PIECE = 4096  # bytes: the least
WIDTHS = {"float32": 4, "bfloat16": 2, "int64": 8, "bool": 1}


def counts_around(dtype: str) -> list[int]:
    one = PIECE // WIDTHS[dtype]
    return [one - 1, one, one + 1, 2 * one, 3 * one + one // 2, 11 * one + 3]


def on_host(kind: str, x: OnHost, dtype: str, **options: Any) -> bytes:
    """The expected result, made on the host."""
    out = OnHost(bytes(len(x.get())), dtype)
    gets = kind != "reduce" or fd.rank() == options["root"]
    fd.world().run(kind, x.array, out.array if gets else None, **options)
    return out.get() if gets else b""


def folds(dtype: str, kind: str) -> list[int]:
    """How many copies each size took, each way."""
    rank = Rank(kind)
    copies = []
    op = "max" if dtype == "bool" else "mean" if dtype == "float32" else "sum"
    for count in counts_around(dtype):
        x, hx = rank.pair(count, dtype)
        y = rank.array(count, dtype)
        wanted = on_host("all_reduce", hx, dtype, op=op)
        rank.machine.call("cuStreamSynchronize", x.stream)
        rank.machine.control.clear_log()
        assert fd.all_reduce(x, op, out=y) is y
        copies.append(rank.machine.calls("cuMemcpyAsync"))
        assert y.get() == wanted
        assert x.get() == hx.get(), "the input is as it was"
        assert fd.all_reduce(x, op, out=x) is x
        assert x.get() == wanted
    rank.end()
    return copies


@pytest.mark.parametrize(
    ("size", "dtype", "kind"),
    [
        (1, "float32", "both"),
        (2, "bool", "dlpack"),
        (3, "bfloat16", "version 1"),
        (4, "int64", "functions"),
    ],
)
def test_bits_are_those_of_the_host(in_pieces: Start, size: int, dtype: str, kind: str) -> None:
    for copies in in_pieces(size, FAKE_CUDA_JITTER="3").run(folds, dtype, kind):
        assert copies == [2, 2, 4, 4, 8, 24], "of each piece one to the host and one from it"


def test_where_ranks_share_no_memory(in_pieces: Start) -> None:
    in_pieces(2, FARANDOLE_TRANSPORT="tcp").run(folds, "float32", "interface")


def test_between_hosts(in_pieces: Start) -> None:
    apart = {"FARANDOLE_SPLIT_HOSTS": "2,1", "FARANDOLE_INSECURE": "1"}
    in_pieces(3, **apart).run(folds, "float32", "interface")


def of_a_root() -> None:
    """Not every rank brings an array, nor has one brought back."""
    rank = Rank()
    count = 4 * PIECE // 2 + 5
    for root in {0, fd.size() - 1}:
        x, hx = rank.pair(count, "float16")
        y = rank.array(count, "float16")
        wanted = on_host("broadcast", hx, "float16", root=root)
        assert fd.broadcast(x, root, out=y).get() == wanted
        summed = on_host("reduce", hx, "float16", root=root)
        out = fd.reduce(x, "sum", root)
        assert (out.get() if out is not None else b"") == summed
        assert fd.broadcast(x, root, out=x).get() == wanted
    rank.end()


@pytest.mark.parametrize("size", [1, 3])
def test_a_broadcast_and_a_reduce(in_pieces: Start, size: int) -> None:
    in_pieces(size, FAKE_CUDA_JITTER="7").run(of_a_root)


def of_shares() -> list[int]:
    """Each rank's share is cut, and pieces do not lie together. How many copies the first call
    took."""
    rank = Rank()
    p, r = fd.size(), fd.rank()
    copies = []
    for count in (PIECE // 2 // p, PIECE // 2 // p + 1, 4 * PIECE + 5):
        x, hx = rank.pair(count, "float16")
        wanted = rank.host(p * count, "float16")
        fd.world().run("all_gather", hx.array, wanted.array)
        y = rank.array(p * count, "float16")
        rank.machine.call("cuStreamSynchronize", x.stream)
        rank.machine.control.clear_log()
        assert fd.all_gather(x, out=y) is y
        copies.append(rank.machine.calls("cuMemcpyAsync"))
        assert y.get() == wanted.get()
        wanted = rank.host(count // p + (r < count % p), "float16")
        fd.world().run("reduce_scatter", hx.array, wanted.array)
        assert fd.reduce_scatter(x).get() == wanted.get()
    shares = [0 if i == 1 else 700 * (3 * i + 1) for i in range(p)]  # one has nothing
    x, hx = rank.pair((shares[r], 2), "float32")
    wanted = rank.host(2 * sum(shares), "float32")
    counts = [2 * n for n in shares]
    fd.world().run("all_gather", hx.array, wanted.array, counts=counts)
    assert fd.all_gather(x, uneven=True).get() == wanted.get()
    rows, hrows = rank.pair(2 * sum(shares), "float32")
    part = rank.host(counts[r], "float32")
    fd.world().run("reduce_scatter", hrows.array, part.array, counts=counts)
    y = rank.array(counts[r], "float32")
    fd.world().run("reduce_scatter", rows, y, counts=counts)
    assert y.get() == part.get()
    rank.end()
    return copies


@pytest.mark.parametrize("size", [1, 2, 4])
def test_shares_of_each_rank(in_pieces: Start, size: int) -> None:
    """With four ranks more is copied back than comes in, so copies back lag behind."""
    for copies in in_pieces(size, FAKE_CUDA_JITTER="9").run(of_shares):
        per_piece = 1 + size
        assert copies[:2] == [2, 2 * per_piece], "of each piece its own share, and all of them"
        assert copies[2] >= 8 * size * per_piece


def test_shares_between_hosts(in_pieces: Start) -> None:
    in_pieces(3, FARANDOLE_SPLIT_HOSTS="2,1", FARANDOLE_INSECURE="1").run(of_shares)


def mixed_shares() -> None:
    """Where one lies on the host nobody cuts them."""
    rank = Rank()
    count, p = 3 * PIECE, fd.size()
    for here in (0, 1, None):
        x, hx = rank.pair(count, "float32")
        wanted = rank.host(p * count, "float32")
        fd.world().run("all_gather", hx.array, wanted.array)
        to_host = np.empty(p * count, np.float32)
        y: Any = to_host if fd.rank() == here else rank.array(p * count, "float32")
        fd.all_gather(x, out=y)
        assert (y.tobytes() if y is to_host else y.get()) == wanted.get()
        y = to_host if fd.rank() == here else rank.array(p * count, "float32")
        fd.all_gather(hx.array if fd.rank() == here else x, out=y)
        assert (y.tobytes() if y is to_host else y.get()) == wanted.get()
    rank.end()


def test_shares_of_which_some_lie_on_the_host(in_pieces: Start, by_steps: Start) -> None:
    in_pieces(2, FAKE_CUDA_JITTER="4").run(mixed_shares)
    by_steps(2, FARANDOLE_STAGED_PIECE_BYTES=str(PIECE)).run(mixed_shares)


def mixed() -> None:
    """A rank with its array on the host cuts it as the others do, if one has it on a device."""
    rank = Rank()
    count = 5 * PIECE // 8 + 1
    for repeated in range(2):
        x, hx = rank.pair(count, "float64")
        wanted = on_host("all_reduce", hx, "float64")
        y = rank.array(count, "float64")
        to_host = np.empty(count)
        if fd.rank() == 1:
            fd.all_reduce(hx.array, out=to_host)
            assert to_host.tobytes() == wanted
        else:
            assert fd.all_reduce(x, out=y).get() == wanted
        fd.all_reduce(x, out=to_host)
        assert to_host.tobytes() == wanted
        if fd.rank() == repeated:
            assert fd.all_reduce(hx.array, out=y).get() == wanted
        else:
            fd.all_reduce(hx.array, out=to_host)
            assert to_host.tobytes() == wanted
    rank.end()


def test_some_arrays_on_the_host_some_on_devices(in_pieces: Start) -> None:
    in_pieces(3, FAKE_CUDA_JITTER="5").run(mixed)


def test_the_same_between_hosts(in_pieces: Start) -> None:
    in_pieces(3, FARANDOLE_SPLIT_HOSTS="1,2", FARANDOLE_INSECURE="1").run(mixed)


def test_where_steps_are_tried_first(by_steps: Start) -> None:
    """Some of the ranks cannot go by them: then none does."""
    by_steps(3, FARANDOLE_STAGED_PIECE_BYTES=str(PIECE)).run(mixed)


def two_devices() -> None:
    """Each way has a queue of its own, and so has each block."""
    rank = Rank()
    count = 6 * PIECE // 4 + 2
    for _ in range(3):
        x, hx = rank.pair(count, "int32")
        far = rank.array(count, "int32", device=1)
        wanted = on_host("all_reduce", hx, "int32")
        assert fd.all_reduce(x, out=far).get() == wanted
    rank.end()


def test_two_devices(in_pieces: Start) -> None:
    in_pieces(2, FAKE_CUDA_DEVICES="2", FAKE_CUDA_JITTER="2").run(two_devices)


def in_flight() -> None:
    """Long ones and short ones, and a grouped call."""
    rank = Rank()
    pairs = [rank.pair(1 + 1237 * i, "float32") for i in range(12)]
    expected = [rank.host(x.count, "float32") for x, _ in pairs]
    for (_, hx), result in zip(pairs, expected, strict=True):
        fd.all_reduce(hx.array, out=result.array)
    rank.machine.control.hold(True)
    handles = [fd.all_reduce(x, out=x, async_op=True) for x, _ in pairs]
    assert not any(handle.done() for handle in handles)
    with pytest.raises(TimeoutError):
        handles[-1].wait(timeout=0.01)
    rank.machine.control.hold(False)
    all_come(handles, [x for x, _ in pairs], expected)
    xs = [x for x, _ in pairs]
    wanted = [on_host("all_reduce", OnHost(x.get(), "float32"), "float32") for x in xs]
    assert [x.get() for x in fd.grouped_all_reduce(xs, out=xs)] == wanted
    rank.end()


def test_many_in_flight(in_pieces: Start) -> None:
    in_pieces(2, FAKE_CUDA_JITTER="11").run(in_flight)


def test_by_name(in_pieces: Start) -> None:
    """Some of one rank's arrays lie on the host."""
    assert in_pieces(3, FAKE_CUDA_JITTER="3").run(in_any_order, "both") == [0, 0, 0]


def test_a_rank_that_has_joined(in_pieces: Start) -> None:
    in_pieces(2).run(stands_in)


# ---- memory ----

ARENA = 6 << 20
LONG = (12 << 20) // 4 + 1  # elements: twice that


def longer_than_the_arena() -> int:
    """How much memory of the host was registered."""
    rank = Rank("interface")
    x, hx = rank.pair(LONG, "float32")
    y = rank.array(LONG, "float32")
    wanted = on_host("all_reduce", hx, "float32")
    assert fd.all_reduce(x, out=y).get() == wanted
    assert fd.all_reduce(x, out=x).get() == wanted
    registered = rank.machine.calls("cuMemHostRegister")
    rank.end()
    return registered


def test_an_array_that_is_longer_than_the_arena(start: Start) -> None:
    env = {"FARANDOLE_STAGED_PIECE_BYTES": "128K", "FARANDOLE_ARENA_BYTES": str(ARENA)}
    assert start(2, **env).run(longer_than_the_arena) == [3, 3], "one block for each piece at once"


def grows() -> None:
    """The blocks of shorter arrays lie idle, and leave too little room beside them."""
    rank = Rank()
    for megabytes in (6, 8):
        x, _ = rank.pair(megabytes << 20, "uint8")
        y = rank.array(megabytes << 20, "uint8")
        fd.all_to_all(x, out=y)
        y.get()
    rank.end()


def test_arrays_that_grow_find_the_room_of_those_before(start: Start) -> None:
    start(2, FARANDOLE_ARENA_BYTES=str(4 * ARENA)).run(grows)


def is_too_long() -> str:
    rank = Rank()
    x, _ = rank.pair(LONG, "float32")
    with pytest.raises(fd.ResourceError) as caught:
        fd.all_reduce(x, out=x)
    return caught.value.advice


def test_the_same_in_one_piece(start: Start) -> None:
    env = {"FARANDOLE_STAGED_PIECE_BYTES": "1G", "FARANDOLE_ARENA_BYTES": str(ARENA)}
    for advice in start(2, **env).run(is_too_long):
        assert "FARANDOLE_ARENA_BYTES" in advice


def steady() -> list[str]:
    rank = Rank("interface")
    arrays = [(rank.array(n, "float32"), rank.array(n, "float32")) for n in (3000, 10_000)]

    def step(held: bool = False) -> None:
        rank.machine.control.hold(held)
        handles = [fd.all_reduce(x, out=y, async_op=True) for x, y in arrays]
        handles += [fd.all_reduce(x, out=x, async_op=True) for x, _ in arrays]
        rank.machine.control.hold(False)
        for handle in handles:
            handle.wait()
        rank.machine.call("cuStreamSynchronize", rank.machine.streams[0])

    step(held=True)
    step()
    extra = extra_calls(rank, step, 20)
    rank.end()
    return extra


def test_a_steady_step_neither_allocates_nor_waits_for_the_device(in_pieces: Start) -> None:
    for extra in in_pieces(2).run(steady):
        assert extra == ["cuStreamSynchronize"] * 20, "the test's own, once a step"


# ---- at once ----


def copied_ahead() -> tuple[int, int, int]:
    """Copies that were asked for before any piece was reduced, once one was, and in all."""
    rank = Rank("both")
    count = 8 * PIECE // 4
    x, _ = rank.pair(count, "float32")
    rank.machine.call("cuStreamSynchronize", x.stream)
    rank.machine.control.clear_log()

    def copies() -> int:
        return rank.machine.calls("cuMemcpyAsync")

    fd.barrier()
    if fd.rank() == 1:
        harness.listen()
    handle = fd.all_reduce(x, out=x, async_op=True)
    for _ in range(50):
        fd.world().turn()
    before = copies()
    if fd.rank() == 0:  # what is brought from now on does not arrive, and nothing leaves
        rank.machine.call("cuStreamSynchronize", rank.machine.arrivals)
        rank.machine.control.hold(True)
        harness.tell("two have come")
        harness.wait_until(lambda: copies() == before + 4, "two are reduced")
        between = copies()
        assert not handle.done()
        rank.machine.control.hold(False)
    else:
        between = 0
    handle.wait()
    total = copies()
    del handle
    rank.end()
    return before, between, total


def test_pieces_are_copied_while_others_are_reduced(in_pieces: Start) -> None:
    world = in_pieces(2)
    world.start(copied_ahead)
    world.hear(0)
    world.say(1, "go")
    first, _ = (o.value for o in world.outcomes())
    assert first == (2, 6, 16)


def traced() -> None:
    rank = Rank()
    x, _ = rank.pair(3 * PIECE, "float32")
    for _ in range(4):
        fd.all_reduce(x, out=x, name="gradient")
    rank.end()


def test_a_trace_shows_one_operation(in_pieces: Start, tmp_path: Path) -> None:
    directory = tmp_path / "trace"
    in_pieces(2, FARANDOLE_TRACE=str(directory)).run(traced)
    for rank in range(2):
        lines = (directory / f"rank-{rank}.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        operations = [e["args"] for e in events if e.get("cat") == "operation"]
        assert [each["bytes"] for each in operations] == 4 * [12 * PIECE]
        assert [each["sequence"] for each in operations] == [13, 26, 39, 52], "and 12 pieces each"
        running = [e["args"]["sequence"] for e in events if e.get("name") == "running"]
        assert len(set(running)) > 24, "but for the shortest, each is shown"
