"""Bucket plans, which group gradients: properties of every plan, and a few plans by hand."""

from __future__ import annotations

import random
from typing import Any

import pytest

from core_testing import testing

SIZES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}
LINE = 64


def plan(rows: list[tuple[str, int, str]], limit: int, first: int) -> Any:
    return testing.plan_buckets(rows, limit, first)


def test_a_large_tensor_has_a_bucket_of_its_own() -> None:
    rows = [("a", 10, "float32"), ("b", 1000, "float32"), ("c", 10, "float32"), ("d", 0, "float32")]
    buckets = testing.plan_buckets(rows, 1 << 20, 1 << 20, in_place_bytes=4000)
    assert buckets == [
        ("float32", 1000, [(1, 0, 1000)]),
        ("float32", 32, [(0, 0, 10), (2, 16, 10), (3, 32, 0)]),
    ]
    assert testing.plan_buckets(rows, 1 << 20, 1 << 20, in_place_bytes=4001) == plan(
        rows, 1 << 20, 1 << 20
    )


def grouped(rows: list[Any], limit: int, alone: int = 1 << 40) -> list[tuple[str, list[int]]]:
    buckets = testing.plan_buckets(rows, limit, limit, in_place_bytes=alone)
    return [(dtype, [i for i, _, _ in items]) for dtype, _, items in buckets]


def test_a_group_has_buckets_of_its_own_whatever_their_size() -> None:
    rows = [
        ("a", 16, "float32", -1), ("b", 1000, "float32", 7), ("c", 16, "float32"),
        ("d", 16, "float64", 7), ("e", 1000, "float32", 7), ("f", 16, "float32", -1),
    ]  # fmt: skip
    assert grouped(rows, 64) == [
        ("float32", [0]), ("float32", [2]),
        ("float32", [1, 4]), ("float64", [3]),  # launched when its last tensor is ready
        ("float32", [5]),
    ]  # fmt: skip
    assert grouped(rows, 1 << 20) == [
        ("float32", [1, 4]), ("float64", [3]), ("float32", [0, 2, 5]),
    ]  # fmt: skip


def test_large_tensors_of_a_group_stay_with_it() -> None:
    rows = [("a", 1000, "float32", 0), ("b", 16, "float32", 1), ("c", 16, "float32", 0)]
    assert grouped(rows, 64, alone=4000) == [
        ("float32", [1]), ("float32", [0]), ("float32", [2]),
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_groups_lie_side_by_side_and_hold_everything_once(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    rows = [(*row, rng.randint(-1, 3)) for row in random_rows(rng)]
    limit = rng.choice([0, 4096, 1 << 40])
    order = rng.sample(range(len(rows)), len(rows))
    buckets = testing.plan_buckets(rows, limit, limit // 4, order, rng.choice([4000, 1 << 40]))
    placed = [i for _, _, items in buckets for i, _, _ in items]
    assert sorted(placed) == list(range(len(rows)))
    of_bucket = [{rows[i][3] for i, _, _ in items} for _, _, items in buckets]
    assert all(len(groups) == 1 for groups in of_bucket), "nothing is mixed with a group"
    runs = [groups for k, groups in enumerate(of_bucket) if k == 0 or of_bucket[k - 1] != groups]
    for group in range(4):
        assert runs.count({group}) == any(row[3] == group for row in rows)


def test_a_group_is_launched_when_its_last_tensor_is_ready() -> None:
    rows = [("a", 16, "float32", 0), ("b", 16, "float32"), ("c", 8, "float64", 0)]
    point = testing.launch_point(rows, 64, 64, [0, 1, 2], [0, 1, 2])
    assert point == (2 + 3 + 3) / 9


def random_rows(rng: random.Random) -> list[tuple[str, int, str]]:
    dtypes = rng.sample(sorted(SIZES), rng.randint(1, 3))
    return [
        (f"p{i}", rng.choice([1, 3, 16, 17, 1000, 5000]), rng.choice(dtypes))
        for i in range(rng.randint(0, 60))
    ]


@pytest.mark.parametrize("seed", range(40))
def test_every_plan_is_sound(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    rows = random_rows(rng)
    limit = rng.choice([0, 64, 4096, 20_000, 1 << 40])
    buckets = plan(rows, limit, rng.choice([0, limit // 4, limit]))
    placed = [i for _, _, items in buckets for i, _, _ in items]
    assert sorted(placed) == list(range(len(rows))), "each parameter once"
    for dtype, count, items in buckets:
        assert items
        end = 0
        for i, offset, length in items:
            assert rows[i] == (rows[i][0], length, dtype)
            assert offset >= end, "no overlap"
            assert offset * SIZES[dtype] % LINE == 0, "begins on a cache line"
            end = offset + length
        assert end <= count
        order = [i for i, _, _ in items]
        assert order == sorted(order), "ready order"
        if len(items) > 1:
            assert count * SIZES[dtype] <= limit, "only a lone tensor may exceed the limit"
    for dtype in SIZES:
        order = [i for kind, _, items in buckets if kind == dtype for i, _, _ in items]
        assert order == sorted(order), "buckets of a dtype complete in order"


def test_a_limit_of_zero_gives_one_bucket_per_tensor() -> None:
    buckets = plan([("a", 4, "float32"), ("b", 4, "float32")], 0, 0)
    assert [[i for i, _, _ in items] for _, _, items in buckets] == [[0], [1]]


def test_no_limit_gives_one_bucket_per_dtype() -> None:
    rows = [("a", 4, "float32"), ("b", 4, "float64"), ("c", 4, "float32")]
    buckets = plan(rows, 1 << 40, 1 << 40)
    assert [(d, [i for i, _, _ in items]) for d, _, items in buckets] == [
        ("float64", [1]),
        ("float32", [0, 2]),
    ]


def test_the_first_bucket_is_small() -> None:
    rows = [(f"p{i}", 16, "float32") for i in range(9)]
    buckets = plan(rows, 4 * 64, 64)
    assert [len(items) for _, _, items in buckets] == [1, 4, 4]


def test_a_large_tensor_does_not_drag_small_ones_along() -> None:
    rows = [("bias", 16, "float32"), ("weight", 10_000, "float32"), ("next", 16, "float32")]
    buckets = plan(rows, 4096, 4096)
    assert [[i for i, _, _ in items] for _, _, items in buckets] == [[0], [1], [2]]


@pytest.mark.parametrize(
    "other",
    [
        [("a", 8, "float32"), ("c", 4, "float32")],
        [("a", 8, "float32"), ("b", 5, "float32")],
        [("a", 8, "float32"), ("b", 4, "bfloat16")],
        [("b", 4, "float32"), ("a", 8, "float32")],
        [("a", 8, "float32")],
        [("a", 8, "float32", 0), ("b", 4, "float32", 0)],
        [],
    ],
)
def test_fingerprints_tell_plans_apart(other: list[tuple[str, int, str]]) -> None:
    rows = [("a", 8, "float32"), ("b", 4, "float32")]
    mine = testing.plan_fingerprint(rows, 4096, 1024)
    assert mine == testing.plan_fingerprint(list(rows), 4096, 1024)
    assert mine != testing.plan_fingerprint(other, 4096, 1024)
    assert mine != testing.plan_fingerprint(rows, 0, 0)


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_in_ready_order_is_that_of_reordered_parameters(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    rows = random_rows(rng)
    order = rng.sample(range(len(rows)), len(rows))
    limit = rng.choice([0, 4096, 20_000, 1 << 40])
    renamed = [
        (dtype, count, [(order[i], offset, length) for i, offset, length in items])
        for dtype, count, items in plan([rows[i] for i in order], limit, limit // 4)
    ]
    assert testing.plan_buckets(rows, limit, limit // 4, order) == renamed


def launched(rows: list[tuple[str, int, str]], limit: int, planned: list[int]) -> float:
    return testing.launch_point(rows, limit, limit, planned, list(range(len(rows))))


def test_the_launch_point_says_how_early_buckets_go() -> None:
    rows = [(f"p{i}", 16, "float32") for i in range(4)]
    assert launched(rows, 64, [0, 1, 2, 3]) == (1 + 2 + 3 + 4) / 16
    assert launched(rows, 64, [3, 2, 1, 0]) == 1, "the first bucket holds all others up"
    assert launched(rows, 64, [1, 0, 2, 3]) == (2 + 2 + 3 + 4) / 16
    assert launched(rows, 1 << 30, [0, 1, 2, 3]) == 1, "one bucket goes at the end"
    assert launched([], 64, []) == 1


@pytest.mark.parametrize("seed", range(20))
def test_no_order_launches_earlier_than_the_ready_order(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    rows = [(f"p{i}", 16 * rng.randint(1, 40), "float32") for i in range(rng.randint(1, 30))]
    order = list(range(len(rows)))
    best = launched(rows, 0, order)
    assert best <= launched(rows, 0, rng.sample(order, len(order)))


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="'a' has the unsupported dtype complex64"):
        plan([("a", 1, "complex64")], 0, 0)
