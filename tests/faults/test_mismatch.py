"""Ranks that submit different things: every rank is told who gave what, and the group lives on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import farandole as fd
from grid import combinations
from harness import World

SIZES = [2, 3]
COUNTS = [8, 3000, 200_000]  # ll, one_shot, cico

# field, what rank 1 submits instead, and the values as they are reported
DIFFERENCES: dict[str, tuple[dict[str, Any], str, str]] = {
    "operation": ({"kind": "all_gather"}, "all_reduce", "all_gather"),
    "dtype": ({"dtype": "int64"}, "float64", "int64"),
    "count": ({"more": 1}, "{count}", "{count+1}"),
    "op": ({"op": "max"}, "sum", "max"),
    "prescale": ({"prescale": 0.5}, "1", "0.5"),
    "postscale": ({"postscale": 2.0}, "1", "2"),
    "level": ({"level": "fast"}, "canonical", "fast"),
    "algorithm": ({"algorithm": "direct"}, "", "direct"),
    "name": ({"name": "other"}, "grad", "other"),
}
FOLDING = ["all_reduce", "reduce_scatter", "reduce"]
ROOTED = ["broadcast", "reduce", "gather", "scatter"]
KINDS = ["all_reduce", "reduce_scatter", "all_gather", *ROOTED, "all_to_all"]
HAVE_DIRECT = ["all_reduce", "reduce_scatter", "all_gather"]  # a planner of that name


def submit(kind: str, count: int, how: dict[str, Any], ours: bool) -> None:
    options = {"name": "grad", **how}
    dtype = options.pop("dtype", "float64")
    count += options.pop("more", 0)
    kind = options.pop("kind", kind)
    make = fd.allocate if ours else np.zeros
    if kind == "scatter":
        options["out"] = make(count, dtype)
    x = make(count * fd.size() if kind in ("scatter", "all_to_all") else count, dtype)
    getattr(fd, kind)(x, **options)


def disagree(kind: str, count: int, field: str, how: dict[str, Any], ours: bool) -> Any:
    fd.init()
    rank = fd.rank()
    with pytest.raises(fd.Mismatch) as mismatch:
        submit(kind, count, how if rank == 1 else {}, ours)
    error = mismatch.value
    assert error.field == field, str(error)
    assert (fd.all_reduce(np.ones(count)) == fd.size()).all(), "the group lives"
    fd.barrier()
    return error.verdict, error.values, error.evidence, error.advice


def allowed(kind: str, field: str) -> bool:
    if field in ("op", "prescale", "postscale", "level"):
        return kind in FOLDING
    return not (field == "operation" and kind == "all_gather")


@pytest.mark.parametrize(("size", "count", "field"), combinations(SIZES, COUNTS, [*DIFFERENCES]))
def test_every_field_of_every_operation(
    standing: Callable[[int], World], size: int, count: int, field: str
) -> None:
    world = standing(size)
    how, common, other = DIFFERENCES[field]
    for kind in KINDS:
        if not allowed(kind, field):
            continue
        if field == "algorithm" and kind not in HAVE_DIRECT:
            how, other = {"algorithm": "cico"}, "cico"
        for ours in (False, True):
            verdicts = world.run(disagree, kind, count, field, how, ours)
            assert len({str(v) for v in verdicts}) == 1, "the same words on every rank"
            _, values, *_ = verdicts[0]
            mine = kind if field == "operation" else common
            expected = {
                mine.replace("{count}", str(count)): [r for r in range(size) if r != 1],
                other.replace("{count+1}", str(count + 1)): [1],
            }
            assert values == expected


def different_roots(kind: str) -> dict[str, list[int]]:
    fd.init()
    options = {"out": np.zeros(10_000)} if kind == "scatter" else {}
    x = np.zeros(10_000 * (fd.size() if kind == "scatter" else 1))
    with pytest.raises(fd.Mismatch) as mismatch:
        getattr(fd, kind)(x, root=fd.rank() % 2, **options)
    assert mismatch.value.field == "root"
    return dict(mismatch.value.values)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ROOTED)
def test_roots(standing: Callable[[int], World], size: int, kind: str) -> None:
    values = standing(size).run(different_roots, kind)[0]
    assert values == {"0": list(range(0, size, 2)), "1": list(range(1, size, 2))}


def different_counts(kind: str, rows: int, even: bool) -> dict[str, list[int]]:
    """Rank 1 believes the last rank's share to be a row longer, or all shares to be equal."""
    fd.init()
    rank, size = fd.rank(), fd.size()
    counts = [rows] * (size - 1) + [rows + (rank == 1 and not even)]
    options: dict[str, Any] = {} if even and rank == 1 else {"counts": counts}
    x = np.zeros(sum(counts) if kind in ("reduce_scatter", "scatter") else counts[rank])
    if kind == "scatter":
        options["out"] = np.zeros(counts[rank])
    with pytest.raises(fd.Mismatch) as mismatch:
        getattr(fd, kind)(x, **options)
    assert mismatch.value.field == "counts", str(mismatch.value)
    assert fd.all_reduce(1) == size, "the group lives"
    return dict(mismatch.value.values)


@pytest.mark.parametrize("rows", [5, 30_000])
@pytest.mark.parametrize("kind", ["all_gather", "gather", "reduce_scatter", "scatter"])
def test_counts(standing: Callable[[int], World], kind: str, rows: int) -> None:
    values = standing(3).run(different_counts, kind, rows, False)[2]
    assert values == {f"{rows}, {rows}, {rows}": [0, 2], f"{rows}, {rows}, {rows + 1}": [1]}
    values = standing(3).run(different_counts, kind, rows, True)[0]
    assert values == {f"{rows}, {rows}, {rows}": [0, 2], "": [1]}


def long_counts() -> dict[str, list[int]]:
    """Too many to be shown, and different only at their end."""
    fd.init()
    rank, size = fd.rank(), fd.size()
    counts = [1] * (size * size)
    counts[-1] += rank == 0
    group = fd.world()
    mine = [sum(counts[rank * size :][:size]), sum(counts[rank::size])]
    with pytest.raises(fd.Mismatch) as mismatch:
        group.run("all_to_all", np.zeros(mine[0]), np.zeros(mine[1]), counts=counts)
    return dict(mismatch.value.values)


def test_counts_too_many_to_be_shown(standing: Callable[[int], World]) -> None:
    values = standing(8).run(long_counts)[0]
    assert sorted(values.values()) == [[0], [1, 2, 3, 4, 5, 6, 7]]
    for text in values:
        assert text.startswith("1, 1, 1")
        assert "… (hash " in text
        assert len(text) < 96


PAIRS: dict[str, dict[str, Any]] = {
    "count": {"count": 6},
    "dtype": {"dtype": "int32"},
    "name": {"name": "other"},
}


def different_pair(count: int, field: str) -> str:
    fd.init()
    rank = fd.rank()
    how: dict[str, Any] = {"count": count, "dtype": "float64", "name": "activations"}
    if rank == 1:
        how |= PAIRS[field]
    x = np.zeros(how["count"], how["dtype"])
    verdict = ""
    if rank < 2:
        meet = fd.send if rank == 0 else fd.recv
        with pytest.raises(fd.Mismatch) as mismatch:
            meet(x, 1 - rank, tag=5, name=how["name"])
        assert mismatch.value.field == field
        verdict = mismatch.value.verdict
        if rank == 0:
            fd.send(np.ones(3), 1, tag=5)
        else:
            assert fd.recv(np.zeros(3), 0, tag=5).all(), "the channel lives"
    assert fd.all_reduce(1) == fd.size(), "the group lives"
    return verdict


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("field", PAIRS)
def test_the_two_ends_of_a_message(
    standing: Callable[[int], World], count: int, field: str
) -> None:
    verdicts = standing(3).run(different_pair, count, field)
    assert verdicts[0] == verdicts[1]
    assert verdicts[0].startswith(f"ranks disagree on the {field} of send 'activations'")


def barrier_against_reduce() -> str:
    fd.init()
    mine = fd.barrier if fd.rank() == 0 else lambda: fd.all_reduce(np.ones(3))
    with pytest.raises(fd.Mismatch) as mismatch:
        mine()
    fd.barrier()
    return str(mismatch.value.field)


def test_a_barrier_is_not_a_reduction(standing: Callable[[int], World]) -> None:
    assert standing(3).run(barrier_against_reduce) == ["operation"] * 3


def split_against_reduce() -> str:
    fd.init()
    mine = (lambda: fd.split(0)) if fd.rank() == 0 else (lambda: fd.all_reduce(np.ones(3)))
    with pytest.raises(fd.Mismatch) as mismatch:
        mine()
    fd.barrier()
    return str(mismatch.value.verdict)


def test_a_split_is_not_a_reduction(standing: Callable[[int], World]) -> None:
    assert "'split'" in standing(2).run(split_against_reduce)[0]


def window_for_some() -> None:
    """Where a buffer lies is not known to the others: the refusal is the same on all ranks."""
    fd.init()
    x = fd.allocate(50_000) if fd.rank() == 0 else np.ones(50_000, np.float32)
    with pytest.raises(fd.InvalidArgument, match="mapped"):
        fd.all_reduce(x, out=x, algorithm="mapped")
    fd.barrier()


def test_a_forced_window_over_foreign_memory(standing: Callable[[int], World]) -> None:
    standing(3).run(window_for_some)


def in_flight_together() -> list[str]:
    fd.init()
    handles = [
        fd.all_reduce(np.ones(5000), name=f"{i}" if i != 3 or fd.rank() else "odd", async_op=True)
        for i in range(8)
    ]
    ends = []
    for handle in handles:
        try:
            handle.wait()
            ends.append("good")
        except fd.Mismatch:
            ends.append("mismatch")
    return ends


def test_one_disagreement_among_many(standing: Callable[[int], World]) -> None:
    ends = standing(3).run(in_flight_together)
    assert ends == [["good"] * 3 + ["mismatch"] + ["good"] * 4] * 3
