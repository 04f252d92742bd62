"""The same bits from every path, planner, backend and kind of memory, on every rank.

Heavy-tailed random data make a sum depend on the order of its additions nearly everywhere, so equal
bits mean equal order. The control that must differ: a ring over three ranks, which level
``canonical`` does not admit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import farandole as fd
from farandole import _core
from harness import World

PLANNERS = ["direct", "binomial", "halving_doubling", "doubling"]
WAYS = [(None, "caller"), (None, "ours"), (None, "mixed"), ("cico", "caller"), ("cico", "ours")]
WAYS += [("cico", "mixed"), ("mapped", "ours"), ("schedule", "caller")]
WAYS += [("cma", "caller"), ("cma", "ours"), ("cma", "mixed")]
WAYS += [(name, memory) for name in PLANNERS for memory in ("caller", "ours")]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
BITS = {"float16": np.uint16, "bfloat16": np.uint16, "float32": np.uint32, "float64": np.uint64}

Array = np.ndarray[Any, np.dtype[Any]]


def heavy_tailed(seed: int, rank: int, count: int, dtype: str) -> Array:
    """Bits of numbers over many orders of magnitude."""
    random = np.random.default_rng([seed, rank])
    wide = random.standard_cauchy(count) * 2.0 ** random.integers(-6, 7, count)
    if dtype == "float16":
        return np.clip(wide, -6e4, 6e4).astype(np.float16).view(np.uint16)
    if dtype == "bfloat16":
        return (wide.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return wide.astype(dtype).view(BITS[dtype])


def canonical(leaves: list[Array]) -> Array:
    """The tree of docs/determinism.md, for float32 and float64."""
    if len(leaves) == 1:
        return leaves[0]
    split = 1 << ((len(leaves) - 1).bit_length() - 1)
    return canonical(leaves[:split]) + canonical(leaves[split:])


def reduce_bits(bits: Array, dtype: str, memory: str, **options: Any) -> Array:
    ours = memory == "ours" or (memory == "mixed" and fd.rank() % 2 == 0)
    source = fd.allocate(bits.shape, bits.dtype) if ours else np.empty_like(bits)
    target = fd.allocate(bits.shape, bits.dtype) if ours else np.empty_like(bits)
    source[...] = bits
    fd.world().run(
        "all_reduce",
        _core.Buffer(source.ctypes.data, bits.size, dtype, source),
        _core.Buffer(target.ctypes.data, bits.size, dtype, target),
        **options,
    )
    return np.array(target)


def compare_ways(seed: int, dtype: str, count: int) -> bytes:
    fd.init()
    mine = heavy_tailed(seed, fd.rank(), count, dtype)
    first = None
    for algorithm, memory in WAYS:
        bits = reduce_bits(mine, dtype, memory, algorithm=algorithm)
        if first is None:
            first = bits
        different = np.flatnonzero(bits != first)
        assert not len(different), (
            f"{dtype} x {count}: {algorithm} over {memory} memory differs from {WAYS[0]} in "
            f"{len(different)} elements, first at {different[0]}"
        )
    assert first is not None
    if dtype in ("float32", "float64"):
        leaves = [heavy_tailed(seed, r, count, dtype).view(dtype) for r in range(fd.size())]
        assert (canonical(leaves).view(BITS[dtype]) == first).all(), "not the canonical tree"
    return first.tobytes()


@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_way_gives_the_same_bits(
    standing: Callable[[int], World], size: int, dtype: str
) -> None:
    seed = int(np.random.SeedSequence().entropy) % 2**32  # type: ignore[arg-type]
    print(f"seed {seed}")
    world = standing(size)
    for count in (17, 7001, 100_003):
        answers = world.run(compare_ways, seed, dtype, count)
        assert len(set(answers)) == 1, "ranks differ"


def compare_small(seed: int, dtype: str) -> None:
    fd.init()
    count = 500 // np.dtype(BITS[dtype]).itemsize
    mine = heavy_tailed(seed, fd.rank(), count, dtype)
    seen = {reduce_bits(mine, dtype, "caller", algorithm=a).tobytes() for a in ("ll", "one_shot")}
    seen.add(reduce_bits(mine, dtype, "mixed", algorithm="cico").tobytes())
    seen.add(reduce_bits(mine, dtype, "caller", op="sum", algorithm="direct").tobytes())
    assert len(seen) == 1


@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize("dtype", FLOATS)
def test_small_paths_give_the_same_bits(
    standing: Callable[[int], World], size: int, dtype: str
) -> None:
    standing(size).run(compare_small, 7, dtype)


def compare_ring(size_of_group: int) -> bool:
    fd.init()
    mine = heavy_tailed(11, fd.rank(), 5000, "float32")
    ring = reduce_bits(mine, "float32", "caller", algorithm="ring", level="fast")
    assert size_of_group == fd.size()
    return bool((ring == reduce_bits(mine, "float32", "caller")).all())


def test_a_ring_of_three_differs_and_is_not_canonical(standing: Callable[[int], World]) -> None:
    assert standing(3).run(compare_ring, 3) == [False] * 3
    assert standing(2).run(compare_ring, 2) == [True] * 2
    for refused in standing(3).run(ask_for_ring):
        assert "below level canonical" in refused


def ask_for_ring() -> str:
    fd.init()
    with pytest.raises(fd.InvalidArgument) as refusal:
        fd.all_reduce(np.ones(10), algorithm="ring")
    assert (fd.all_reduce(np.ones(10)) == fd.size()).all(), "the group lives on"
    return str(refusal.value)


def compare_parts(seed: int) -> None:
    """reduce_scatter has the bits of all_reduce; scales and means do not depend on the way."""
    fd.init()
    x = heavy_tailed(seed, fd.rank(), 30_011, "float32").view(np.float32)
    for op, prescale, postscale in (("sum", 1.0, 1.0), ("mean", 0.1, 3.3), ("product", 1.0, 0.7)):
        options: dict[str, Any] = {"op": op, "prescale": prescale, "postscale": postscale}
        whole = fd.all_reduce(x, **options)
        mine = fd.reduce_scatter(x, **options)
        assert fd.all_gather(whole).reshape(fd.size(), -1).view(np.uint32).std(axis=0).max() == 0
        begin = sum(30_011 // fd.size() + (r < 30_011 % fd.size()) for r in range(fd.rank()))
        assert mine.tobytes() == whole[begin : begin + len(mine)].tobytes()
        for algorithm in PLANNERS:
            assert fd.all_reduce(x, algorithm=algorithm, **options).tobytes() == whole.tobytes()


@pytest.mark.parametrize("size", [2, 3, 5])
def test_parts_and_scales_keep_the_bits(standing: Callable[[int], World], size: int) -> None:
    standing(size).run(compare_parts, 3)
