"""Collectives in CUDA graphs, by ranks over the fake driver: what replays give is what the host
gives, no host takes part in them, and what goes wrong in them is one verdict for all ranks."""

from __future__ import annotations

import contextlib
import gc
import signal
from collections.abc import Callable
from typing import Any

import pytest
from fake_device import Array, OnHost, Rank, contents
from fault_work import barriers
from test_device_collectives import NEVER_IN_A_STEADY_STEP

import farandole as fd
import harness
from harness import World

Start = Callable[..., World]

# No host takes part.
NEVER_IN_A_REPLAY = NEVER_IN_A_STEADY_STEP | {
    "cuLaunchKernel", "cuMemcpyAsync", "cuStreamWaitValue32", "cuEventRecord", "cuStreamWaitEvent",
}  # fmt: skip


def refill(pairs: list[tuple[Array, OnHost]], step: int) -> None:
    """Other contents, the same on the device and on the host."""
    for i, (x, on_host) in enumerate(pairs):
        raw = contents(x.dtype, x.count, 7919 * step + 1000 * fd.rank() + i)
        x.put(raw)
        on_host.memory[:] = memoryview(raw)


def replays(dtype: str, count: int, kind: str) -> None:
    """A graph with all collectives, of which one takes what another has left; between its replays
    operations go as ever."""
    rank = Rank(kind)
    p, r = fd.size(), fd.rank()
    x, hx = rank.pair(count, dtype)
    rows, hrows = rank.pair((p * count,), dtype)
    total, again, mean = (rank.array(count, dtype) for _ in range(3))
    whole, turned = (rank.array(p * count, dtype) for _ in range(2))
    part = rank.array(count // p + (r < count % p), dtype)
    rooted = rank.array(count, dtype) if r == p - 1 else None
    counts = [count * (i > 0) for i in range(p)]  # rank 0 has no share
    share, hshare = rank.pair(counts[r], dtype)
    gathered = rank.array(sum(counts), dtype) if r == 0 else None
    scattered = rank.array(counts[r], dtype)
    source, hsource = rank.pair(sum(counts), dtype)
    with rank.machine.captured() as graph:
        fd.all_reduce(x, out=total)
        fd.all_reduce(total, "max", out=again)
        handles = [fd.all_reduce(x, "mean", prescale=0.5, out=mean, async_op=True)]
        assert handles[0].done(), "nothing is left to do when the capture ends"
        handles.pop().wait()
        fd.all_gather(x, out=whole)
        fd.reduce_scatter(x, out=part)
        fd.all_to_all(rows, out=turned)
        fd.world().run("reduce", x, rooted, root=p - 1)
        fd.world().run("gather", share, gathered, counts=counts)
        fd.world().run("scatter", source if r == 0 else None, scattered, counts=counts)
        fd.broadcast(x, p - 1, out=x)
        assert fd.world().last_path == "graph"
    for step in range(3):
        refill([(x, hx), (rows, hrows), (share, hshare), (source, hsource)], step)
        rank.machine.control.clear_log()
        rank.machine.launch(graph)
        log = set(rank.machine.log())
        assert not log & NEVER_IN_A_REPLAY, log
        rooted_on_host = rank.host(count, dtype) if rooted else None
        gathered_on_host = rank.host(sum(counts), dtype) if gathered else None
        source_on_host = hsource if r == 0 else None
        scattered_on_host = rank.host(counts[r], dtype)
        pairs = [
            (total, on_host("all_reduce", hx, rank.host(count, dtype))),
            (again, on_host("all_reduce", hx, rank.host(count, dtype))),
            (mean, on_host("all_reduce", hx, rank.host(count, dtype), op="mean", prescale=0.5)),
            (whole, on_host("all_gather", hx, rank.host(p * count, dtype))),
            (part, on_host("reduce_scatter", hx, rank.host(part.count, dtype))),
            (turned, on_host("all_to_all", hrows, rank.host(p * count, dtype))),
            (rooted, on_host("reduce", hx, rooted_on_host, root=p - 1)),
            (gathered, on_host("gather", hshare, gathered_on_host, counts=counts)),
            (scattered, on_host("scatter", source_on_host, scattered_on_host, counts=counts)),
            (x, on_host("broadcast", hx, rank.host(count, dtype), root=p - 1)),
        ]
        for i, (result, wanted) in enumerate(pairs):
            assert result is None or result.get() == wanted.get(), (step, i)
        y, hy = rank.pair(count, dtype)  # by steps
        fd.all_reduce(y, out=y)
        assert y.get() == on_host("all_reduce", hy, rank.host(count, dtype)).get()
    rank.machine.destroy(graph)
    rank.end()


def on_host(kind: str, x: OnHost | None, out: OnHost | None, **options: Any) -> Any:
    source, target = x.array if x else None, out.array if out else None
    fd.world().run(kind, source, target, **options)
    return out


@pytest.mark.parametrize(
    ("size", "dtype", "count", "kind"),
    [(2, "float32", 50_003, "functions"), (3, "bfloat16", 301, "both"),
     (3, "int8", 200_000, "interface"), (1, "float64", 5, "functions"),
     (4, "float16", 1000, "functions")],
)  # fmt: skip
def test_replays(by_steps: Start, size: int, dtype: str, count: int, kind: str) -> None:
    by_steps(size, FAKE_CUDA_JITTER="3").run(replays, dtype, count, kind)


def many() -> None:
    """Grouped calls, of arrays that travel as one and of some that do not, and empty ones."""
    rank = Rank("functions")
    lengths = [3, 50_003, 0, 17, 1]
    pairs = [rank.pair(n, "float32") for n in lengths]
    empty, _ = rank.pair(0, "int8")
    outs = [rank.array(n, "float32") for n in lengths]
    with rank.machine.captured() as graph:
        fd.grouped_all_reduce([x for x, _ in pairs], out=outs)
        fd.all_reduce(empty, out=empty)
    for step in range(2):
        refill(pairs, step)
        rank.machine.launch(graph)
        expected = [rank.host(n, "float32") for n in lengths]
        fd.grouped_all_reduce([h.array for _, h in pairs], out=[e.array for e in expected])
        assert [out.get() for out in outs] == [e.get() for e in expected]
    rank.machine.destroy(graph)
    rank.end()


def test_many_arrays_in_one_call(by_steps: Start) -> None:
    by_steps(2, FAKE_CUDA_JITTER="5").run(many)


def refusals() -> None:
    rank = Rank("functions")
    x, on_host = rank.pair(40, "float32")
    y = rank.array(40, "float32")
    with rank.machine.captured():
        for call, said in (
            (lambda: fd.send(x, 0), "send cannot become part of one"),
            (lambda: fd.recv(x, 0), "recv cannot become part of one"),
            (lambda: fd.all_reduce(x, out=y, algorithm="step"), "none by algorithm='step'"),
            (
                lambda: fd.all_reduce(x, out=on_host.array),
                "that of another one is another, or is not",
            ),
        ):
            with pytest.raises(fd.InvalidArgument, match=said):
                call()
        with pytest.raises(fd.InvalidArgument, match="that of another one is another, or is not"):
            fd.grouped_all_reduce([x, on_host.array], out=[y, on_host.array])
    handles = [fd.all_reduce(x, out=y, async_op=True)]
    while not handles[0].done():
        pass
    with rank.machine.captured(), pytest.raises(fd.InvalidArgument, match="before the capture"):
        handles[0].wait()
    handles.pop().wait()
    with pytest.raises(fd.InvalidArgument, match="graph"):
        fd.all_reduce(x, out=y, algorithm="graph")  # nobody asks for it by name
    rank.end()


def test_what_cannot_be_captured_is_refused(by_steps: Start) -> None:
    by_steps(1).run(refusals)


def between_hosts() -> None:
    rank = Rank("functions")
    x, y = rank.array(40, "float32"), rank.array(40, "float32")
    said = "all_reduce cannot become part of a CUDA graph here: its ranks are on several hosts"
    with rank.machine.captured():
        with pytest.raises(fd.InvalidArgument, match=said):
            fd.all_reduce(x, out=y)
        with pytest.raises(fd.InvalidArgument, match=said):
            fd.grouped_all_reduce([x, y], out=[x, y])
    rank.end()


def test_none_are_captured_between_hosts(by_steps: Start) -> None:
    apart = {"FARANDOLE_SPLIT_HOSTS": "1,1", "FARANDOLE_INSECURE": "1"}
    by_steps(2, **apart, FARANDOLE_LEVEL="fast", FARANDOLE_DEVICE_PATH="nccl").run(between_hosts)


def says_no_stream() -> None:
    rank = Rank("dlpack")
    x, _ = rank.pair(40, "float32")
    captured = rank.machine.captured()
    captured.__enter__()
    with pytest.raises(fd.InvalidArgument, match="does not say which one it is: that capture is"):
        fd.all_reduce(x, out=x)
    with pytest.raises(AssertionError, match="cuStreamEndCapture: 901"):
        captured.__exit__(None, None, None)
    rank.end()


def test_an_owner_that_does_not_say_its_stream(by_steps: Start) -> None:
    by_steps(1).run(says_no_stream)


def one_captures() -> str:
    rank = Rank("functions")
    x, hx = rank.pair(40, "float32")
    y = rank.array(40, "float32")
    capture = rank.machine.captured() if fd.rank() == 1 else contextlib.nullcontext()
    with capture, pytest.raises(fd.Mismatch) as caught:
        fd.all_reduce(x, out=y)
    verdict = caught.value.verdict
    del caught
    fd.all_reduce(x, out=y)  # the group lives on
    assert y.get() == on_host("all_reduce", hx, rank.host(40, "float32")).get()
    rank.end()
    return verdict


def test_a_rank_that_captures_alone(by_steps: Start) -> None:
    one, other = by_steps(2).run(one_captures)
    assert one == other
    assert "ranks disagree on the algorithm of all_reduce" in one
    assert "graph on rank 1" in one


def no_bucket() -> str:
    rank = Rank("functions")
    x, _ = rank.pair(40, "float32")
    with rank.machine.captured(), pytest.raises(fd.InvalidArgument) as caught:
        fd.all_reduce(x, out=x)
    verdict = caught.value.verdict
    del caught
    rank.end()
    return verdict


@pytest.mark.parametrize(
    ("driver", "why"),
    [({"FAKE_CUDA_VIRTUAL_MEMORY": "0"}, "by file descriptors"),
     ({"FAKE_CUDA_MEMORY_OPERATIONS": "0", "FAKE_CUDA_DEVICES": "2"}, "wait for words")],
)  # fmt: skip
def test_a_driver_with_too_little(by_steps: Start, driver: dict[str, str], why: str) -> None:
    one, other = by_steps(2, **driver).run(no_bucket)
    assert one == other
    assert "all_reduce #" in one
    assert "cannot go by 'graph': rank 0: " in one
    assert why in one


def goes_wrong(how: str, timeout: float | None = None) -> tuple[str, str, list[str]]:
    """Graphs of two collectives each, that are replayed on rank 0; `how` says what rank 1 does."""
    rank = Rank("functions")
    x, _ = rank.pair(50_000, "float32")
    y, z = rank.array(50_000, "float32"), rank.array(50_000, "float32")
    with rank.machine.captured() as first:
        fd.all_reduce(x, out=y, name="first", timeout=timeout)
        fd.all_reduce(y, out=y, timeout=timeout)
    with rank.machine.captured() as second:
        fd.all_reduce(x, "max", out=z, name="second", timeout=timeout)
    rank.machine.launch(first)
    y.get()
    fd.barrier()
    if fd.rank() == 1 and how == "leaves":
        rank.machine.destroy(first, second)
        rank.end()
        return "", "", ["", ""]
    if fd.rank() == 1 and how == "waits":
        harness.tell("waits")
        harness.listen()
    turned = fd.rank() == 1 and how == "turns"
    for graph in (second, first) if turned else (first, second):
        rank.machine.launch(graph)
    y.get()  # whatever it is
    z.get()
    with pytest.raises(fd.Error) as caught:
        barriers()
    rank.machine.destroy(first, second)
    with contextlib.suppress(fd.Error):
        fd.shutdown()
    gc.collect()
    return caught.value.verdict, caught.type.__name__, list(rank.machine.leave())


def fails_to_be_captured(call: str) -> tuple[str, list[str]]:
    rank = Rank("functions")
    x, _ = rank.pair(1000, "float32")
    with rank.machine.captured() as first:
        fd.all_reduce(x, out=x)
    fd.barrier()
    if fd.rank() == 1:
        rank.machine.fail(call, 1, 46)

    def captures() -> None:
        fd.all_reduce(x, out=x)
        barriers()

    with rank.machine.captured() as second, pytest.raises(fd.DeviceError) as caught:
        captures()
    rank.machine.destroy(first, second)
    verdict = caught.value.verdict
    del caught  # its frames have the group
    with contextlib.suppress(fd.Error):
        fd.shutdown()
    gc.collect()
    return verdict, list(rank.machine.leave())


@pytest.mark.parametrize("call", ["cuStreamGetCaptureInfo", "cuUserObjectCreate"])
def test_a_capture_that_fails_keeps_no_memory(by_steps: Start, call: str) -> None:
    for verdict, left in by_steps(2).run(fails_to_be_captured, call):
        assert verdict.startswith("rank 1: cannot ")
        assert left == ["", ""]


def test_a_rank_that_replays_in_another_order(by_steps: Start) -> None:
    one, other = by_steps(2).run(goes_wrong, "turns")
    assert one == other
    verdict, kind, left = one
    assert kind == "Mismatch"
    assert "ranks replay collectives of CUDA graphs in different orders" in verdict
    assert "rank 0 was at all_reduce #" in verdict or "rank 1 was at all_reduce #" in verdict
    assert left == ["", ""]


def leaves_a_replay(with_a_group: bool) -> tuple[bool, str]:
    """That rank 1 never launches: rank 0 does not wait for it as long as its timeout. Whatever runs
    later finds its memory, and nobody to wait for."""
    rank = Rank("functions")
    x, _ = rank.pair(50_000, "float32")
    with rank.machine.captured() as graph:
        fd.all_reduce(x, out=x)
        fd.all_reduce(x, out=x)
    if fd.rank() == 0:
        rank.machine.launch(graph)
    group = fd.world() if with_a_group else None
    fd.shutdown()
    gc.collect()
    rank.machine.launch(graph)
    x.get()
    kept = rank.machine.alive() != ""
    del group
    rank.machine.destroy(graph)
    return kept, rank.machine.misuse()


@pytest.mark.parametrize("with_a_group", [False, True])
def test_a_replay_is_left_behind_by_a_rank_that_ends(by_steps: Start, with_a_group: bool) -> None:
    world = by_steps(2, FAKE_CUDA_JITTER="7")
    assert world.run(leaves_a_replay, with_a_group) == [(True, "")] * 2


def test_a_rank_that_is_killed(by_steps: Start) -> None:
    world = by_steps(2)
    world.start(goes_wrong, "waits")
    world.hear(1)
    world.signal(1, signal.SIGKILL)
    verdict, kind, left = world.outcome(0).value
    assert "was killed by SIGKILL during a replay of all_reduce" in verdict
    assert kind == "PeerLost"
    assert left == ["", ""]


def test_a_rank_that_leaves(by_steps: Start) -> None:
    (verdict, kind, left), _ = by_steps(2).run(goes_wrong, "leaves")
    assert "rank 1" in verdict
    assert kind == "EarlyExit"
    assert left == ["", ""]


def test_a_rank_that_does_not_come(by_steps: Start) -> None:
    world = by_steps(2, FARANDOLE_TIMEOUT="1")
    world.start(goes_wrong, "waits")
    verdict, kind, left = world.outcome(0).value
    assert "a replay of all_reduce" in verdict
    assert "'first' was not complete on device 0 of rank 0 after 1." in verdict
    assert kind == "Stalled"
    assert left == ["", ""]
    world.say(1, "go")
    assert world.outcome(1).value[:2] == (verdict, kind)
