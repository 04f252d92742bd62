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


def disagree() -> str:
    fd.init()
    xs = [np.ones(3), np.ones(4 if fd.rank() == 0 else 5), np.ones(100_000)]
    with pytest.raises(fd.Mismatch) as error:
        fd.grouped_all_reduce(xs, name="gradients")
    assert fd.all_reduce(1) == fd.size(), "the group lives"
    return error.value.verdict


def test_ranks_that_disagree_are_told(standing: Callable[[int], World]) -> None:
    for verdict in standing(2).run(disagree):
        assert "count of all_reduce 'gradients[0 … 1]'" in verdict
