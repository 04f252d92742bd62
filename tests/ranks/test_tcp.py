"""Data over TCP connections (FARANDOLE_TRANSPORT=tcp): the same results, by schedules alone."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from test_collectives import DTYPES, FOLDING, KINDS, check, data, ops_of, reduced

import farandole as fd
from farandole import _core, _world
from grid import combinations
from harness import World, open_files

Spawn = Callable[..., World]
TCP: dict[str, str | None] = {"FARANDOLE_TRANSPORT": "tcp"}
COUNTS = [0, 1, 7, 1001, 70_001, 300_007]  # the last: over 1 MiB in several lanes


# ---- collectives ----


def check_sizes(in_place: bool) -> set[str]:
    fd.init()
    return {
        check(kind, "float32", count, memory=memory, in_place=in_place, root=fd.size() - 1)
        for kind in KINDS
        if not (in_place and kind == "all_to_all")
        for memory in ("caller", "ours")
        for count in COUNTS
    }


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_collectives_and_sizes(spawn: Spawn, size: int) -> None:
    world = spawn(size, env=TCP)
    for in_place in (False, True):
        assert all(paths == {"schedule"} for paths in world.run(check_sizes, in_place))


def check_types() -> None:
    fd.init()
    for dtype in DTYPES:
        for kind in KINDS:
            for op in ops_of(dtype) if kind in FOLDING else ["sum"]:
                check(kind, dtype, 3001, op)


@pytest.mark.parametrize("size", [2, 3])
def test_all_types(spawn: Spawn, size: int) -> None:
    spawn(size, env=TCP).run(check_types)


def sum_of_random_numbers(count: int, level: str) -> bytes:
    fd.init()
    mine = np.random.default_rng(fd.rank()).standard_normal(count).astype(np.float32)
    return bytes(fd.all_reduce(mine, level=level).tobytes())


@pytest.mark.parametrize(("size", "count"), combinations([2, 3, 4], [5, 1001, 300_007]))
def test_the_same_bits_as_over_shared_memory(spawn: Spawn, size: int, count: int) -> None:
    sums = {
        total
        for transport in ("shm", "tcp")
        for total in spawn(size, env={"FARANDOLE_TRANSPORT": transport}).run(
            sum_of_random_numbers, count, "canonical"
        )
    }
    assert len(sums) == 1


# ---- everything else that moves data ----


def many_at_once() -> None:
    fd.init()
    rank, size = fd.rank(), fd.size()
    counts = [1, 100_003, 7, 5000] * 5
    arrays = [np.full(count, rank + 1.0) for count in counts]
    handles = [fd.all_reduce(x, async_op=True) for x in arrays]
    for handle, count in reversed(list(zip(handles, counts, strict=True))):
        total = handle.wait()
        assert (total == np.full(count, size * (size + 1) / 2)).all()
    grouped = fd.grouped_all_reduce(arrays)
    assert all((x == size * (size + 1) / 2).all() for x in grouped)
    fd.barrier()


def groups_side_by_side() -> None:
    fd.init()
    rank, size = fd.rank(), fd.size()
    mine = fd.split(rank % 2)
    members = [r for r in range(size) if r % 2 == rank % 2]
    for i in range(10):
        inputs = [data(i, r, 3001, "int64") for r in range(size)]
        handle = fd.all_reduce(inputs[rank], async_op=True)
        part = fd.all_reduce(inputs[rank], group=mine)
        assert (part == reduced([inputs[r] for r in members], "sum")).all()
        assert (handle.wait() == reduced(inputs, "sum")).all()


def by_name_in_any_order() -> None:
    fd.init()
    rank, size = fd.rank(), fd.size()
    names = _core.names_of(_world.world())
    order = list(range(30))
    np.random.default_rng(rank).shuffle(order)
    arrays = {i: np.full(1 + i * 997, rank + 1, np.int32) for i in order}
    handles = {
        i: names.submit("all_reduce", f"x{i}", [(x, x, x.shape)], result=x)
        for i, x in arrays.items()
    }
    for i in sorted(order):
        assert (_core.wait_by_number(handles[i]) == size * (size + 1) // 2).all()


def messages() -> None:
    fd.init()
    rank, size = fd.rank(), fd.size()
    for count in COUNTS:
        x = data(count, rank, count, "float64")
        sending = fd.send(x, (rank + 1) % size, tag=3, async_op=True)
        left = (rank - 1) % size
        got = np.empty(count)
        assert fd.recv(got, left, tag=3) is got
        assert (got == data(count, left, count, "float64")).all()
        sending.wait()


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    "what", [many_at_once, groups_side_by_side, by_name_in_any_order, messages]
)
def test_what_else_moves_data(spawn: Spawn, what: Callable[[], None], size: int) -> None:
    spawn(size, env=TCP).run(what)


# ---- what is refused ----


def force(algorithm: str) -> tuple[str, str]:
    fd.init()
    with pytest.raises(fd.InvalidArgument) as refused:
        fd.all_reduce(np.ones(3), algorithm=algorithm)
    assert (fd.all_reduce(np.ones(3)) == fd.size()).all()
    return refused.value.verdict, refused.value.advice


@pytest.mark.parametrize("path", [path["name"] for path in _core.tuning.paths()])
def test_a_path_over_shared_memory_is_refused_with_the_reason(spawn: Spawn, path: str) -> None:
    for verdict, advice in spawn(2, env=TCP).run(force, path):
        assert verdict == (
            f"path '{path}' goes over shared memory, and data go over tcp (FARANDOLE_TRANSPORT=tcp)"
        )
        assert "FARANDOLE_TRANSPORT" in advice


def test_ranks_with_different_transports_do_not_meet(spawn: Spawn) -> None:
    world = spawn(2, each=[TCP, {"FARANDOLE_TRANSPORT": "shm"}])
    world.start(fd.init)
    for outcome in world.outcomes():
        assert outcome.error == "RendezvousError", outcome.trace
        values = "tcp on rank 0; shm on rank 1"
        assert outcome.verdict == f"ranks disagree on FARANDOLE_TRANSPORT: {values}"


# ---- what is left behind ----


def again_and_again(times: int) -> list[int]:
    counts = []
    for _ in range(times):
        fd.init()
        x = np.ones(100_003)
        assert (fd.all_reduce(x) == fd.size()).all()
        del x
        fd.shutdown()
        counts.append(open_files())
    return counts


def test_fifty_worlds_leave_no_descriptor(spawn: Spawn) -> None:
    for counts in spawn(2, env=TCP).run(again_and_again, 50):
        assert counts[0] == counts[-1], counts


def listening() -> list[str]:
    """Addresses of this process's sockets that listen, as the kernel writes them."""
    mine = set()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with contextlib.suppress(OSError):  # the listing's own is gone
            mine.add(os.readlink(f"/proc/self/fd/{name}"))  # noqa: PTH115
    rows = [
        row.split()
        for table in map(Path, ("/proc/net/tcp", "/proc/net/tcp6"))
        if table.exists()
        for row in table.read_text().splitlines()[1:]
    ]
    return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine]


def addresses() -> list[str]:
    fd.init()
    fd.barrier()
    return listening()


def test_ranks_listen_on_loopback_and_only_when_told(spawn: Spawn) -> None:
    for found in spawn(2, env=TCP).run(addresses):
        assert len(found) == 1
        assert found[0].partition(":")[0] in ("0100007F", "00000000000000000000000001000000")
    assert spawn(2).run(addresses) == [[], []]


@pytest.mark.parametrize("transport", ["tcp", "mpi"])
def test_why_shows_the_choice(transport: str) -> None:
    rows = _core.tuning.explain("all_reduce", 1 << 20, transport=transport)
    paths = [row for row in rows if row["backend"] == "shm_direct"]
    assert [row["name"] for row in paths] == [row["name"] for row in _core.tuning.paths()]
    assert all(f"FARANDOLE_TRANSPORT={transport}" in row["refusal"] for row in paths)
    chosen = [row for row in rows if row["chosen"]]
    assert len(chosen) == 1
    assert chosen[0]["backend"] == "schedule"
    assert chosen[0]["seconds"] == min(r["seconds"] for r in rows if not r["refusal"])
