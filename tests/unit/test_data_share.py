"""Shares of a batch, and a rank's part of arrays: arithmetic, without a world."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import farandole as fd
from farandole.data import Arrays, Share, part_of, share
from farandole.data._logical import Folding, block_of, fold
from farandole.data._same import ELEMENTS, checksum, compares_after, sampled
from farandole.data._share import places, taken
from farandole.data._tree import map_leaves, samples

SIZES = range(1, 6)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("n", range(12))
def test_shares_are_contiguous_and_differ_by_one(n: int, size: int) -> None:
    parts = [share(n, size, rank) for rank in range(size)]
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(n))
    counts = [part.stop - part.start for part in parts]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] - counts[-1] <= 1


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("n", range(1, 12))
def test_the_mean_of_weighted_means_is_the_mean_over_all_samples(n: int, size: int) -> None:
    values = np.random.default_rng(n).normal(size=n)
    weighted = []
    for rank in range(size):
        rows, mine = taken(n, size, rank)
        assert len(values[rows]) == max(mine.samples, 1)
        weighted.append(values[rows].mean() * mine.weight(size))
    assert np.mean(weighted) == pytest.approx(values.mean(), abs=1e-12)


def test_a_rank_without_samples_takes_the_first_one_with_weight_0() -> None:
    assert taken(2, 3, 2) == (slice(0, 1), Share(0, 2))
    assert Share(0, 2).weight(3) == 0


@pytest.mark.parametrize("size", SIZES)
def test_places_put_the_ranks_rows_into_the_order_of_the_data(size: int) -> None:
    totals = [5, 3, 1]
    rows = np.arange(sum(totals))
    by_rank = [[] for _ in range(size)]  # type: list[list[int]]
    begin = 0
    for n in totals:
        for rank in range(size):
            by_rank[rank] += rows[begin : begin + n][share(n, size, rank)].tolist()
        begin += n
    where = [[i for each in ranges for i in each] for ranges in places(totals, size)]
    assert where == by_rank


@pytest.mark.parametrize(("n", "size", "rank"), [(-1, 2, 0), (3, 2, 2), (3, 0, 0), (3, 2, -1)])
def test_shares_that_are_not_there_are_refused(n: int, size: int, rank: int) -> None:
    with pytest.raises(fd.InvalidArgument, match=f"n={n}, size={size}, rank={rank}"):
        share(n, size, rank)
    with pytest.raises(fd.InvalidArgument, match="a batch is empty"):
        taken(0, 2, 1)


def data(n: int) -> dict[str, Any]:
    return {"x": np.arange(n) * 10, "y": (np.arange(2 * n).reshape(n, 2), [np.arange(n)])}


@pytest.mark.parametrize("shuffle", [False, True, "batch"])
@pytest.mark.parametrize("size", SIZES)
def test_the_ranks_parts_of_arrays_are_the_batches_of_one(size: int, shuffle: Any) -> None:
    arrays = Arrays(data(17), 4, shuffle=shuffle, seed=3)
    assert len(arrays) == 5
    for epoch in range(2):
        seen = []
        for i, whole in enumerate(arrays.parts(epoch, size=1, rank=0)):
            parts = [arrays.part(i, epoch, size, rank) for rank in range(size)]
            counted = [map_leaves(lambda a, p=p: a[: p.share.samples], p.batch) for p in parts]
            joined = np.concatenate([each["x"] for each in counted])
            assert joined.tolist() == whole.batch["x"].tolist()
            assert all(p.share.total == len(joined) for p in parts)
            assert sum(p.share.samples for p in parts) == len(joined)
            for p in parts:  # arrays of a batch stay together
                x = p.batch["x"] // 10
                assert p.batch["y"][0][:, 0].tolist() == (2 * x).tolist()
                assert p.batch["y"][1][0].tolist() == x.tolist()
            seen += joined.tolist()
        assert sorted(seen) == data(17)["x"].tolist()
        assert (seen == sorted(seen)) == (not shuffle)


def test_epochs_have_different_orders_and_seeds_too() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        arrays = Arrays(np.arange(64), 64, shuffle=True, seed=seed)
        rows: list[int] = arrays.part(0, epoch, 1, 0).batch.tolist()
        return rows

    assert order(1, 0) == order(1, 0)
    assert len({tuple(order(seed, epoch)) for seed in (1, 2) for epoch in (0, 1)}) == 4


def test_batches_within_stay_together_when_only_they_are_shuffled() -> None:
    arrays = Arrays(np.arange(10), 4, shuffle="batch")
    batches = [part.batch.tolist() for part in arrays.parts(0, 1, 0)]
    assert [sorted(batch) for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_a_last_batch_that_is_not_full_is_dropped_if_told() -> None:
    assert len(Arrays(np.arange(10), 4, drop_last=True)) == 2
    with pytest.raises(fd.InvalidArgument, match="3 samples, which make no batch of 4"):
        Arrays(np.arange(3), 4, drop_last=True)


@pytest.mark.parametrize("batch_size", [0, -1, 2.0, True, "8"])
def test_a_batch_size_is_a_whole_number(batch_size: Any) -> None:
    with pytest.raises(fd.InvalidArgument, match="batch_size is"):
        Arrays(np.arange(3), batch_size)


def test_batches_are_cut_by_their_own_length() -> None:
    parts = [part_of((np.arange(5), None), 2, rank) for rank in range(2)]
    assert [part.batch[0].tolist() for part in parts] == [[0, 1, 2], [3, 4]]
    assert parts[0].batch[1] is None
    assert [part.share for part in parts] == [Share(3, 5), Share(2, 5)]


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ((np.arange(3), np.arange(2)), r"different lengths: \[3, 2\]"),
        (np.float32(3), "without a first dimension"),
        ((), "no arrays"),
        ({"x": np.empty((0, 2))}, "a batch is empty"),
    ],
)
def test_what_is_no_batch_is_refused(batch: Any, words: str) -> None:
    with pytest.raises(fd.InvalidArgument, match=words):
        part_of(batch, 2, 0)


def test_samples_are_the_first_dimension() -> None:
    assert samples({"x": np.empty((4, 2)), "y": [np.empty(4)]}, "it") == 4


def _able(parts: int) -> dict[int, list[list[int]]]:
    """By number of ranks, where they can be dealt: the parts of each."""
    found = {}
    for size in range(1, parts + 1):
        try:
            found[size] = [list(block_of(rank, size, parts).mine) for rank in range(size)]
        except fd.InvalidArgument:
            continue
    return found


@pytest.mark.parametrize("parts", range(1, 18))
def test_folding_by_ranks_is_folding_all_parts(parts: int) -> None:
    def plus(a: str, b: str) -> str:
        return f"({a}+{b})"

    right = fold([str(part) for part in range(parts)], plus)
    able = _able(parts)
    assert {1, parts} <= able.keys()
    if parts & (parts - 1) == 0:
        assert len(able) == parts
    for blocks in able.values():
        assert [part for block in blocks for part in block] == list(range(parts))
        assert fold([fold([str(part) for part in block], plus) for block in blocks], plus) == right


@pytest.mark.parametrize("count", range(1, 18))
def test_folding_one_by_one_is_folding_all(count: int) -> None:
    def plus(a: str, b: str) -> str:
        return f"({a}+{b})"

    folding = Folding[str](plus)
    assert not folding
    for value in range(count):
        folding.push(str(value))
    assert folding.result() == fold([str(value) for value in range(count)], plus)


def test_parts_that_do_not_go_on_the_ranks_are_refused() -> None:
    with pytest.raises(fd.InvalidArgument, match="logical_ranks=5 do not go on 4 ranks, but on 1"):
        block_of(0, 4, 5)


# ---- what ranks compare ----


def test_checksums_see_another_order_and_cost_the_same_for_any_size() -> None:
    rng = np.random.default_rng(3)
    for shape in [(4,), (32, 3), (64, 224, 224, 3), (40_000, 3)]:
        batch = rng.integers(0, 99, shape)
        some = sampled({"x": batch})["x"]
        assert some.size <= max(2 * ELEMENTS, len(batch))
        order = np.roll(np.arange(len(batch)), 1)
        assert checksum(some) != checksum(sampled(batch[order]))
        assert checksum(some) == checksum(sampled(batch.copy()))
    assert [n for n in range(20) if compares_after(n)] == [2, 4, 8, 16]
