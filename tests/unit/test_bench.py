"""Benchmarks without ranks: statistics, exactly known data, what the command line refuses."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest

from farandole import _core, cli
from farandole._bench import data, placement
from farandole._bench import statistics as st
from farandole._bench.layouts import COLLECTIVES
from farandole.cli import bench
from grid import combinations

# -- statistics ---------------------------------------------------------------------------------


def test_a_percentile_is_a_measured_value() -> None:
    values = list(range(1, 1001))
    random.Random(5).shuffle(values)
    assert st.percentile(values, 99) == 990
    assert st.percentile(values, 100) == 1000
    assert st.percentile(values, 0) == 1
    assert st.percentile([1, 2, 3], 99) == 3
    assert st.percentile(range(100), 99) == 98
    for bad in ([], [1]):
        with pytest.raises(ValueError, match="percentile"):
            st.percentile(bad, 101)


def test_a_summary_is_least_median_p99() -> None:
    assert st.summarize([5, 1, 3]) == (1, 3, 5)


def test_an_interval_lies_at_the_order_statistics_of_the_binomial() -> None:
    # Tables of the sign test: n = 11 gives the 2nd and the 10th, n = 20 the 6th and the 15th.
    eleven = st.median_interval(list(range(1, 12)))
    assert (eleven.median, eleven.low, eleven.high) == (6, 2, 10)
    assert eleven.confidence == pytest.approx(1 - 2 * 12 / 2**11)
    twenty = st.median_interval(list(range(1, 21)))
    assert (twenty.low, twenty.high) == (6, 15)
    assert twenty.confidence == pytest.approx(0.9586, abs=1e-4)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_few_values_give_their_range_and_say_what_it_is_worth(n: int) -> None:
    found = st.median_interval([float(i) for i in range(n)])
    assert (found.low, found.high) == (0, n - 1)
    assert found.confidence == pytest.approx(1 - 2 * 0.5**n)


def test_intervals_hold_the_median_as_often_as_they_say() -> None:
    seed = 20240229
    print(f"seed {seed}")
    rng = random.Random(seed)
    trials = 2000
    samples = ([rng.lognormvariate(0, 2) for _ in range(11)] for _ in range(trials))
    inside = sum(i.low <= 1 <= i.high for i in map(st.median_interval, samples))
    assert abs(inside / trials - (1 - 2 * 12 / 2**11)) < 0.012  # four standard deviations


def test_ratios_are_taken_pair_by_pair() -> None:
    assert st.ratios([4, 9], [2, 3]) == [2, 3]
    with pytest.raises(ValueError, match="zip"):
        st.ratios([1], [1, 2])


def test_bandwidth_is_bytes_per_nanosecond() -> None:
    assert st.gigabytes_per_second(1 << 20, 1 << 10) == 1024
    assert st.gigabytes_per_second(1, 0) == 0


@pytest.mark.parametrize(
    ("name", "two", "four"),
    [
        ("all_reduce", 1, 1.5),
        ("broadcast", 1, 1),
        ("all_gather", 0.5, 0.75),
        ("reduce_scatter", 0.5, 0.75),
        ("all_to_all", 0.5, 0.75),
        ("reduce", 1, 1),
        ("gather", 0.5, 0.75),
        ("scatter", 0.5, 0.75),
        ("send_recv", 2, 2),
        ("barrier", 0, 0),
    ],
)
def test_bus_bandwidth_is_that_of_nccl_tests(name: str, two: float, four: float) -> None:
    assert COLLECTIVES[name].bus_factor(2) == two
    assert COLLECTIVES[name].bus_factor(4) == four


SIZES = [
    ("4", 4, "4 B"),
    ("1K", 1024, "1 KiB"),
    ("2MiB", 2 << 20, "2 MiB"),
    ("1g", 1 << 30, "1 GiB"),
]


@pytest.mark.parametrize(("text", "size", "shown"), [*SIZES, ("1000", 1000, "1000 B")])
def test_sizes_are_read_and_shown(text: str, size: int, shown: str) -> None:
    assert st.parse_size(text) == size
    assert st.format_size(size) == shown


@pytest.mark.parametrize("text", ["", "K", "-1", "1.5M", "4T", "4 4"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        st.parse_size(text)


def test_times_have_three_digits() -> None:
    assert [st.format_microseconds(ns) for ns in (821, 14_540, 373_400)] == ["0.82", "14.5", "373"]


# -- data ---------------------------------------------------------------------------------------


def test_every_dtype_of_the_core_can_be_measured() -> None:
    for dtype in _core.dtypes:
        pattern = data.contribution(1, 2, 0, "sum", dtype)
        assert 0 <= pattern.max() <= data.most_exact(dtype)
        assert data.encode(pattern, dtype).dtype == data.storage(dtype)


@pytest.mark.parametrize(
    ("op", "dtype", "ranks"),
    combinations(
        ["sum", "mean", "min", "max", "product"],
        [dtype for dtype in _core.dtypes if dtype != "bool"],
        [2, 3, 8],
    ),
)
def test_results_are_exact_in_any_order(dtype: str, op: str, ranks: int) -> None:
    parts = [data.contribution(r, ranks, 0, op, dtype) for r in range(ranks)]
    if op == "mean":
        assert data.reduced(parts, op, dtype).shape == (data.LENGTH,)
        return
    fold = {"sum": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply}[op]
    exact = fold.reduce(parts)
    assert exact.max() <= min(data.most_exact(dtype), 2**53)
    if dtype != "bfloat16":
        stored = [data.encode(part, dtype) for part in parts]
        assert (fold.reduce(stored, dtype=stored[0].dtype) == exact).all()
        assert (fold.reduce(stored[::-1], dtype=stored[0].dtype) == exact).all()
    assert (data.reduced(parts, op, dtype) == data.encode(exact, dtype)).all()


def test_ranks_and_calls_differ() -> None:
    patterns = [data.contribution(r, 2, t, "sum", "float32") for r in range(2) for t in range(4)]
    for i, one in enumerate(patterns):
        assert all((one != other).any() for other in patterns[:i])


def test_bfloat16_rounds_to_nearest_even() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF], np.uint32)
    rounded = data.encode(bits.view(np.float32), "bfloat16")
    assert [hex(b) for b in rounded] == ["0x3f80", "0x3f82", "0x3f81", "0x3f80"]


@pytest.mark.parametrize("size", [0, 1, data.LENGTH - 1, data.LENGTH, 5 * data.LENGTH + 7])
@pytest.mark.parametrize("phase", [0, 3, 2 * data.LENGTH + 1])
def test_one_wrong_element_is_counted(size: int, phase: int) -> None:
    pattern = np.arange(data.LENGTH, dtype=np.int32)
    array = np.full(size, -1, np.int32)
    data.lay(pattern, array, phase)
    assert array.tolist() == [(i + phase) % data.LENGTH for i in range(size)]
    assert data.count_wrong(pattern, array, phase) == 0
    if size:
        array[size // 2] += 1
        assert data.count_wrong(pattern, array, phase) == 1
        assert data.count_wrong(pattern, array, phase + 1) >= size - 1


# -- placement ----------------------------------------------------------------------------------


def test_ranks_without_a_core_each_are_left_alone() -> None:
    before = os.sched_getaffinity(0)
    assert placement.pin(0, len(before) + 1) is None
    assert os.sched_getaffinity(0) == before
    assert placement.describe([None, None]).startswith("not pinned: ")
    assert placement.describe([0, 3]) == "one core per rank (0, 3)"


# -- the command line ---------------------------------------------------------------------------

MISTAKES = [
    ([], "required"),
    (["all_reduce"], "farandole bench all_reduce -np"),
    (["al_reduce", "-np", "2"], "invalid choice"),
    (["all_reduce", "-np", "0"], "-np takes a number from 1 on, not '0'"),
    (["all_reduce", "-np", "two"], "-np takes a number from 1 on, not 'two'"),
    (["all_reduce", "-np", "2", "--sizes", "4,lots"], "'lots' is not a size"),
    (["all_reduce", "-np", "2", "--sizes", "6"], "6 bytes are not a number of float32"),
    (["all_reduce", "-np", "2", "--sizes", "0"], "0 bytes are not a number of float32"),
    (["all_reduce", "-np", "2", "--dtype", "float8"], "--dtype float8 is unknown; there are"),
    (["all_reduce", "-np", "2", "--op", "median"], "--op median is unknown; there are"),
    (["all_reduce", "-np", "2", "--level", "loose"], "invalid choice"),
    (["all_reduce", "-np", "2", "--memory", "theirs"], "--memory takes ours, caller or both"),
    (["all_reduce", "-np", "2", "--iterations", "0"], "--iterations takes a number"),
    (["all_reduce", "-np", "2", "--seconds", "nan"], "--seconds takes a number"),
    (["all_reduce", "-np", "2", "--seconds", "1", "--iterations", "2"], "not allowed with"),
    (["all_reduce", "-np", "2", "--json", "/no/such/rows.json"], "--json: /no/such/rows.json: No"),
    (["broadcast", "-np", "2", "--op", "sum"], "broadcast takes no --op"),
    (["all_gather", "-np", "2", "--level", "fast"], "all_gather takes no --level"),
    (["barrier", "-np", "2", "--sizes", "4"], "barrier takes no --sizes"),
    (["barrier", "-np", "2", "--dtype", "int8"], "barrier takes no --dtype"),
    (["barrier", "-np", "2", "--memory", "ours"], "barrier takes no --memory"),
    (["barrier", "-np", "2", "--algorithm", "ring"], "barrier takes no --algorithm"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "words"), MISTAKES)
def test_a_mistake_is_one_clear_line(
    arguments: list[str],
    words: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert cli.main(["bench", *arguments]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert words in err


def test_ranks_are_not_started_by_a_rank(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert cli.main(["bench", "all_reduce", "-np", "2"]) == 2
    assert "one already (RANK=1)" in capfd.readouterr().err


def test_the_command_knows_every_collective_of_the_table() -> None:
    assert tuple(COLLECTIVES) == bench.COLLECTIVES
    assert tuple(name for name, row in COLLECTIVES.items() if row.folds) == bench._FOLDING


def test_json_has_a_row_per_line(tmp_path: Path) -> None:
    rows = [{"a": 1}, {"a": None}]
    path = tmp_path / "rows.json"
    path.write_text(bench.as_json(rows))
    assert json.loads(path.read_text()) == rows
    assert len(path.read_text().splitlines()) == len(rows) + 2
