"""Ranks that submit different things: every rank is told who gave what, and the group lives on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import farandole as fd
from harness import World

SIZES = [2, 3]
COUNTS = [8, 3000, 200_000]  # lines, one_shot, staged

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
KINDS = ["all_reduce", "reduce_scatter", "all_gather", "broadcast"]


def submit(kind: str, count: int, how: dict[str, Any], ours: bool) -> None:
    options = {"name": "grad", **how}
    dtype = options.pop("dtype", "float64")
    count += options.pop("more", 0)
    kind = options.pop("kind", kind)
    make = fd.allocate if ours else np.zeros
    x = make(count, dtype)
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
    folds = kind in ("all_reduce", "reduce_scatter")
    if field in ("op", "prescale", "postscale", "level"):
        return folds
    if field == "algorithm":
        return kind != "broadcast"  # has no planner of that name
    return not (field == "operation" and kind == "all_gather")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("field", DIFFERENCES)
def test_every_field_of_every_operation(
    standing: Callable[[int], World], size: int, count: int, field: str
) -> None:
    world = standing(size)
    how, common, other = DIFFERENCES[field]
    for kind in KINDS:
        if not allowed(kind, field):
            continue
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


def different_roots() -> dict[str, list[int]]:
    fd.init()
    with pytest.raises(fd.Mismatch) as mismatch:
        fd.broadcast(np.zeros(10_000), root=fd.rank() % 2)
    assert mismatch.value.field == "root"
    return dict(mismatch.value.values)


@pytest.mark.parametrize("size", SIZES)
def test_roots(standing: Callable[[int], World], size: int) -> None:
    values = standing(size).run(different_roots)[0]
    assert values == {"0": list(range(0, size, 2)), "1": list(range(1, size, 2))}


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
    with pytest.raises(fd.InvalidArgument, match="window"):
        fd.all_reduce(x, out=x, algorithm="window")
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
