"""Shares that differ between ranks: given as counts, zeros among them, or found out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import farandole as fd
from core_testing import testing
from harness import World

WORLDS = [1, 2, 3, 5, 8]
PATHS = ["ll", "one_shot", "cico"]
LARGEST = [0, 1, 7, 700, 40_000]  # rows: all paths
MOST = testing.limits()  # bytes of the longest input

Array = np.ndarray[Any, np.dtype[Any]]


def counts_for(seed: int, size: int, largest: int) -> list[int]:
    """One count of 0 and one of `largest` where there is room for both."""
    counts = np.random.default_rng(seed).integers(0, largest + 1, size)
    counts[seed % size] = largest
    if size > 1:
        counts[(seed + 1) % size] = 0
    return [int(n) for n in counts]


def rows(rank: int, count: int, dtype: str = "int32") -> Array:
    """Two columns, different on every rank."""
    return ((np.arange(count * 2).reshape(count, 2) * 7 + rank * 13) % 10).astype(dtype)


def place(array: Array, memory: str) -> Array:
    if memory == "caller" or (memory == "mixed" and fd.rank() % 2):
        return array.copy()
    there = fd.allocate(array.shape, array.dtype)
    there[...] = array
    return there


def same(found: Any, wanted: Array, case: Any) -> None:
    assert found.shape == wanted.shape, case
    assert (found == wanted).all(), case


def check_uneven(largest: int, memory: str, dtype: str, algorithm: str | None) -> None:
    rank, size = fd.rank(), fd.size()
    counts = counts_for(largest, size, largest)
    if algorithm and sum(counts) * 2 * np.dtype(dtype).itemsize > MOST.get(algorithm, 1 << 40):
        return
    case = (largest, memory, dtype, algorithm, counts)
    options: Any = {"counts": counts, "algorithm": algorithm, "timeout": 20}
    begins = np.concatenate([[0], np.cumsum(counts)]).tolist()
    own = slice(begins[rank], begins[rank + 1])
    mine = place(rows(rank, counts[rank], dtype), memory)
    joined = np.concatenate([rows(r, counts[r], dtype) for r in range(size)])
    same(fd.all_gather(mine, **options), joined, case)
    whole = place(np.zeros_like(joined), memory)
    whole[own] = mine
    assert fd.all_gather(whole[own], out=whole, **options) is whole
    same(whole, joined, ("in place", case))
    stack = [rows(r, sum(counts), dtype) for r in range(size)]
    total = np.sum(stack, axis=0, dtype=dtype)
    same(fd.reduce_scatter(place(stack[rank], memory), **options), total[own], case)
    for root in {0, size - 1}:
        gathered = fd.gather(mine, root, **options)
        if rank == root:
            same(gathered, joined, case)
        else:
            assert gathered is None
        x = place(joined, memory) if rank == root else None
        out = np.zeros((counts[rank], 2), dtype)
        same(fd.scatter(x, root, out=out, **options), joined[own], case)
        del options["algorithm"]
        same(fd.scatter(x, root, counts=counts), joined[own], case)
        options["algorithm"] = algorithm
    check_blocks(case, memory, dtype, algorithm)


def check_blocks(case: Any, memory: str, dtype: str, algorithm: str | None) -> None:
    rank, size = fd.rank(), fd.size()
    table = [counts_for(case[0] + 3 * r, size, case[0]) for r in range(size)]
    longest = max(sum(row) for row in table) * 2 * np.dtype(dtype).itemsize
    if algorithm and longest > MOST.get(algorithm, 1 << 40):
        return
    inputs = [rows(r, sum(table[r]), dtype) for r in range(size)]
    blocks = [np.split(inputs[r], np.cumsum(table[r])[:-1])[rank] for r in range(size)]
    found, received = fd.all_to_all(
        place(inputs[rank], memory), table[rank], algorithm=algorithm, timeout=20
    )
    assert received == [row[rank] for row in table]
    same(found, np.concatenate(blocks), (case, table))


def check_all(memory: str) -> None:
    fd.init()
    for largest in LARGEST:
        for algorithm in [None, *PATHS]:
            check_uneven(largest, memory, "int32", algorithm)
    for dtype in ("float16", "float64", "int8", "bool"):
        check_uneven(700, memory, dtype, None)


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("memory", ["caller", "ours", "mixed"])
def test_uneven_shares(standing: Callable[[int], World], size: int, memory: str) -> None:
    standing(size).run(check_all, memory)


def exchanged() -> None:
    fd.init()
    rank, size = fd.rank(), fd.size()
    mine = rows(rank, rank)
    joined = np.concatenate([rows(r, r) for r in range(size)])
    same(fd.all_gather(mine, uneven=True), joined, "all_gather")
    handle = fd.all_gather(mine, uneven=True, async_op=True)
    same(handle.wait(), joined, "async")
    gathered = fd.gather(mine, size - 1, uneven=True)
    assert (gathered is None) == (rank != size - 1)
    if gathered is not None:
        same(gathered, joined, "gather")
    found, received = fd.all_to_all(mine, [rank] + [0] * (size - 1), async_op=True).wait()
    same(found, joined if rank == 0 else np.empty((0, 2), np.int32), "all_to_all")
    assert received == ([*range(size)] if rank == 0 else [0] * size)
    for dtype in ("float32", "int16", "bool"):
        x = np.ones((size * 2, 3, 1), dtype) if rank == size - 1 else None
        part = fd.scatter(x, size - 1)
        assert part.shape == (2, 3, 1)
        assert part.dtype == dtype
        assert part.all()
    handle = fd.scatter(np.arange(size) if rank == 0 else None, async_op=True)
    assert handle.wait().tolist() == [rank]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_counts_found_out(standing: Callable[[int], World], size: int) -> None:
    standing(size).run(exchanged)


def refused() -> None:
    """On every rank, before anything is sent."""
    fd.init()
    size = fd.size()
    bad: list[tuple[str, Callable[[], Any]]] = [
        ("it has 2", lambda: fd.all_gather(np.ones(2), counts=[3] * size)),
        ("one number of rows", lambda: fd.all_gather(np.ones(2), counts=[2])),
        ("one number of rows", lambda: fd.gather(np.ones(2), counts=[-1] * size)),
        ("not a sequence", lambda: fd.reduce_scatter(np.ones(2), counts=[0.5] * size)),  # type: ignore[list-item]
        ("needs", lambda: fd.reduce_scatter(np.ones(size + 1), counts=[1] * size)),
        ("equal blocks", lambda: fd.all_to_all(np.ones(size + 1))),
        ("first dimension", lambda: fd.all_to_all(np.float32(1))),
        ("take", lambda: fd.all_to_all(np.ones(1), [2] * size)),
        ("is not a rank", lambda: fd.reduce(np.ones(2), root=size)),
        ("is not a rank", lambda: fd.gather(np.ones(2), root=-1)),
        ("is not a rank", lambda: fd.scatter(np.ones(2), root=size)),
    ]
    for words, call in bad:
        with pytest.raises(fd.InvalidArgument, match=words):
            call()
    x = np.ones(2 * size)
    with pytest.raises(fd.InvalidArgument, match="in place"):
        fd.all_to_all(x, out=x)
    with pytest.raises(fd.InvalidArgument, match=r"equal parts|its own error"):
        fd.scatter(np.ones(size + 1) if fd.rank() == 0 else None)
    with pytest.raises(fd.InvalidArgument, match=r"needs out=|its own error"):
        fd.scatter(np.array(["a"] * size) if fd.rank() == 0 else None)
    fd.barrier()


@pytest.mark.parametrize("size", [2, 3])
def test_what_makes_no_sense_is_refused(standing: Callable[[int], World], size: int) -> None:
    standing(size).run(refused)
