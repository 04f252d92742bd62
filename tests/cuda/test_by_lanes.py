"""Collectives of which one kernel on each rank runs the schedule, through slots in the ranks'
buckets; by ranks over the fake driver, which runs the kernels' own source."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_device import Rank, all_come
from test_device_collectives import LOADS, extra_calls
from test_steps import OLDER, together

import farandole as fd
from harness import World

Start = Callable[..., World]
DTYPES = [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
DTYPES += ["float16", "bfloat16", "float32", "float64"]
PLANNERS = ("direct", "binomial", "halving_doubling", "doubling", "ring", "double_tree")


@pytest.fixture
def by_lanes(by_steps: Start) -> Start:
    """Ranks that may share a device, as they are told; in pieces of some 20 KiB."""

    def started(size: int, **env: str) -> World:
        return by_steps(size, **{"FARANDOLE_DEVICE_PATH": "lanes", **env})

    return started


def went(way: str = "lanes") -> None:
    assert fd.world().last_path == way, fd.world().last_path


# ---- the same bits ----


def folds(devices: int, dtypes: list[str]) -> None:
    """In one piece and in several, in place and not, from where no pack begins."""
    rank = Rank("functions")
    rank.device = fd.rank() % devices
    for dtype in dtypes:
        for count in (0, 1, 1001, 20_003):
            x, on_host = rank.pair(count, dtype)
            y, expected = rank.array(count, dtype), rank.host(count, dtype)
            op = "max" if dtype == "bool" else "mean"
            fd.all_reduce(on_host.array, op, out=expected.array)
            fd.all_reduce(x, op, out=y)
            assert count == 0 or went() is None
            assert y.get() == expected.get()
            assert x.get() == on_host.get(), "the input is as it was"
            fd.all_reduce(x, op, out=x)
            assert x.get() == expected.get()
    rank.end()


@pytest.mark.parametrize(
    ("size", "devices", "dtypes"),
    [
        (1, 1, ["float32", "int8"]),
        (2, 1, ["float32", "bfloat16", "bool", "int64"]),
        (3, 3, ["float16", "uint8"]),
        (4, 2, ["float64"]),
        (5, 5, ["uint16", "bfloat16"]),
        (8, 8, ["float32"]),
    ],
)
def test_bits_are_those_of_the_host(
    by_lanes: Start, size: int, devices: int, dtypes: list[str]
) -> None:
    world = by_lanes(size, FAKE_CUDA_DEVICES=str(devices), FAKE_CUDA_JITTER="3")
    world.run(folds, devices, dtypes)


def every_kind(way: str, large: int) -> None:
    """Also in unequal shares, of which one is empty."""
    rank = Rank("functions")
    p, r, dtype = fd.size(), fd.rank(), "int16"
    shares = [large * i + 3 * (i > 0) for i in range(p)]
    mine, total, root = shares[r], sum(shares), p - 1
    is_root = r == root
    squares = [large * i + j for i in range(p) for j in range(p)]
    sent, got = sum(squares[r * p : (r + 1) * p]), sum(squares[r::p])
    uneven: dict[str, tuple[int, int, Any]] = {
        "reduce_scatter": (total, mine, {"counts": shares}),
        "all_gather": (mine, total, {"counts": shares}),
        "all_to_all": (sent, got, {"counts": squares}),
        "gather": (mine, total if is_root else 0, {"counts": shares, "root": root}),
        "scatter": (total if is_root else 0, mine, {"counts": shares, "root": root}),
    }
    n = large + 5
    even: dict[str, tuple[int, int, Any]] = {
        "reduce_scatter": (n, n // p + (r < n % p), {}),
        "all_gather": (n, n * p, {}),
        "all_to_all": (n * p, n * p, {}),
        "broadcast": (n, n, {"root": root}),
        "reduce": (n, n if is_root else 0, {"root": root}),
    }
    for kind, (given, taken, options) in [*uneven.items(), *even.items()]:
        source, on_host = rank.pair(given, dtype)
        result, expected = rank.array(taken, dtype), rank.host(taken, dtype)
        fd.world().run(kind, on_host.array, expected.array, **options)
        for _ in range(2):
            result.put(bytes(result.nbytes))
            fd.world().run(kind, source, result, **options)
            went("lanes" if kind in ("broadcast", "reduce") else way)
            assert result.get() == expected.get(), kind
    rank.end()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_collective(by_lanes: Start, size: int) -> None:
    by_lanes(size, FAKE_CUDA_JITTER="7").run(every_kind, "lanes", 300)


def test_shares_that_are_too_large_go_by_steps(by_lanes: Start) -> None:
    by_lanes(2, FAKE_CUDA_JITTER="9").run(every_kind, "step", 15_000)


def test_many_arrays_in_one_call(by_lanes: Start) -> None:
    """All-reduces of them, in pieces of the bucket; what else they do goes by steps."""
    by_lanes(2, FAKE_CUDA_JITTER="23").run(together, "lanes", -1, 20)


def test_by_older_handles(by_lanes: Start) -> None:
    by_lanes(3, **OLDER, FAKE_CUDA_JITTER="21").run(every_kind, "lanes", 300)


def by_turns() -> None:
    """In flight together, where steps use the same memory of the bucket as lanes."""
    rank = Rank("functions")
    asked = [
        ("lanes", 9001), ("step", 40_001), ("spin", 1000), ("lanes", 30_001), ("lanes", 5),
        ("step", 20_001), ("halving_doubling", 12_003), ("step", 33), ("lanes", 15_001),
    ]  # fmt: skip
    pairs = [rank.pair(count, "float32") for _, count in asked]
    expected = [rank.host(count, "float32") for _, count in asked]
    for (_, on_host), result in zip(pairs, expected, strict=True):
        fd.all_reduce(on_host.array, out=result.array)
    handles = [
        fd.all_reduce(x, out=x, async_op=True, algorithm=way)
        for (way, _), (x, _) in zip(asked, pairs, strict=True)
    ]
    all_come(handles, [x for x, _ in pairs], expected)
    rank.end()


@pytest.mark.parametrize("seed", ["1", "2"])
def test_ways_that_take_turns(by_lanes: Start, seed: str) -> None:
    by_lanes(3, FAKE_CUDA_JITTER=seed).run(by_turns)


# ---- by name, and by cost ----


def by_planner(way: str, level: str, setting: bool) -> None:
    """Whole numbers have the same sums in any order."""
    rank = Rank("functions")
    rank.device = fd.rank() if way == "auto" else 0
    for planner in PLANNERS if not setting else ("ring",):
        x, on_host = rank.pair(7003, "int32")
        expected, y = rank.host(7003, "int32"), rank.array(7003, "int32")
        fd.all_reduce(on_host.array, out=expected.array)
        named = None if setting else planner
        if level == "canonical" and planner in ("ring", "double_tree"):
            with pytest.raises(fd.InvalidArgument, match="folds in an order that is only same_on"):
                fd.all_reduce(x, out=y, algorithm=named)
            continue
        fd.all_reduce(x, out=y, algorithm=named)
        if way == "staged":
            assert fd.world().last_path not in ("lanes", "step", "spin")
        else:
            went()
        assert y.get() == expected.get(), planner
    rank.end()


@pytest.mark.parametrize(
    ("way", "level", "setting"),
    [
        ("lanes", "canonical", False),
        ("lanes", "fast", False),
        ("auto", "fast", False),
        ("auto", "fast", True),
        ("staged", "fast", False),
        ("step", "canonical", False),
    ],
)
def test_a_schedule_by_its_name(by_lanes: Start, way: str, level: str, setting: bool) -> None:
    """The host runs it, but where kernels may run at once."""
    env = {"FARANDOLE_DEVICE_PATH": way, "FARANDOLE_LEVEL": level}
    if setting:
        env["FARANDOLE_ALGORITHM"] = "ring"
    if way == "auto":
        env["FAKE_CUDA_DEVICES"] = "3"
    by_lanes(3, **env).run(by_planner, "staged" if way == "step" else way, level, setting)


def one_has_its_array_on_the_host() -> None:
    rank = Rank("functions")
    x, on_host = rank.pair(3000, "float32")
    expected = rank.host(3000, "float32")
    fd.all_reduce(on_host.array, out=expected.array)
    for _ in range(2):
        if fd.rank() == 1:
            again = rank.host(3000, "float32")
            fd.all_reduce(on_host.array, out=again.array, algorithm="doubling")
            assert again.get() == expected.get()
            continue
        y = rank.array(3000, "float32")
        fd.all_reduce(x, out=y, algorithm="doubling")
        assert fd.world().last_path != "lanes"
        assert y.get() == expected.get()
    rank.end()


def test_a_schedule_by_name_where_a_rank_has_its_array_on_the_host(by_lanes: Start) -> None:
    by_lanes(2).run(one_has_its_array_on_the_host)


def chosen_by_cost() -> None:
    rank = Rank("functions")
    rank.device = fd.rank()
    for count, way in ((5, "spin"), (30_000, "lanes"), (5, "spin")):
        x, on_host = rank.pair(count, "float32")
        fd.all_reduce(on_host.array, out=on_host.array)
        assert fd.all_reduce(x, out=x).get() == on_host.get()
        went(way)
    rank.end()


def test_where_each_rank_has_a_device(by_steps: Start) -> None:
    """Between what one kernel can hand over and where steps take less time."""
    env = {"FAKE_CUDA_DEVICES": "2", "FARANDOLE_DEVICE_BUCKET_BYTES": "1M"}
    by_steps(2, FARANDOLE_DEVICE_PATH="auto", **env).run(chosen_by_cost)


def refused() -> None:
    rank = Rank()
    x, there = rank.array(40_000, "float32"), np.empty(40_000, np.float32)
    with pytest.raises(fd.InvalidArgument, match="all_reduce cannot go by 'lanes' here: that take"):
        fd.all_reduce(x, out=there, algorithm="lanes")
    with pytest.raises(fd.InvalidArgument, match=r"by 'lanes': takes [0-9]+ bytes at most here"):
        fd.all_gather(x, algorithm="lanes")
    arrays = [rank.array(10, "float32") for _ in range(3)]
    with pytest.raises(fd.InvalidArgument, match="'lanes': takes arrays that travel as one for"):
        fd.grouped_broadcast(arrays, out=arrays, algorithm="lanes")
    fd.all_reduce(x, out=x, algorithm="lanes")
    went()
    rank.end()


def test_what_is_refused(by_steps: Start) -> None:
    by_steps(2).run(refused)


def elsewhere() -> None:
    rank = Rank()
    x = rank.array(10, "float32")
    with pytest.raises(fd.InvalidArgument, match="by 'lanes' here: its ranks are on several hosts"):
        fd.all_reduce(x, out=x, algorithm="lanes")
    rank.end()


def test_between_hosts(by_lanes: Start) -> None:
    by_lanes(2, FARANDOLE_SPLIT_HOSTS="1,1", FARANDOLE_INSECURE="1").run(elsewhere)


# ---- what a device is asked for ----

WAITS_PERHAPS = {*LOADS, "cuMemAlloc", "cuMemHostAlloc"}


def the_first_of_each() -> list[str]:
    rank = Rank("functions")
    arrays = [rank.array(1000, dtype) for dtype in (*DTYPES, "bool")]
    several = [rank.array(100 + i, "uint8") for i in range(6)]
    fd.all_reduce(arrays[0], out=arrays[0], algorithm="step")
    rank.machine.control.clear_log()
    for way in ("step", "spin", "lanes"):
        for x in arrays:
            fd.all_reduce(x, "max", out=x, algorithm=way)
            went(way)
        fd.grouped_all_reduce(several, out=several, algorithm=way)
    log = rank.machine.log()
    rank.end()
    return [call for call in log if call in WAITS_PERHAPS]


def test_nothing_is_loaded_or_allocated_once_there_is_a_bucket(by_lanes: Start) -> None:
    assert by_lanes(2).run(the_first_of_each) == [[], []]


def steady() -> list[str]:
    """The extra calls of a step over more arrays than a rank keeps schedules for."""
    rank = Rank("interface")
    arrays = [rank.array(100 + i, "float32") for i in range(80)]

    def step() -> None:
        for i, x in enumerate(arrays):
            fd.all_reduce(x, out=x)
            if i % 20 == 19:  # what is in flight keeps its schedule
                rank.machine.call("cuStreamSynchronize", rank.machine.streams[0])

    step()
    rank.machine.control.hold(True)  # more is in flight at once than ever afterwards
    handles = [fd.all_reduce(x, out=x, async_op=True) for x in arrays[:40]]
    handles[-1].wait()
    rank.machine.control.hold(False)
    del handles
    step()
    extra = extra_calls(rank, step, 1)
    rank.end()
    return extra


def test_a_steady_step_neither_allocates_nor_waits_for_the_device(by_lanes: Start) -> None:
    for extra in by_lanes(2).run(steady):
        assert extra == ["cuStreamSynchronize"] * 4, "the test's own"
