"""Collectives on devices by NCCL: what it runs, when it is taken, where it is found. By ranks over
the fake driver and a fake NCCL, whose folds begin at the last rank. One host may pass for two."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_device import Array, OnHost
from fake_nccl import NcclRank
from test_device_collectives import GROUPED, extra_calls, on_host

import farandole as fd
from harness import World

Start = Callable[..., World]

WAYS = ("step", "spin", "nccl")  # of arrays that stay on devices

# Sums of such numbers are exact in any order, in every type.
SMALL = np.arange(8)


def small(rank: NcclRank, shape: tuple[int, ...] | int, dtype: str) -> tuple[Array, OnHost]:
    array, host = rank.pair(shape, dtype)
    values = SMALL[np.arange(array.count) * (fd.rank() + 3) % 8]
    if dtype == "bfloat16":
        raw = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    else:
        raw = values.astype(dtype).tobytes()
    array.put(raw)
    host.memory[:] = np.frombuffer(raw, np.uint8)
    return array, host


def mean_or_sum(dtype: str) -> str:
    """NCCL takes no means of integers."""
    return "mean" if "float" in dtype else "sum"


def went_by(path: str) -> None:
    assert fd.world().last_path == path


def with_root(rank: NcclRank, root: int, n: int, dtype: str) -> None:
    p, r = fd.size(), fd.rank()
    counts = [n * i for i in range(p)] if p > 1 else [n]
    x, hx = small(rank, n, dtype)
    share, hshare = small(rank, counts[r], dtype)
    whole, hwhole = small(rank, sum(counts), dtype)
    asked: list[tuple[Any, ...]] = [
        ("reduce", x, hx, n if r == root else 0, {"op": mean_or_sum(dtype)}),
        ("gather", share, hshare, sum(counts) if r == root else 0, {"counts": counts}),
        ("scatter", whole if r == root else None, hwhole, counts[r], {"counts": counts}),
    ]
    for kind, source, hsource, length, options in asked:
        gets = r == root or kind == "scatter"
        out = rank.array(length, dtype) if gets else None
        fd.world().run(kind, source, out, root=root, **options)
        went_by("nccl")
        if source is not None:
            source.put(bytes(source.nbytes))  # behind it, also where there is no result
        expected = on_host(
            kind, hsource if source else None, rank.host(length, dtype) if gets else None,
            root=root, **options,
        )  # fmt: skip
        assert out is None or out.get() == expected.get(), kind


def collectives(dtype: str, n: int) -> None:
    """In any order the sums are the same, so they are the host's."""
    rank = NcclRank()
    p, r = fd.size(), fd.rank()

    def same(result: Array, kind: str, x: OnHost, out: OnHost, **options: Any) -> None:
        went_by("nccl")
        expected = on_host(kind, x, out, **options)
        assert result.get() == expected.get(), kind

    for op in ("sum", "min", "max", "product"):
        x, hx = small(rank, (n, 2), dtype)
        y = rank.array((n, 2), dtype)
        fd.all_reduce(x, op, out=y)
        same(y, "all_reduce", hx, rank.host(2 * n, dtype), op=op)
    x, hx = small(rank, n, dtype)
    fd.all_reduce(x, out=x)
    same(x, "all_reduce", hx, rank.host(n, dtype))
    op = mean_or_sum(dtype)
    if op == "mean":
        x, hx = small(rank, n, dtype)
        scaled = {"prescale": 0.5, "postscale": 4.0}
        same(fd.all_reduce(x, **scaled), "all_reduce", hx, rank.host(n, dtype), **scaled)
        same(fd.all_reduce(x, "mean"), "all_reduce", hx, rank.host(n, dtype), op="mean")
    for count in (p * n, p * n + 1):  # shares that are equal, and not
        x, hx = small(rank, count, dtype)
        part = count // p + (r < count % p)
        same(fd.reduce_scatter(x, op), "reduce_scatter", hx, rank.host(part, dtype), op=op)
    for root in {0, p - 1}:
        x, hx = small(rank, n, dtype)
        y = rank.array(n, dtype)
        fd.broadcast(x, root, out=y)
        same(y, "broadcast", hx, rank.host(n, dtype), root=root)
        fd.broadcast(x, root, out=x)
        same(x, "broadcast", hx, rank.host(n, dtype), root=root)
        with_root(rank, root, n, dtype)
    x, hx = small(rank, n, dtype)
    same(fd.all_gather(x), "all_gather", hx, rank.host(p * n, dtype))
    x, hx = small(rank, (r + 1, 3), dtype)
    counts = [3 * (i + 1) for i in range(p)]
    y = fd.all_gather(x, uneven=True)
    same(y, "all_gather", hx, rank.host(sum(counts), dtype), counts=counts)
    x, hx = small(rank, p * n, dtype)
    same(fd.all_to_all(x), "all_to_all", hx, rank.host(p * n, dtype))
    for kind, length in GROUPED.items():
        pairs = [small(rank, count, dtype) for count in (5, n, 7 * p)]
        host_outs = [rank.host(length(x.count, p, r), dtype) for x, _ in pairs]
        outs = [rank.array(length(x.count, p, r), dtype) for x, _ in pairs]
        call = getattr(fd, f"grouped_{kind}")
        call([x for x, _ in pairs], out=outs)
        went_by("nccl")
        call([h.array for _, h in pairs], out=[h.array for h in host_outs])
        assert [out.get() for out in outs] == [h.get() for h in host_outs], kind
    rank.end()
    assert rank.nccl.calls("ncclCommAbort") == 0
    assert rank.nccl.calls("ncclCommDestroy") == 1, "what others may need of it was flushed"


@pytest.mark.parametrize(
    ("size", "hosts", "dtype", "late"),
    [(2, "", "float32", "300"), (3, "", "bfloat16", "0"), (2, "", "float16", "0"),
     (3, "", "uint8", "0"), (2, "", "int64", "300"), (1, "", "float64", "0"),
     (2, "1,1", "float32", "300"), (4, "2,2", "float16", "0"), (4, "1,3", "int64", "0")],
)  # fmt: skip
def test_every_collective(by_nccl: Start, size: int, hosts: str, dtype: str, late: str) -> None:
    ranks = by_nccl(size, hosts, FAKE_NCCL_LATE=late, FAKE_CUDA_JITTER="3")
    ranks.run(collectives, dtype, 2500)


def order_of_its_own() -> None:
    """And what only moves has all bits of any type."""
    rank = NcclRank()
    values = np.array([[1e8], [3.0], [-1e8]], np.float32)
    x = rank.array(1, "float32").put(values[fd.rank()].tobytes())
    y = fd.all_reduce(x)
    went_by("nccl")
    assert np.frombuffer(y.get(), np.float32)[0] == (values[2] + values[1] + values[0])[0] == 0
    for dtype in ("bool", "int16", "float16"):
        z, hz = rank.pair(77, dtype)
        all_of_it = fd.all_gather(z)
        went_by("nccl")
        expected = on_host("all_gather", hz, rank.host(77 * 3, dtype))
        assert all_of_it.get() == expected.get()
    rank.end()


@pytest.mark.parametrize(("hosts", "transport"), [("", "auto"), ("1,2", "auto"), ("", "tcp")])
def test_its_order_of_folds_is_its_own(by_nccl: Start, hosts: str, transport: str) -> None:
    by_nccl(3, hosts, FARANDOLE_TRANSPORT=transport).run(order_of_its_own)


def in_order() -> None:
    """Operations take what the one before leaves, without a wait between them; those that NCCL
    cannot run go another way in between."""
    rank = NcclRank("interface")
    x, hx = small(rank, 40_000, "float32")
    counts, hcounts = small(rank, 40_000, "int32")
    handles = []
    for _ in range(3):
        handles += [fd.all_reduce(x, out=x, async_op=True)]
        handles += [fd.all_reduce(counts, "mean", out=counts, async_op=True)]
        fd.all_reduce(hx.array, out=hx.array)
        fd.all_reduce(hcounts.array, "mean", out=hcounts.array)
    for handle in handles:
        handle.wait()
    assert x.get() == hx.get()
    assert counts.get() == hcounts.get()
    del handle, handles
    rank.end()


@pytest.mark.parametrize("hosts", ["", "1,1"])
def test_operations_come_one_after_the_other(by_nccl: Start, hosts: str) -> None:
    by_nccl(2, hosts, FAKE_CUDA_JITTER="17", FAKE_NCCL_LATE="200").run(in_order)


# ---- when it is taken ----


def path_of(x: Array, **options: Any) -> str:
    fd.all_reduce(x, out=x, **options)
    x.get()
    return str(fd.world().last_path)


def levels() -> None:
    rank = NcclRank()
    x = rank.array(3_000_000, "float32").put(bytes(12_000_000))
    assert path_of(x) == "step", "bits are promised"
    assert path_of(x, level="fast") == "nccl"
    assert path_of(x, level="fast", algorithm="step") == "step"
    assert path_of(x, level="fast", algorithm="nccl") == "nccl"
    with pytest.raises(fd.InvalidArgument, match="'nccl': NCCL folds in an order of its own, and "):
        fd.all_reduce(x, out=x, algorithm="nccl")
    gathered = fd.all_gather(rank.array(3_000_000, "float32"), algorithm="nccl")
    went_by("nccl")
    assert gathered.count == 3_000_000 * fd.size()
    counts = rank.array(10, "int32")
    with pytest.raises(fd.InvalidArgument, match="does not scale integers as the host does"):
        fd.all_reduce(counts, "mean", out=counts, algorithm="nccl", level="fast")
    with pytest.raises(fd.InvalidArgument, match="NCCL folds no int16"):
        fd.all_reduce(rank.array(10, "int16"), algorithm="nccl", level="fast")
    with pytest.raises(fd.InvalidArgument, match="reduce cannot go by 'nccl': NCCL folds in an"):
        fd.reduce(x, out=x, algorithm="nccl")
    rank.end()


def test_level_fast_alone(by_nccl: Start) -> None:
    by_nccl(2, FARANDOLE_DEVICE_PATH="auto", FARANDOLE_LEVEL="canonical").run(levels)


def promised() -> None:
    rank = NcclRank()
    x = rank.array(10, "float32")
    with pytest.raises(fd.InvalidArgument, match="level 'canonical' promises bits"):
        fd.all_reduce(x, out=x)
    fd.broadcast(x, 0, out=x)
    went_by("nccl")
    rank.end()


@pytest.mark.parametrize("hosts", ["", "1,1"])
def test_asked_for_where_bits_are_promised(by_nccl: Start, hosts: str) -> None:
    by_nccl(2, hosts, FARANDOLE_LEVEL="canonical").run(promised)


def test_the_default_at_level_fast(by_nccl: Start) -> None:
    by_nccl(2, FARANDOLE_DEVICE_PATH="auto").run(by_default)


def by_default() -> None:
    rank = NcclRank()
    assert path_of(rank.array(3_000_000, "float32").put(bytes(12_000_000))) == "nccl"
    assert path_of(rank.array(2, "float32")) == "spin"
    rank.end()


def chosen_with(switches: str) -> str:
    rank = NcclRank()
    rank.machine.control.configure(b"multicast", switches[fd.rank()].encode())
    path = path_of(rank.array(28_750, "float32"))
    rank.end()
    return path


@pytest.mark.parametrize(("switches", "path"), [("1111", "nccl"), ("1110", "spin")])
def test_a_switch_that_joins_all_makes_nccl_faster(
    by_nccl: Start, switches: str, path: str
) -> None:
    """Near the size from which NCCL is predicted to be faster than one kernel."""
    env = {"FARANDOLE_DEVICE_PATH": "auto", "FAKE_CUDA_MULTIPROCESSORS": "64"}
    assert by_nccl(4, **env).run(chosen_with, switches) == [path] * 4


def number_of_the_next(rank: NcclRank) -> int:
    """The number of the program's next operation: each agreement takes one."""
    with pytest.raises(fd.InvalidArgument, match="NCCL folds no int16") as refused:
        fd.all_reduce(rank.array(10, "int16"), algorithm="nccl", level="fast")
    found = re.search(r"#(\d+)", refused.value.verdict)
    assert found
    return int(found[1])


def between_hosts() -> None:
    """Where NCCL is not taken it costs nothing: neither streams nor another agreement."""
    rank = NcclRank()
    x = rank.array(3_000_000, "float32").put(bytes(12_000_000))
    assert path_of(x) not in WAYS, "bits are promised"
    streams = rank.machine.control.calls(b"cuStreamCreateWithPriority")
    fd.all_gather(rank.array(10, "float32"))
    assert path_of(rank.array(10, "int32"), op="mean", level="fast") not in WAYS
    assert rank.machine.control.calls(b"cuStreamCreateWithPriority") == streams
    assert rank.nccl.calls("ncclGetVersion") == 0
    for way in ("step", "spin"):
        with pytest.raises(fd.InvalidArgument, match=f"'{way}' here: its ranks are on several h"):
            fd.all_reduce(x, out=x, algorithm=way)
    with pytest.raises(fd.InvalidArgument, match="'nccl': NCCL folds in an order of its own, and "):
        fd.all_reduce(x, out=x, algorithm="nccl")
    assert path_of(x, level="fast") == "nccl"
    assert path_of(x, level="fast", algorithm="nccl") == "nccl"
    assert path_of(x, level="fast", algorithm="staged") not in WAYS
    gathered = fd.all_gather(rank.array(3_000_000, "float32"), algorithm="nccl")
    went_by("nccl")
    assert gathered.count == 3_000_000 * fd.size()
    first = number_of_the_next(rank)
    assert path_of(x) not in WAYS
    assert path_of(rank.array(10, "int16"), level="fast") not in WAYS
    assert path_of(x, level="fast") == "nccl"
    assert number_of_the_next(rank) == first + 4, "one agreement each"
    fd.barrier()
    assert rank.machine.control.calls(b"cuMemCreate") == 0, "there are no buckets"
    rank.end()


def test_between_hosts_at_level_fast_alone(by_nccl: Start) -> None:
    auto = {"FARANDOLE_DEVICE_PATH": "auto", "FARANDOLE_LEVEL": "canonical"}
    whole = {"FARANDOLE_STAGED_PIECE_BYTES": "16M"}  # pieces have numbers of their own
    world = by_nccl(2, "1,1", **auto, **whole)
    world.run(between_hosts)
    warnings = [world.output(rank).count("FARANDOLE_LEVEL=fast") for rank in range(2)]
    assert warnings == [1, 0], "of what the level costs"


def mixed() -> None:
    """Not all arrays lie on devices: all go by the host, also where NCCL was to be taken."""
    rank = NcclRank("interface")
    for step in range(3):
        x, hx = small(rank, 3000, "float32")
        mine = x if fd.rank() == 0 else hx.array
        expected = on_host("all_reduce", hx, rank.host(3000, "float32"))
        fd.all_reduce(mine, out=mine)
        assert (x.get() if fd.rank() == 0 else hx.get()) == expected.get(), step
        assert fd.world().last_path not in WAYS
    x, hx = small(rank, 3000, "float32")
    expected = on_host("all_reduce", hx, rank.host(3000, "float32"))
    fd.all_reduce(x, out=x, name="another call")
    went_by("nccl")
    assert x.get() == expected.get()
    rank.end()


@pytest.mark.parametrize("hosts", ["", "1,1"])
def test_some_arrays_on_devices_some_not(by_nccl: Start, hosts: str) -> None:
    by_nccl(2, hosts).run(mixed)


# ---- where there is none ----


def without(why: str, fail: tuple[str, int] | None, off: bool) -> None:
    """All ranks go another way together, and say which rank has none."""
    rank = NcclRank()
    if os.environ["FAKE_CUDA_DEVICES"] == "1":
        rank.device = 0
    if fd.rank() == 1 and off:
        os.environ["FARANDOLE_NCCL"] = "off"
    if fd.rank() == 1 and fail:
        rank.nccl.fail(fail[0], 1, fail[1])
    x, hx = small(rank, 3000, "float32")
    fd.all_reduce(hx.array, out=hx.array)
    y = rank.array(3000, "float32")
    for _ in range(2):
        fd.all_reduce(x, out=y)
        assert (fd.world().last_path == "step") == (fd.cross_size() == 1)
        assert fd.world().last_path != "nccl"
        assert y.get() == hx.get()
    said = re.escape(f"cannot go by 'nccl': {why}").replace(r"\?", r"\d")
    with pytest.raises(fd.InvalidArgument, match=said):
        fd.all_reduce(x, out=y, algorithm="nccl")
    rank.end()


SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
WITHOUT: dict[str, tuple[dict[str, str], str, tuple[str, int] | None, bool]] = {
    "one rank has none": ({}, "rank 1: FARANDOLE_NCCL=off", None, True),
    "one cannot begin": ({}, "rank 1: ncclCommInitRankConfig failed on device ? (Fake GPU): a call "
                         "of the system failed", ("ncclCommInitRankConfig", 2), False),
    "one comes to nothing": ({}, "rank 1: ncclCommGetAsyncError failed on device 1 (Fake GPU): it "
                             "is in a state", ("ncclCommGetAsyncError", 3), False),
    "a device that ranks share": ({"FAKE_CUDA_DEVICES": "1"}, "NCCL takes one rank on a "
                                  "device, and ranks 0-1 share one", None, False),
    "an older NCCL that shares none": ({"FAKE_CUDA_DEVICES": "1", **SHARED}, "NCCL takes one rank "
                                       "on a device, and ranks 0-1 share one", None, False),
    "too old": ({"FAKE_NCCL_VERSION": "21304"}, "rank 0: NCCL is too old: ", None, False),
    "another library": ({"FARANDOLE_NCCL": "libm.so.6"}, "rank 0: libm.so.6 is not NCCL: it has no "
                        "ncclGetVersion", None, False),
    "no such file": ({"FARANDOLE_NCCL": "/none.so"}, "rank 0: there is no NCCL: /none.so cannot be "
                     "opened", None, False),
}  # fmt: skip


@pytest.mark.parametrize("what", WITHOUT)
def test_where_there_is_none(by_nccl: Start, what: str) -> None:
    env, *rest = WITHOUT[what]
    by_nccl(2, **env).run(without, *rest)


@pytest.mark.parametrize("what", ["one rank has none", "one cannot begin", "too old"])
def test_where_there_is_none_between_hosts(by_nccl: Start, what: str) -> None:
    env, *rest = WITHOUT[what]
    by_nccl(2, "1,1", **env).run(without, *rest)


def alone() -> None:
    """Where devices cannot share buckets, NCCL still may run."""
    rank = NcclRank()
    x, hx = small(rank, 3000, "float32")
    fd.all_reduce(hx.array, out=hx.array)
    assert fd.all_reduce(x, out=x).get() == hx.get()
    went_by("nccl")
    rank.end()


def test_where_devices_cannot_share_buckets(by_nccl: Start) -> None:
    by_nccl(2, FAKE_CUDA_PEERS="0").run(alone)


def share_a_device() -> None:
    rank = NcclRank()
    rank.device = 0
    x, hx = small(rank, 3000, "float32")
    fd.all_reduce(hx.array, out=hx.array)
    assert fd.all_reduce(x, out=x).get() == hx.get()
    went_by("nccl")
    rank.end()


def test_ranks_that_share_a_device_where_nccl_is_told_so(by_nccl: Start) -> None:
    env = {"FAKE_CUDA_DEVICES": "1", "FAKE_NCCL_VERSION": "23007"}
    by_nccl(2, **env, **SHARED).run(share_a_device)


# ---- what it asks of the driver and of NCCL ----


def steady() -> tuple[list[str], int]:
    rank = NcclRank("interface")
    x, y = rank.array(40_001, "float32"), rank.array(40_001, "float32")

    def step() -> None:
        handles = [fd.all_reduce(x, out=y, async_op=True) for _ in range(3)]
        for handle in handles:
            handle.wait()
        rank.machine.call("cuStreamSynchronize", rank.machine.streams[rank.device])

    with rank.machine.on(rank.device):
        step()
        rank.machine.control.hold(True)  # more is in flight at once than ever afterwards
        handles = [fd.all_reduce(x, out=y, async_op=True) for _ in range(48)]
        handles[-1].wait()
        rank.machine.control.hold(False)
        handles.clear()
        step()
        before = rank.nccl.calls("ncclAllReduce")
        extra = extra_calls(rank, step, 5)
    calls = rank.nccl.calls("ncclAllReduce") - before
    rank.end()
    return extra, calls


def test_a_steady_step_neither_allocates_nor_waits_for_the_device(by_nccl: Start) -> None:
    for extra, calls in by_nccl(2).run(steady):
        assert extra == ["cuStreamSynchronize"] * 5, "the test's own, once a step"
        assert calls == 15


def packs(options: dict[str, float]) -> tuple[int, int]:
    """Many small arrays and a large one in a call, twice: what NCCL was asked for, and kernels."""
    rank = NcclRank("functions")
    asked = 0
    for dtype, counts in (("float32", range(1, 40)), ("float16", range(3, 90, 2))):
        pairs = [small(rank, count, dtype) for count in (*counts, 600_000)]
        for _ in range(2):
            before = rank.nccl.calls("ncclAllReduce")
            fd.grouped_all_reduce([x for x, _ in pairs], out=[x for x, _ in pairs], **options)
            asked += rank.nccl.calls("ncclAllReduce") - before
            went_by("nccl")
            on_the_host = [h.array for _, h in pairs]
            fd.grouped_all_reduce(on_the_host, out=on_the_host, **options)
            assert [x.get() for x, _ in pairs] == [h.get() for _, h in pairs], dtype
        del pairs
    kernels = rank.machine.launched()
    assert rank.nccl.calls("ncclRedOpCreatePreMulSum") == 0
    rank.end()
    return asked, kernels


@pytest.mark.parametrize("postscale", [1.0, 1 / 3])
@pytest.mark.parametrize("hosts", ["", "1,1"])
def test_small_arrays_travel_as_one(by_nccl: Start, hosts: str, postscale: float) -> None:
    world = by_nccl(2, hosts)
    for asked, kernels in world.run(packs, {"postscale": postscale}):
        assert "FARANDOLE_LEVEL" not in world.output(0)
        assert asked == 2 * 2 * 2, "of each call what is packed, and the large one"
        arrays, large = 39 + 44, 2
        scaled = 2 * (arrays + large) * (postscale != 1)
        if hosts:
            assert kernels == scaled, "each result by one kernel"
        else:
            packing = 2 * 2 * 2  # which scales, too
            assert kernels == packing + 2 * large * (postscale != 1)


def overflows() -> None:
    """A mean is a sum, and then multiplied: as by any other way."""
    rank = NcclRank()
    values = np.full(3000, 60_000, np.float16).tobytes()
    x, on_host = rank.array(3000, "float16").put(values), OnHost(values, "float16")
    fd.all_reduce(on_host.array, "mean", out=on_host.array)
    assert np.isinf(np.frombuffer(on_host.get(), np.float16)).all()
    for way in ("step", "nccl"):
        assert fd.all_reduce(x, "mean", algorithm=way).get() == on_host.get()
        went_by(way)
    fd.all_reduce(x, "mean", prescale=0.5, postscale=2.0, out=x, algorithm="nccl")
    assert x.get() == values, "what is prescaled does not overflow"
    assert rank.nccl.calls("ncclRedOpCreatePreMulSum") == 1, "it is NCCL that scales inputs"
    rank.end()


def test_a_mean_overflows_where_its_sum_does(by_nccl: Start) -> None:
    by_nccl(2, FARANDOLE_DEVICE_PATH="auto").run(overflows)


def without_kernels() -> int:
    """Rank 1's device loads none."""
    rank = NcclRank()
    if fd.rank() == 1:
        for _ in range(2):  # for a bucket, and for NCCL
            rank.machine.fail("cuModuleLoadDataEx", 1, 2)
    x, hx = small(rank, 3000, "float32")
    y = fd.all_reduce(x, "mean")
    went_by("nccl")
    expected = on_host("all_reduce", hx, rank.host(3000, "float32"), op="mean")
    assert y.get() == expected.get()
    made = rank.nccl.calls("ncclRedOpCreatePreMulSum")
    rank.end()
    return made


@pytest.mark.parametrize("hosts", ["", "1,1"])
def test_nccl_scales_inputs_where_a_rank_has_no_kernels(by_nccl: Start, hosts: str) -> None:
    assert by_nccl(2, hosts).run(without_kernels) == [1, 1]


# ---- where it is found ----

ASK = "from farandole import cuda; found = cuda.nccl_library(); print(found.version, found.file)"


def asked(before: str = "", **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", before + ASK],
        env={**os.environ, **env}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


def test_where_it_is_found(fake_nccl: str, tmp_path: Path) -> None:
    """A loaded library comes first, then the wheel's, then the loader's; a setting before all."""
    wheel = tmp_path / "nvidia" / "nccl" / "lib"
    wheel.mkdir(parents=True)
    (wheel / "libnccl.so.2").write_bytes(Path(fake_nccl).read_bytes())
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    assert asked(PYTHONPATH=paths) == f"(2, 20, 5) {wheel}/libnccl.so.2"
    loaded = f"import ctypes; ctypes.CDLL({fake_nccl!r});"
    assert asked(loaded, PYTHONPATH=paths) == f"(2, 20, 5) {fake_nccl}"
    folder = str(Path(fake_nccl).parent)
    assert asked(LD_LIBRARY_PATH=folder).startswith("(2, 20, 5)")
    assert asked(FARANDOLE_NCCL=fake_nccl, PYTHONPATH=paths) == f"(2, 20, 5) {fake_nccl}"
    off = "import farandole as fd\ntry:\n    from farandole import cuda; cuda.nccl_library()\n"
    off += "except fd.DeviceError as error:\n    print(error)\nraise SystemExit\n"
    assert asked(off, FARANDOLE_NCCL="off", PYTHONPATH=paths).startswith("FARANDOLE_NCCL=off")
