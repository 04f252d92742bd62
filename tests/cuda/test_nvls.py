"""All-reduces that a switch between the devices folds (NVLS): when they go by it, what they give,
where there is none, and what goes wrong. By ranks over the fake driver, whose switch folds from the
last device to the first."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_device import Array, OnHost, Rank
from fault_work import UNAVAILABLE
from test_device_collectives import LOADS, extra_calls
from test_nccl import small

import farandole as fd
from harness import World

Start = Callable[..., World]

NO_SWITCH = "has no switch that folds (NVLS), or its driver does not show it"


class NvlsRank(Rank):
    """A rank that has a device for itself."""

    def __init__(self, kind: str = "both") -> None:
        super().__init__(kind)
        self.device = fd.rank() % int(os.environ["FAKE_CUDA_DEVICES"])


def went_by(path: str) -> None:
    assert fd.world().last_path == path


def reduced(rank: NvlsRank, op: str, x: Array, hx: OnHost, **options: Any) -> None:
    """The result is the host's, in any order: sums of small numbers are exact."""
    expected = rank.host(x.count, x.dtype)
    fd.all_reduce(hx.array, op, out=expected.array, **options)
    y = rank.array(x.shape, x.dtype)
    fd.all_reduce(x, op, out=y, **options)
    went_by("nvls")
    assert y.get() == expected.get(), (x.dtype, op, options)


def folds(dtype: str) -> None:
    """In several pieces, of which the last one and its parts end within 16 bytes."""
    rank = NvlsRank()
    integer = dtype.startswith(("int", "uint"))
    for count in (1, 7, 50_003):
        for op in ("sum", "min", "max") if integer else ("sum",):
            reduced(rank, op, *small(rank, count, dtype))
        reduced(rank, "sum", *small(rank, count, dtype), prescale=2.0, postscale=4.0)
        if integer or fd.size() in (2, 4):
            reduced(rank, "mean", *small(rank, count, dtype))
    x, hx = small(rank, (3000, 2), dtype)
    fd.all_reduce(hx.array, out=hx.array)
    assert fd.all_reduce(x, out=x).get() == hx.get()
    pairs = [small(rank, count, dtype) for count in (5, 40_000, 1, 0, 13, 7, 200)]
    for _ in range(2):
        fd.grouped_all_reduce([x for x, _ in pairs], out=[x for x, _ in pairs])
        went_by("nvls")
        fd.grouped_all_reduce([h.array for _, h in pairs], out=[h.array for _, h in pairs])
    assert [x.get() for x, _ in pairs] == [h.get() for _, h in pairs]
    rank.end()


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(2, "float32"), (3, "bfloat16"), (2, "float16"), (3, "float64"), (4, "int32"), (2, "uint64"),
     (3, "int64"), (2, "uint32")],
)  # fmt: skip
def test_what_it_folds(by_nvls: Start, size: int, dtype: str) -> None:
    by_nvls(size, FAKE_CUDA_JITTER="3").run(folds, dtype)


def loads_of_other_dtypes() -> list[str]:
    rank = NvlsRank("functions")
    assert path_of(rank.array(9, "float32")) == "nvls"
    rank.machine.control.clear_log()
    for dtype in ("float16", "bfloat16", "float64", "int32", "int64", "uint32", "uint64"):
        assert path_of(rank.array(9, dtype), prescale=2.0) == "nvls"
    log = rank.machine.log()
    rank.end()
    return [call for call in log if call in LOADS]


def test_nothing_is_loaded_once_there_is_a_bucket(by_nvls: Start) -> None:
    assert by_nvls(2).run(loads_of_other_dtypes) == [[], []]


def order_of_its_own() -> None:
    rank = NvlsRank()
    values = np.array([[1e8], [3.0], [-1e8]], np.float32)
    x = rank.array(1, "float32").put(values[fd.rank()].tobytes())
    y = fd.all_reduce(x)
    went_by("nvls")
    assert np.frombuffer(y.get(), np.float32)[0] == (values[2] + values[1] + values[0])[0] == 0
    rank.end()


def test_its_order_of_folds_is_its_own(by_nvls: Start) -> None:
    by_nvls(3).run(order_of_its_own)


def path_of(x: Array, op: str = "sum", **options: Any) -> str:
    fd.all_reduce(x, op, out=x, **options)
    x.get()
    return str(fd.world().last_path)


def elsewhere() -> None:
    """Operations that the switch cannot fold go by steps, in between; by name they are refused."""
    rank = NvlsRank("interface")
    x, hx = small(rank, 40_000, "float32")
    handles = []
    for op in ("sum", "max", "sum", "product"):
        handles.append(fd.all_reduce(x, op, out=x, async_op=True))
        fd.all_reduce(hx.array, op, out=hx.array)
    for handle in handles:
        handle.wait()
    assert x.get() == hx.get()
    for op, dtype in (("max", "float16"), ("sum", "int16"), ("sum", "bool"), ("product", "int32")):
        assert path_of(rank.array(9, dtype), op) == "step"
        why = f"NVLS (has no {op} of|folds no) {dtype}"
        with pytest.raises(fd.InvalidArgument, match=f"cannot go by 'nvls': {why}"):
            fd.all_reduce(rank.array(9, dtype), op, algorithm="nvls")
    fd.all_gather(rank.array(9, "float32"))
    went_by("step")
    with pytest.raises(fd.InvalidArgument, match="cannot go by 'nvls': runs all_reduce alone"):
        fd.reduce(x, out=x, algorithm="nvls")
    del handle, handles
    rank.end()


def test_what_it_does_not_fold(by_nvls: Start) -> None:
    by_nvls(2, FAKE_CUDA_JITTER="11").run(elsewhere)


# ---- when it is taken ----


def levels() -> None:
    rank = NvlsRank()
    large, little = rank.array(300_000, "float32"), rank.array(2, "float32")
    assert path_of(large) == "step", "bits are promised"
    assert rank.machine.calls("cuMulticastAddDevice") == 0
    assert path_of(large, level="fast") == "nvls"
    assert path_of(little, level="fast") == "spin", "as is faster"
    assert path_of(little, level="fast", algorithm="nvls") == "nvls"
    for level in ({}, {"level": "canonical"}):
        with pytest.raises(fd.InvalidArgument, match="'nvls': the switch folds in an order of its"):
            fd.all_reduce(large, out=large, algorithm="nvls", **level)
    del large, little
    rank.end()


def test_level_fast_alone(by_nvls: Start) -> None:
    """From four ranks on a switch spares them what they would send."""
    auto = {"FARANDOLE_DEVICE_PATH": "auto", "FARANDOLE_LEVEL": "canonical"}
    by_nvls(4, FARANDOLE_NCCL="off", **auto).run(levels)


def promised() -> None:
    rank = NvlsRank()
    x = rank.array(10, "float32")
    with pytest.raises(fd.InvalidArgument, match="level 'canonical' promises bits"):
        fd.all_reduce(x, out=x)
    fd.broadcast(x, 0, out=x)
    went_by("step")
    rank.end()


def test_asked_for_where_bits_are_promised(by_nvls: Start) -> None:
    by_nvls(2, FARANDOLE_LEVEL="canonical").run(promised)


def alone() -> None:
    rank = NvlsRank()
    assert path_of(rank.array(3000, "float32")) == "step"
    with pytest.raises(fd.InvalidArgument, match="takes two ranks at least"):
        fd.all_reduce(rank.array(3000, "float32"), algorithm="nvls")
    rank.end()


def test_one_rank(by_nvls: Start) -> None:
    by_nvls(1).run(alone)


# ---- where there is none ----


def memory_of(rank: NvlsRank) -> str:
    """The numbers of modules, mappings, and the memory and addresses that they use."""
    kinds = r"\d+ (?:module|mapping|physical|reservation)"
    return ", ".join(re.findall(kinds, rank.machine.alive()))


def without(why: str, switch: str, fail: tuple[int, str, int] | None) -> int:
    """All ranks go by steps together, and say which rank has none. `switch`: whether each has one;
    `fail`: a call that comes to nothing on a rank."""
    rank = NvlsRank()
    rank.machine.control.configure(b"multicast", switch[fd.rank()].encode())
    x, hx = small(rank, 3000, "float32")
    fd.all_reduce(hx.array, out=hx.array)
    y = rank.array(3000, "float32")

    def come_to_nothing(*, by_opening: bool) -> None:  # of the bucket, which loads all kernels
        if fail and fd.rank() == fail[0] and (fail[1] == "cuModuleLoadDataEx") == by_opening:
            code = 802 if fail[1] == "cuMulticastBindMem" else UNAVAILABLE
            rank.machine.fail(fail[1], fail[2], code)

    come_to_nothing(by_opening=True)
    assert path_of(rank.array(1, "int8")) == "step"
    come_to_nothing(by_opening=False)
    before, held = rank.machine.calls("cuMulticastAddDevice"), memory_of(rank)
    for _ in range(2):
        fd.all_reduce(x, out=y)
        went_by("step")
        assert y.get() == hx.get()
    assert memory_of(rank) == held, "nothing is kept of what came to nothing"
    said = re.escape(f"cannot go by 'nvls': {why}").replace(r"\?", r"\d")
    with pytest.raises(fd.InvalidArgument, match=said):
        fd.all_reduce(x, out=y, algorithm="nvls")
    added = rank.machine.calls("cuMulticastAddDevice") - before
    rank.end()
    return added


# Calls that fail: the rank, the call, its number, and what that rank tried then.
CALLS = [
    (1, "cuModuleLoadDataEx", 2, "load the kernels"),
    (0, "cuMulticastGetGranularity", 1, "ask for the size of pages that devices share"),
    (0, "cuMulticastCreate", 1, "join memory of 2 devices"),
    (0, "cuMemExportToShareableHandle", 1, "let other processes use memory"),
    (1, "cuMemImportFromShareableHandle", 1, "use another process's memory"),
    (1, "cuMulticastGetGranularity", 1, "ask for the size of pages that devices share"),
    (0, "cuMulticastAddDevice", 1, "let the device take part in a multicast object"),
    (1, "cuMulticastAddDevice", 1, "let the device take part in a multicast object"),
    (1, "cuMemCreate", 1, "allocate 2097152 bytes for several processes"),
    (0, "cuMemAddressReserve", 1, "reserve 2097152 bytes of addresses"),
    (1, "cuMemMap", 1, "map 2097152 bytes"),
    (1, "cuMemSetAccess", 1, "get access to mapped memory"),
    (1, "cuMulticastBindMem", 1, "bind memory to a multicast object"),
    (0, "cuMemAddressReserve", 2, "reserve 2097152 bytes of addresses"),
    (0, "cuMemMap", 2, "map 2097152 bytes"),
    (1, "cuMemSetAccess", 2, "get access to mapped memory"),
]


@pytest.mark.drawn(5)
@pytest.mark.parametrize(("rank", "call", "nth", "tried"), CALLS)
def test_a_call_that_comes_to_nothing(
    by_nvls: Start, rank: int, call: str, nth: int, tried: str
) -> None:
    world = by_nvls(2)
    world.run(without, f"rank {rank}: cannot {tried} on device {rank} (Fake GPU): ", "11",
              (rank, call, nth))  # fmt: skip
    assert world.report().count(f"do without NVLS: rank {rank}: cannot {tried}") == 2, "all say it"


WITHOUT: dict[str, tuple[dict[str, str], str, str]] = {
    "one rank has none": ({}, "10", f"rank 1: device 1 (Fake GPU) {NO_SWITCH}"),
    "the first has none": ({}, "01", f"rank 0: device 0 (Fake GPU) {NO_SWITCH}"),
    "a device that ranks share": ({"FAKE_CUDA_DEVICES": "1"}, "11", "rank ?: NVLS takes one rank "
                                  "on a device, and ranks 0-1 share one"),
    "an older device": ({"FAKE_CUDA_CAPABILITY": "80"}, "11", "rank 0: device 0 (Fake GPU) has "
                        "compute capability 8.0, and NVLS takes 9.0"),
    "older handles": ({"FAKE_CUDA_VIRTUAL_MEMORY": "0"}, "11",
                      f"rank 0: device 0 (Fake GPU) {NO_SWITCH}"),
}  # fmt: skip


@pytest.mark.drawn(3)
@pytest.mark.parametrize("what", WITHOUT)
def test_where_there_is_none(by_nvls: Start, what: str) -> None:
    env, switch, why = WITHOUT[what]
    world = by_nvls(2, **env)
    assert world.run(without, why, switch, None) == [0, 0], "nobody joins what some cannot"


# ---- what goes wrong later ----


def reads_late() -> list[str]:
    """After a verdict rank 1's device goes on late, with what it had of the other one's memory."""
    rank = NvlsRank("functions")
    x = rank.array(50_000, "float32")
    assert path_of(x) == "nvls"
    fd.barrier()
    late = fd.rank() == 1
    rank.machine.control.hold(late)

    def reduce() -> None:
        fd.all_reduce(x, out=x, timeout=0.3)
        while True:
            fd.barrier()

    with pytest.raises(fd.Stalled):
        reduce()
    if late:
        time.sleep(1)  # the other one shuts down
        rank.machine.control.hold(False)
    with contextlib.suppress(fd.Error):
        fd.shutdown()
    gc.collect()
    return list(rank.machine.leave())


def test_memory_stays_bound_while_others_may_use_it(by_nvls: Start) -> None:
    assert by_nvls(2).run(reads_late) == [["", ""], ["", ""]]


# ---- what a device is asked for ----


def steady() -> list[str]:
    """In one piece, in several, and of arrays that travel as one."""
    rank = NvlsRank("interface")
    arrays = [(rank.array(n, "float32"), rank.array(n, "float32")) for n in (3, 1000, 40_001)]
    together = [rank.array(100 + i, "float32") for i in range(12)]

    def step() -> None:
        handles = [fd.all_reduce(x, out=y, async_op=True) for x, y in arrays]
        handles.append(fd.grouped_all_reduce(together, out=together, async_op=True))
        for handle in handles:
            handle.wait()
            went_by("nvls")
        rank.machine.call("cuStreamSynchronize", rank.machine.streams[rank.device])

    with rank.machine.on(rank.device):
        step()
        rank.machine.control.hold(True)  # more is in flight at once than ever afterwards
        handles = [fd.all_reduce(x, out=y, async_op=True) for x, y in 4 * arrays]
        handles[-1].wait()
        rank.machine.control.hold(False)
        handles.clear()
        step()
        extra = extra_calls(rank, step, 5)
    rank.end()
    return extra


def test_a_steady_step_neither_allocates_nor_waits_for_the_device(by_nvls: Start) -> None:
    for extra in by_nvls(2).run(steady):
        assert extra == ["cuStreamSynchronize"] * 5, "the test's own, once a step"
