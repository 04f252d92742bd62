"""Collectives that go by steps in the devices' streams, by ranks over the fake driver, which runs
the kernels' own source: the bits are the host's, and no host waits for a device."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_device import Rank, WithFunctions, all_come
from test_device_collectives import GROUPED, extra_calls
from test_device_collectives import all_collectives as all_collectives
from test_device_collectives import folds as folds
from test_device_collectives import mixed as mixed

import farandole as fd
import harness
from farandole import cuda
from harness import World

Start = Callable[..., World]


def by(path: str, body: str, *arguments: Any) -> None:
    """A function of this module by its name; and an all-reduce behind it went that way."""
    seen: list[str] = []
    end = Rank.end

    def note(rank: Rank) -> None:
        x = rank.array(7, "int32")
        fd.all_reduce(x, out=x)
        seen.append(fd.world().last_path)
        end(rank)

    Rank.end = note  # type: ignore[method-assign]
    globals()[body](*arguments)
    Rank.end = end  # type: ignore[method-assign]
    assert seen == [path] or (path == "staged" and seen[0] not in ("step", "spin")), seen


@pytest.mark.parametrize(
    ("size", "dtype", "kind"),
    [(2, "float32", "both"), (3, "bfloat16", "dlpack"), (3, "int8", "interface"),
     (2, "bool", "functions"), (1, "float64", "version 1")],
)  # fmt: skip
def test_bits_are_those_of_the_host(by_steps: Start, size: int, dtype: str, kind: str) -> None:
    by_steps(size, FAKE_CUDA_JITTER="3").run(by, "step", "folds", dtype, kind)


@pytest.mark.parametrize("size", [2, 4])
def test_every_collective(by_steps: Start, size: int) -> None:
    """In several pieces."""
    by_steps(size, FAKE_CUDA_JITTER="7").run(by, "step", "all_collectives", 2500)


def at_a_root() -> None:
    """One rank alone has the input, or gets the output, also in unequal shares, of which one is
    empty. Inputs are overwritten after wait(), also by ranks that have no result."""
    rank = Rank("functions")
    p, r, dtype = fd.size(), fd.rank(), "int16"
    counts = [40_000 * i + 3 * (i > 0) for i in range(p)]
    for root in range(p):
        is_root, mine, total = r == root, counts[r], sum(counts)
        x, hx = rank.pair(50_001, dtype)
        share, hshare = rank.pair(mine, dtype)
        whole, hwhole = rank.pair(total, dtype)
        asked: list[tuple[Any, ...]] = [
            ("reduce", x, hx, 50_001 if is_root else 0, {}),
            ("gather", share, hshare, total if is_root else 0, {"counts": counts}),
            ("scatter", whole if is_root else None, hwhole, mine, {"counts": counts}),
        ]
        for kind, source, on_host, length, options in asked:
            expected = rank.host(length, dtype)
            host_source = on_host.array if source is not None else None
            gets = length > 0 or kind == "scatter"
            host_out = expected.array if gets else None
            fd.world().run(kind, host_source, host_out, root=root, **options)
            out = rank.array(length, dtype) if gets else None
            fd.world().run(kind, source, out, root=root, **options)
            assert fd.world().last_path == "step", kind
            if source is not None:
                source.put(bytes(source.nbytes))
            assert out is None or out.get() == expected.get(), kind
    rank.end()


@pytest.mark.parametrize("size", [2, 3])
def test_collectives_with_a_root(by_steps: Start, size: int) -> None:
    by_steps(size, FAKE_CUDA_JITTER="19").run(at_a_root)


# More moves than a table has; one array is too large to travel with others, and one is empty.
TOGETHER = [(3 + i % 40, "int8" if i % 5 else "float32") for i in range(220)]
TOGETHER += [(50_003, "float32"), (0, "float32"), (8000, "float32"), (1, "bool")]


def together(path: str, on_the_host: int, arrays: int) -> None:
    """Operations of a grouped call, of which small arrays travel as one. A rank may have all of its
    arrays on the host."""
    rank = Rank("functions")
    p, r = fd.size(), fd.rank()
    some = TOGETHER[-arrays:]
    pairs = [rank.pair(*array) for array in some]
    for kind, length in GROUPED.items():
        call = getattr(fd, f"grouped_{kind}")
        op = ("max",) if "reduce" in kind else ()
        expected = [rank.host(length(n, p, r), dtype) for n, dtype in some]
        call([h.array for _, h in pairs], *op, out=[e.array for e in expected])
        outs = [rank.array(length(n, p, r), dtype) for n, dtype in some]
        for _ in range(2):
            if r == on_the_host:
                again = [rank.host(length(n, p, r), dtype) for n, dtype in some]
                call([h.array for _, h in pairs], *op, out=[a.array for a in again])
                assert [a.get() for a in again] == [e.get() for e in expected]
                continue
            for out in outs:
                out.put(bytes(out.nbytes))
            rank.machine.control.clear_log()
            call([x for x, _ in pairs], *op, out=outs)
            copies = rank.machine.log().count("cuMemcpyAsync")
            if on_the_host < 0:
                assert fd.world().last_path in ([path] if kind == "all_reduce" else ["step", path])
            if kind == "all_reduce":
                assert copies < 60, "many moves are one kernel"
            assert [out.get() for out in outs] == [e.get() for e in expected], kind
    rank.end()


@pytest.mark.parametrize("size", [2, 3])
def test_many_arrays_in_one_call(by_steps: Start, size: int) -> None:
    by_steps(size, FAKE_CUDA_JITTER="23").run(together, "step", -1, len(TOGETHER))


def pieces_of_many(arrays: int) -> int:
    """How many copies an operation takes whose pieces are eight arrays each, and right sums."""
    rank = Rank("functions")
    pairs = [rank.pair(2000, "float32") for _ in range(arrays)]
    expected = [rank.host(2000, "float32") for _ in pairs]
    fd.grouped_all_reduce([h.array for _, h in pairs], out=[e.array for e in expected])
    fd.grouped_all_reduce([x for x, _ in pairs[:9]], "max", out=[x for x, _ in pairs[:9]])
    for x, on_host in pairs[:9]:
        x.put(on_host.get())
    rank.machine.control.clear_log()
    fd.grouped_all_reduce([x for x, _ in pairs], out=[x for x, _ in pairs])
    copies = rank.machine.log().count("cuMemcpyAsync")
    assert [x.get() for x, _ in pairs] == [e.get() for e in expected]
    rank.end()
    return copies


def test_an_operation_of_more_pieces_than_there_are_tables(by_steps: Start) -> None:
    """Those of its first pieces are used again."""
    assert by_steps(2, FARANDOLE_DEVICE_BUCKET_BYTES="65536").run(pieces_of_many, 640) == [160, 160]


def test_many_arrays_of_which_a_rank_has_its_own_on_the_host(by_steps: Start) -> None:
    by_steps(3).run(together, "step", 1, 20)


def test_many_arrays_by_one_kernel(by_steps: Start) -> None:
    by_steps(2, FARANDOLE_DEVICE_PATH="spin").run(together, "spin", -1, 20)


def test_some_arrays_on_the_host_some_on_devices(by_steps: Start) -> None:
    """The agreement of ranks says where arrays lie, and all ranks go by the host."""
    by_steps(3).run(by, "step", "mixed")


def each_its_own() -> None:
    rank = Rank()
    rank.device = fd.rank()
    for count in (5, 40_000):
        x, on_host = rank.pair(count, "float64")
        expected = rank.host(count, "float64")
        fd.all_reduce(on_host.array, "mean", out=expected.array)
        assert fd.all_reduce(x, "mean", out=x).get() == expected.get()
    rank.end()


def test_each_rank_has_a_device(by_steps: Start) -> None:
    by_steps(2, FAKE_CUDA_DEVICES="2", FAKE_CUDA_JITTER="5").run(by, "step", "each_its_own")


def two_devices() -> None:
    """The group's steps are of one device; what lies on another one goes by the host."""
    rank = Rank()
    for device in (0, 1, 0):
        x = rank.array(3000, "int32", device=device)
        x.put(bytes(range(250)) * 48)
        fd.all_reduce(x, out=rank.array(3000, "int32", device=device))
        assert (fd.world().last_path == "step") == (device == 0)
    fd.all_reduce(x, out=rank.array(3000, "int32", device=1))
    assert fd.world().last_path != "step"
    rank.end()


def test_two_devices_of_one_rank(by_steps: Start) -> None:
    by_steps(2, FAKE_CUDA_DEVICES="2").run(two_devices)


@pytest.mark.parametrize(("size", "dtype"), [(2, "float16"), (3, "uint32")])
def test_one_kernel_on_a_device_that_ranks_share(by_steps: Start, size: int, dtype: str) -> None:
    """Where that is granted; what is too large for it goes by steps."""
    spinning = by_steps(size, FARANDOLE_DEVICE_PATH="spin", FAKE_CUDA_JITTER="9")
    spinning.run(by, "spin", "folds", dtype, "both")


def test_one_kernel_where_each_rank_has_a_device(by_steps: Start) -> None:
    """Without being told: it is predicted to be the fastest."""
    apart = by_steps(2, FARANDOLE_DEVICE_PATH="auto", FAKE_CUDA_DEVICES="2")
    apart.run(by, "spin", "each_its_own")


def chosen_by_cost_and_by_name() -> None:
    rank = Rank()

    def way(count: int, algorithm: str | None = None) -> str:
        x = rank.array(count, "float32")
        fd.all_reduce(x, out=x, algorithm=algorithm)
        x.get()
        path = fd.world().last_path
        return path if path in ("step", "spin") else "staged"

    for _ in range(2):
        assert way(5) == "staged", "no kernel may spin, and steps take longer"
        assert way(2_000_000) == "step"
        assert way(5, "step") == "step"
        assert way(2_000_000, "staged") == "staged"
        assert way(5, "spin") == "spin"
        with pytest.raises(fd.InvalidArgument, match="'spin': takes 16384 bytes at most here"):
            way(2_000_000, "spin")
    x, there = rank.array(10, "float32"), np.empty(10, np.float32)
    with pytest.raises(fd.InvalidArgument, match="all_reduce cannot go by 'step' here"):
        fd.all_reduce(x, out=there, algorithm="step")
    rank.end()


def test_a_way_is_chosen_by_cost_and_by_name(by_steps: Start) -> None:
    by_steps(2, FARANDOLE_DEVICE_PATH="auto").run(chosen_by_cost_and_by_name)


# fmt: off
WITHOUT = {
    "no peer access": {"FAKE_CUDA_PEERS": "0", "FAKE_CUDA_DEVICES": "2"},
    "no memory to share": {
        "FAKE_CUDA_VIRTUAL_MEMORY": "0", "FAKE_CUDA_FAIL": "cuIpcGetMemHandle#1=801",
    },
    "no memory operations": {"FAKE_CUDA_MEMORY_OPERATIONS": "0"},
    "staged": {"FARANDOLE_DEVICE_PATH": "staged"},
    "an algorithm of the host": {"FARANDOLE_ALGORITHM": "cico"},
    "several hosts": {"FARANDOLE_SPLIT_HOSTS": "1,1", "FARANDOLE_INSECURE": "1"},
}
# fmt: on


@pytest.mark.parametrize("what", WITHOUT)
def test_where_there_are_no_steps(by_steps: Start, what: str) -> None:
    body = "each_its_own" if "peer" in what else "mixed"
    by_steps(2, **WITHOUT[what]).run(by, "staged", body)


def one_has_no_bucket(call: str, nth: int) -> list[str]:
    rank = Rank()
    if fd.rank() == 1:
        rank.machine.fail(call, nth, 2)
    x, on_host = rank.pair(20_000, "float32")
    fd.all_reduce(on_host.array, out=on_host.array)
    for _ in range(2):
        y = rank.array(20_000, "float32")
        assert fd.all_reduce(x, out=y).get() == on_host.get()
        assert fd.world().last_path != "step"
    rank.end()
    return []


# Calls that a rank makes for its bucket and for those of others.
NEEDED = [
    "cuModuleLoadDataEx", "cuModuleGetFunction", "cuFuncLoad", "cuFuncGetAttribute",
    "cuFuncGetParamInfo", "cuMemGetAllocationGranularity", "cuMemCreate", "cuMemAddressReserve",
    "cuMemMap", "cuMemSetAccess", "cuMemExportToShareableHandle", "cuMemsetD8Async",
    "cuStreamWaitValue32", "cuMemImportFromShareableHandle",
]  # fmt: skip


@pytest.mark.parametrize("call", NEEDED)
def test_a_rank_without_a_bucket(by_steps: Start, call: str) -> None:
    """Then all go by the host, and nothing is left of those that were made."""
    by_steps(2).run(one_has_no_bucket, call, 1)


def test_a_kernel_waits_where_streams_cannot(by_steps: Start) -> None:
    """On devices that ranks do not share."""
    without = {"FAKE_CUDA_MEMORY_OPERATIONS": "0", "FAKE_CUDA_DEVICES": "3"}
    apart = by_steps(3, **without, FAKE_CUDA_JITTER="27")
    apart.run(by, "step", "each_its_own")


def one_cannot_write_words(code: int) -> int:
    """Rank 1's driver refuses words of another rank's memory. How many words' calls it has made."""
    rank = Rank()
    rank.device = fd.rank()
    if fd.rank() == 1:
        rank.machine.fail("cuStreamBatchMemOp", 2, code)  # the first one is of its own memory
    x, on_host = rank.pair(40_000, "float32")
    fd.all_reduce(on_host.array, out=on_host.array)
    assert fd.all_reduce(x, out=x).get() == on_host.get()
    assert fd.world().last_path == "step"
    words = rank.machine.calls("cuStreamBatchMemOp")
    rank.end()
    return words


@pytest.mark.parametrize("code", [1, 101, 801])
def test_a_kernel_writes_where_streams_cannot(by_steps: Start, code: int) -> None:
    """Whatever the driver says to refuse it."""
    env = {"FAKE_CUDA_DEVICES": "2", "FARANDOLE_LOG": "info"}
    world = by_steps(2, **env)
    by_words, by_kernel = world.run(one_cannot_write_words, code)
    assert by_words > by_kernel == 2
    said = "info: the driver lets no stream write to other ranks' memory: kernels do so"
    assert [said in world.output(rank) for rank in range(2)] == [False, True]


def sees_its_own_device(out_of_reach: str = "") -> tuple[list[str], str]:
    """As launchers leave it. The ways that were gone; why steps cannot be, where they cannot."""
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["RANK"]
    if os.environ["RANK"] == out_of_reach:
        os.environ["FAKE_CUDA_PEERS"] = "0"
    rank, ways, why = Rank(), [], ""
    assert len(cuda.devices()) == 1
    for count in (5, 40_001):
        x, on_host = rank.pair(count, "float32")
        fd.all_reduce(on_host.array, out=on_host.array)
        for _ in range(2):
            y = rank.array(count, "float32")
            assert fd.all_reduce(x, out=y).get() == on_host.get()
            ways.append(fd.world().last_path)
    try:
        fd.all_reduce(x, out=y, algorithm="step")
    except fd.InvalidArgument as error:
        why = str(error)
    rank.end()
    return ways, why


# The paths of small arrays, and of larger ones.
ALONE = {"step": ("step", "step"), "spin": ("spin", "step"), "lanes": ("lanes", "lanes")}


@pytest.mark.parametrize("path", ALONE)
@pytest.mark.parametrize("virtual_memory", ["1", "0"])
def test_each_rank_sees_its_own_device_alone(
    by_steps: Start, path: str, virtual_memory: str
) -> None:
    small, large = ALONE[path]
    env = {"FAKE_CUDA_DEVICES": "2", "FAKE_CUDA_VIRTUAL_MEMORY": virtual_memory}
    for ways, why in by_steps(2, FARANDOLE_DEVICE_PATH=path, **env).run(sees_its_own_device):
        assert why == ""
        assert ways == [small, small, large, large]


@pytest.mark.parametrize("virtual_memory", ["1", "0"])
def test_a_device_that_is_not_seen_is_out_of_reach(by_steps: Start, virtual_memory: str) -> None:
    """One rank's device is enough: then all go by the host, and learn why."""
    env = {"FAKE_CUDA_DEVICES": "3", "FAKE_CUDA_VIRTUAL_MEMORY": virtual_memory}
    for ways, why in by_steps(3, **env).run(sees_its_own_device, "1"):
        assert "step" not in ways
        assert "rank 1: this process does not see GPU-fafafafa-fafa-fafa-fafa-fafafafafa00" in why


# ---- by the older handles, whose owners must be the last to let go ----

OLDER = {"FAKE_CUDA_VIRTUAL_MEMORY": "0"}


def test_every_collective_by_older_handles(by_steps: Start) -> None:
    by_steps(3, **OLDER, FAKE_CUDA_JITTER="21").run(by, "step", "all_collectives", 2500)


def test_each_rank_has_a_device_by_older_handles(by_steps: Start) -> None:
    by_steps(2, **OLDER, FAKE_CUDA_DEVICES="2").run(by, "step", "each_its_own")


def test_groups_that_come_and_go_by_older_handles(by_steps: Start) -> None:
    by_steps(2, **OLDER).run(groups)


def test_a_rank_that_cannot_open_an_older_handle(by_steps: Start) -> None:
    by_steps(3, **OLDER).run(one_has_no_bucket, "cuIpcOpenMemHandle", 1)


def one_has_older_handles_alone() -> None:
    """The others open its handles, but it cannot map theirs."""
    rank = Rank()
    if fd.rank() == 1:
        rank.machine.control.configure(b"virtual_memory", b"0")
    x, on_host = rank.pair(5000, "float32")
    fd.all_reduce(on_host.array, out=on_host.array)
    for _ in range(2):
        y = rank.array(5000, "float32")
        assert fd.all_reduce(x, out=y).get() == on_host.get()
        assert fd.world().last_path != "step"
    rank.end()


def test_one_rank_has_older_handles_alone(by_steps: Start) -> None:
    by_steps(3).run(one_has_older_handles_alone)


def ends_before_the_others() -> None:
    """Memory that others have open stays until they end; a later lookup does not find it."""
    rank = Rank()

    def add() -> None:
        x, on_host = rank.pair(5000, "float32")
        fd.all_reduce(on_host.array, out=on_host.array)
        assert fd.all_reduce(x, out=x).get() == on_host.get()
        assert fd.world().last_path == "step"

    def allocations() -> int:
        return int(rank.machine.alive().split(" allocation")[0].split()[-1])

    add()
    before, me = allocations(), fd.rank()
    if me == 1:
        harness.listen()
    fd.shutdown()
    assert (allocations() < before) == (me == 1)
    harness.tell("ended")
    harness.listen()
    fd.init()
    add()
    rank.end()


def test_a_rank_that_ends_before_the_others(by_steps: Start) -> None:
    world = by_steps(2, **OLDER)
    world.start(ends_before_the_others)
    world.hear(0)
    world.say(1, "rank 0 has ended")
    world.hear(1)
    for rank in range(2):
        world.say(rank, "go on")
    assert [o.error for o in world.outcomes()] == [None, None], world.report()


# ---- in flight ----


def in_flight(how_many: int) -> None:
    """Complete on the host once all ranks have launched their steps, in whatever order devices come
    by."""
    rank = Rank("functions")
    pairs = [rank.pair(1 + 4001 * i, "float32") for i in range(how_many)]
    expected = [rank.host(x.count, "float32") for x, _ in pairs]
    for (_, on_host), result in zip(pairs, expected, strict=True):
        fd.all_reduce(on_host.array, out=result.array)
    fd.all_reduce(rank.array(1, "float32"))
    rank.machine.control.hold(True)
    handles = [fd.all_reduce(x, out=x, async_op=True) for x, _ in pairs]
    handles[0].wait()  # which the device does not keep
    rank.machine.control.hold(False)
    all_come(handles, [x for x, _ in pairs], expected)
    rank.end()


def test_many_in_flight(by_steps: Start) -> None:
    by_steps(3, FAKE_CUDA_JITTER="11").run(in_flight, 9)


def bells(how_many: int) -> tuple[int, int]:
    """How often the driver was asked to wake this rank: while it sleeps, and in all."""
    rank = Rank("functions")
    x, _ = rank.pair(1000, "float32")
    y = rank.array(1000, "float32")
    fd.all_reduce(x, out=y)
    y.get()
    time.sleep(0.1)
    rank.machine.control.hold(True)
    rank.machine.control.clear_log()
    for _ in range(how_many):
        fd.all_reduce(x, out=y)
    time.sleep(0.3)
    asleep = rank.machine.calls("cuLaunchHostFunc")
    rank.machine.control.hold(False)
    y.get()
    time.sleep(0.1)
    in_all = rank.machine.calls("cuLaunchHostFunc")
    rank.end()
    return asleep, in_all


def test_a_rank_that_sleeps_is_woken_by_the_oldest_of_its_operations(by_steps: Start) -> None:
    for asleep, in_all in by_steps(2).run(bells, 3):
        assert asleep == 1
        assert in_all <= 3


def calls_of_a_one_shot() -> list[str]:
    """The driver calls of a one-shot that follows others, after its arrays were looked up."""
    rank = Rank("functions")
    x, _ = rank.pair(1000, "float32")
    y = rank.array(1000, "float32")
    for _ in range(3):
        fd.all_reduce(x, out=y)
    y.get()
    time.sleep(0.1)  # nothing more is asked for their sake
    rank.machine.control.clear_log()
    fd.all_reduce(x, out=y)
    log = rank.machine.log()
    assert fd.world().last_path == "spin"
    rank.end()
    looked = len(log) - log[::-1].index("cuPointerGetAttribute")
    return [call for call in log[looked:] if not call.startswith(("cuCtx", "cuStreamIs"))]


def test_a_one_shot_makes_four_calls_of_the_driver(by_steps: Start) -> None:
    """It tells of its end itself. The last call is for the owner's stream."""
    of_it = ["cuEventRecord", "cuStreamWaitEvent", "cuLaunchKernel", "cuEventRecord"]
    for calls in by_steps(2, FARANDOLE_DEVICE_PATH="spin").run(calls_of_a_one_shot):
        assert calls == [*of_it, "cuStreamWaitEvent"]


def a_bell_fails() -> None:
    rank = Rank("functions")
    x, on_host = rank.pair(1000, "float32")
    expected = rank.host(1000, "float32")
    fd.all_reduce(on_host.array, out=expected.array)
    fd.all_reduce(x, out=x)
    x.get()
    rank.machine.fail("cuLaunchHostFunc", 1, 1)
    for _ in range(3):
        y = rank.array(1000, "float32").put(on_host.get())
        fd.barrier()
        rank.machine.control.hold(True)
        fd.all_reduce(y, out=y)
        time.sleep(0.1)
        rank.machine.control.hold(False)
        assert y.get() == expected.get()
    assert rank.machine.calls("cuLaunchHostFunc") > 0
    rank.end()


def test_a_rank_that_nothing_wakes_looks_by_itself(by_steps: Start) -> None:
    by_steps(2).run(a_bell_fails)


def waits_elsewhere(rounds: int) -> None:
    """In another stream than that of the call; contents change in the owner's own, without a wait
    on the host."""
    rank = Rank("functions")
    x, on_host = rank.pair(30_000, "float32")
    expected = rank.host(30_000, "float32")
    fd.all_reduce(on_host.array, out=expected.array)
    first = x.stream
    for _ in range(rounds):
        y = rank.array(30_000, "float32")
        y.stream = rank.machine.made("cuStreamCreateWithPriority", 1, 0)
        handle = fd.all_reduce(x, out=y, async_op=True)
        WithFunctions.current = y.stream
        assert handle.wait() is y
        y.look()
        assert y.read() == expected.get()
        rank.machine.call("cuStreamDestroy_v2", y.stream)
        WithFunctions.current = first
    del handle
    rank.end()


def test_the_stream_that_is_current_in_wait(by_steps: Start) -> None:
    by_steps(2, FAKE_CUDA_JITTER="13").run(waits_elsewhere, 6)


def one_after_the_other() -> None:
    """Each operation takes the result of the one before it, without a wait between them."""
    rank = Rank("interface")
    x, on_host = rank.pair(40_000, "int64")
    handles = [fd.all_reduce(x, out=x, async_op=True) for _ in range(4)]
    for handle in handles:
        fd.all_reduce(on_host.array, out=on_host.array)
        handle.wait()
    assert x.get() == on_host.get()
    del handle, handles
    rank.end()


def test_operations_come_one_after_the_other(by_steps: Start) -> None:
    by_steps(2, FAKE_CUDA_JITTER="17").run(one_after_the_other)


def steady() -> list[str]:
    rank = Rank("interface")
    arrays = [(rank.array(n, "float32"), rank.array(n, "float32")) for n in (3, 1000, 40_001)]
    gathered = [(x, rank.array(fd.size() * x.count, "float32")) for x, _ in arrays]
    small = [rank.array(100 + i, "float32") for i in range(12)]

    def step() -> None:
        handles = [fd.all_reduce(x, out=y, async_op=True) for x, y in arrays]
        handles += [fd.all_gather(x, out=all_of_it, async_op=True) for x, all_of_it in gathered]
        handles.append(fd.grouped_all_reduce(small, out=small, async_op=True))
        for handle in handles:
            handle.wait()
        rank.machine.call("cuStreamSynchronize", rank.machine.streams[0])

    step()
    rank.machine.control.hold(True)  # more is in flight at once than ever afterwards
    handles = [fd.all_reduce(x, out=y, async_op=True) for x, y in 4 * arrays]
    handles[-1].wait()
    rank.machine.control.hold(False)
    del handles
    step()
    extra = extra_calls(rank, step, 8)
    rank.end()
    return extra


def test_a_steady_step_neither_allocates_nor_waits_for_the_device(by_steps: Start) -> None:
    for extra in by_steps(2).run(steady):
        assert extra == ["cuStreamSynchronize"] * 8, "the test's own, once a step"


def groups() -> None:
    """Each has a bucket of its own, which goes with it."""
    rank = Rank()
    x, on_host = rank.pair(1000, "float32")
    fd.all_reduce(x, out=rank.array(1000, "float32"))
    world = rank.machine.alive()
    expected = rank.host(1000, "float32")
    for _ in range(2):
        group = fd.split(0)
        fd.all_reduce(on_host.array, out=expected.array, group=group)
        y = rank.array(1000, "float32")
        assert fd.all_reduce(x, out=y, group=group).get() == expected.get()
        del group

    def gone() -> bool:
        here = rank.machine.alive().split(",")[1] == world.split(",")[1]
        return bool(fd.all_reduce(np.array([here]), "min")[0])

    harness.wait_until(gone, "the streams of groups that are gone")
    rank.end()


def test_groups_that_come_and_go(by_steps: Start) -> None:
    by_steps(2).run(groups)


def leaves_early() -> None:
    """While a function of Python's is in the stream that the last operation waits for."""
    rank = Rank("interface")
    x, _ = rank.pair(50_000, "float32")
    y = rank.array(50_000, "float32")
    fd.all_reduce(x, out=y)
    y.get()
    slow = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: time.sleep(0.2))
    rank.machine.call("cuLaunchHostFunc", rank.machine.streams[rank.device], slow, None)
    fd.all_reduce(x, out=y)
    rank.end()


def test_who_ends_a_world_leaves_its_streams_the_interpreter(by_steps: Start) -> None:
    by_steps(2).run(leaves_early)


def ways(count: int) -> str:
    rank = Rank()
    x, y = rank.array(count, "float32"), rank.array(count, "float32")
    for _ in range(2):
        fd.all_reduce(x, out=y)
    path = fd.world().last_path
    rank.end()
    return path


@pytest.mark.parametrize(("mps", "goes_there"), [("0", False), ("1", True)])
def test_ranks_that_take_turns_on_a_device_go_by_the_host(
    by_steps: Start, mps: str, goes_there: bool
) -> None:
    """Where nobody asks for steps: each meeting would cost slices of the device's time."""
    env = {"FARANDOLE_DEVICE_PATH": "auto", "FAKE_CUDA_MPS": mps}
    paths = by_steps(2, **env, FARANDOLE_DEVICE_BUCKET_BYTES="4194304").run(ways, 1 << 20)
    assert [path == "step" for path in paths] == [goes_there] * 2, paths
