"""Many arrays in one call: each as if it had gone alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import farandole as fd
from harness import World

SHAPES: list[tuple[int, ...]] = [(3,), (), (2, 5), (0, 4), (1,), (70, 90), (40_000,), (8000,), (7,)]
DTYPES = ["float32", "int64", "float16", "float32", "bool"]


def arrays(rank: int) -> list[Any]:
    """Sizes below and above what is packed, of several dtypes; heavy-tailed: bits would differ."""
    random = np.random.default_rng([5, rank])
    made = []
    for i, shape in enumerate(SHAPES * 2):
        dtype = DTYPES[i % len(DTYPES)]
        noise = random.standard_cauchy(shape)
        made.append(np.asarray(noise * (1 if "float" in dtype else 9)).astype(dtype))
    return made


def same_bits(found: list[Any], wanted: list[Any]) -> None:
    assert len(found) == len(wanted)
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert a.shape == b.shape, i
        assert a.dtype == b.dtype, i
        assert a.tobytes() == b.tobytes(), i


def check_forms() -> None:
    fd.init()
    root = fd.size() - 1
    forms: list[tuple[Any, Any, dict[str, Any]]] = [
        (fd.grouped_all_reduce, fd.all_reduce, {}),
        (fd.grouped_all_reduce, fd.all_reduce, {"op": "max"}),
        (fd.grouped_reduce_scatter, fd.reduce_scatter, {}),
        (fd.grouped_all_gather, fd.all_gather, {}),
        (fd.grouped_broadcast, fd.broadcast, {"root": root}),
    ]
    xs = arrays(fd.rank())
    for grouped, single, options in forms:
        wanted = [single(x, **options) for x in xs]
        same_bits(grouped(xs, **options), wanted)
        same_bits(grouped(tuple(xs), async_op=True, name="all", **options).wait(), wanted)
        assert grouped([], **options) == []
        same_bits(grouped(xs[:1], **options), wanted[:1])
    mine = [x.copy() for x in xs]
    assert fd.grouped_all_reduce(mine, out=mine, prescale=1.0)[0] is mine[0]
    same_bits(mine, [fd.all_reduce(x) for x in xs])
    mine = [x.copy() for x in xs]
    fd.grouped_broadcast(mine, root, out=mine)
    same_bits(mine, arrays(root))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_grouped_forms_have_the_bits_of_single_ones(
    standing: Callable[[int], World], size: int
) -> None:
    standing(size).run(check_forms)


def all_or_nothing() -> None:
    fd.init()
    good, bad = np.ones(3), np.ones(8)[::2]
    for xs in ([good, bad], [good, [1.0]], [np.ones(100_000), good, bad]):
        with pytest.raises(fd.InvalidArgument):
            fd.grouped_all_reduce(xs)
    with pytest.raises(fd.InvalidArgument, match="has no meaning"):
        fd.grouped_all_reduce([good, np.ones(2, bool)], "mean")
    with pytest.raises(fd.InvalidArgument, match="2 inputs and 1 outputs"):
        fd.grouped_all_reduce([good, good], out=[good])
    with pytest.raises(fd.InvalidArgument, match="a list of arrays"):
        fd.grouped_all_reduce(good)
    assert fd.all_reduce(1) == fd.size(), "nothing of the above was sent"


def test_nothing_is_sent_unless_all_are_valid(standing: Callable[[int], World]) -> None:
    standing(3).run(all_or_nothing)


SMALL, LARGE = 3, 100_000  # elements: packed, and not


def lists_that_differ(rank: int) -> dict[str, tuple[list[Any], str]]:
    """The arrays of a rank, and the error on all. Without an agreement on the whole call, the first
    operation of some would succeed, and each later call would meet the other rank's next."""
    large, small = np.ones(LARGE), np.ones(SMALL)
    return {
        "large, more": ([large] * (2 + rank), "number of arrays of {}: 2 on rank 0; 3 on rank 1"),
        "small, more": ([small] * (2 + rank), "number of arrays of {}: 2 on rank 0; 3 on rank 1"),
        "one": ([large] * (2 - rank), "number of arrays of {}: 1 on rank 1; 2 on rank 0"),
        "none": ([large] * (2 - 2 * rank), "number of arrays of {}: 0 on rank 1; 2 on rank 0"),
        "a late one": (
            [large, large, np.ones(LARGE + rank)],
            f"array 2 of {{}}: {LARGE} x float64 on rank 0; {LARGE + 1} x float64 on rank 1",
        ),
        "dtype": (
            [large, np.ones(LARGE, "float32" if rank else "float64")],
            f"array 1 of {{}}: {LARGE} x float32 on rank 1; {LARGE} x float64 on rank 0",
        ),
        "as long together": (
            [np.ones(4 + rank), np.ones(5 - rank), large],
            "array 0 of {}: 4 x float64 on rank 0; 5 x float64 on rank 1",
        ),
    }


def disagree(which: str) -> None:
    fd.init()
    xs, wanted = lists_that_differ(fd.rank())[which]
    forms = ["all_reduce", "all_gather", "reduce_scatter", "broadcast"]
    for form in forms[: 4 if "more" in which else 1]:
        call = getattr(fd, f"grouped_{form}")
        with pytest.raises(fd.Mismatch) as error:
            call(xs, name="gradients")
        assert wanted.format(f"{form} 'gradients'") in error.value.verdict
        handles = [call(xs, async_op=True), fd.all_reduce(np.ones(LARGE), async_op=True)]
        with pytest.raises(fd.Mismatch):
            handles[0].wait()
        assert (handles[1].wait() == fd.size()).all(), "the next call meets the others' next"
        same = np.full(LARGE, fd.rank() + 1.0)
        assert (fd.grouped_all_reduce([same, same])[1] == 3).all()
    if fd.rank() == 0:
        assert xs == [] or (xs[0] == 1).all()


@pytest.mark.parametrize("which", lists_that_differ(0))
def test_lists_that_differ_are_refused_whole_and_the_next_call_is_right(
    standing: Callable[[int], World], which: str
) -> None:
    standing(2).run(disagree, which)


def grouped_against_single() -> None:
    fd.init()
    x = np.full(LARGE, fd.rank() + 1.0)
    mine = (lambda: fd.grouped_all_reduce([x] * 3)) if fd.rank() == 0 else lambda: fd.all_reduce(x)
    with pytest.raises(fd.Mismatch, match="number of arrays") as error:
        mine()
    assert error.value.values == {"1": [1, 2], "3": [0]}
    assert (fd.all_reduce(x) == 6).all()


def test_a_grouped_call_is_not_a_single_one(standing: Callable[[int], World]) -> None:
    standing(3).run(grouped_against_single)


def coalesced(rank: int) -> list[tuple[Any, ...]]:
    """Several kinds in one call; rank 1 has one more, or another root."""
    x = np.full(LARGE, rank + 1.0)
    return [
        ("all_reduce", x, x, None, "sum", 1.0, 0, []),
        ("broadcast", x, x, None, "sum", 1.0, 0, []),
        ("all_gather", x[: rank + 1], np.empty(3), None, "sum", 1.0, 0, [1, 2]),
    ]


def together() -> None:
    fd.init()
    group, rank = fd.world(), fd.rank()
    good = coalesced(rank)
    for handle in group.start_together(good, "good"):
        handle.wait()
    assert good[2][2].tolist() == [3.0] * 3
    other_root = [good[0], (*good[1][:6], rank, []), good[2]]
    other_kind = [good[0], good[1 if rank else 0], good[2]]
    for calls, wanted in (
        (good[: 3 - rank], "number of arrays"),
        (other_root, "array 1"),
        (other_kind, "array 1 of all_reduce 'bad': all_reduce of"),
    ):
        for handle in group.start_together(calls, "bad"):
            with pytest.raises(fd.Mismatch, match=wanted):
                handle.wait()
        assert fd.all_reduce(rank) == 1


def test_operations_of_several_kinds_are_refused_together(standing: Callable[[int], World]) -> None:
    standing(2).run(together)


def drop_and_go_on() -> int:
    """How often the call after one whose handle nobody kept has a wrong result."""
    fd.init()
    wrong = 0
    for i in range(200):
        fd.grouped_all_reduce([np.full(500, 1.0 + i) for _ in range(8)], async_op=True)
        mine = [np.full(500, 7.0 * i) for _ in range(8)]
        results = fd.grouped_all_reduce(mine, async_op=True).wait()
        wrong += any((x != 7.0 * i * fd.size()).any() for x in results)
    return wrong


def test_a_dropped_handle_leaves_its_memory_to_its_operations(
    standing: Callable[[int], World],
) -> None:
    assert standing(2).run(drop_and_go_on) == [0, 0]
