"""Every collective between processes, compared with numpy by `==`: sizes, types, paths, memory.

Data are small integers, so that sums, products and means are exact in every type; what rounding
does is the subject of test_same_bits.py. One call of `check_*` runs many cases inside one world.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import farandole as fd
from core_testing import testing
from farandole import _core
from harness import World

WORLDS = [1, 2, 3, 5, 8]
DTYPES = [name for name in _core.dtypes if name != "bfloat16"]  # numpy has none; see below
FORCED = [*(path["name"] for path in fd._core.tuning.paths()), "schedule"]
PLANNERS = {
    kind: sorted(
        {row["name"] for row in _core.schedule.planners(1, 1) if row["collective"] == kind}
    )
    for kind in (
        "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather", "scatter",
        "all_to_all",
    )
}  # fmt: skip
MEMORY = ["caller", "ours", "mixed", "ours to caller"]
ROOTED = ["broadcast", "reduce", "gather", "scatter"]
FOLDING = ["all_reduce", "reduce_scatter", "reduce"]
KINDS = ["all_reduce", "reduce_scatter", "all_gather", *ROOTED, "all_to_all"]
WINDOWS = ["all_reduce", "reduce", "gather"]
LIMITS = testing.limits()

Array = np.ndarray[Any, np.dtype[Any]]


# ---- what is expected ----


def ops_of(dtype: str) -> list[str]:
    return [op for op in _core.reduce_ops if not (dtype == "bool" and op == "mean")]


def data(seed: int, rank: int, count: int, dtype: str, op: str = "sum") -> Array:
    """Rank's input: the same wherever it is worked out."""
    random = np.random.default_rng([seed, rank])
    if op == "product":  # exact in every type for eight ranks
        return random.integers(1, 3, count).astype(dtype)
    low = 0 if dtype.startswith(("u", "b")) else -3
    return random.integers(low, 2 if dtype == "bool" else 4, count).astype(dtype)


def reduced(inputs: list[Array], op: str) -> Array:
    stack = np.stack(inputs)
    if op in ("min", "max"):
        return np.asarray(getattr(stack, op)(axis=0))
    if stack.dtype == bool:
        return stack.any(axis=0) if op == "sum" else stack.all(axis=0)
    if op == "product":
        return np.asarray(stack.prod(axis=0, dtype=stack.dtype))
    total = stack.sum(axis=0, dtype=stack.dtype)
    if op == "sum":
        return np.asarray(total)
    if stack.dtype.kind == "f":  # one factor, in the type of the folds
        wide = np.float32 if stack.dtype == np.float16 else stack.dtype.type
        return np.asarray((total.astype(wide) * wide(1 / len(inputs))).astype(stack.dtype))
    return np.asarray(np.trunc(total / len(inputs)).astype(stack.dtype))


def part_of(count: int, size: int, rank: int) -> slice:
    begin = rank * (count // size) + min(rank, count % size)
    return slice(begin, begin + count // size + (rank < count % size))


def expected(kind: str, inputs: list[Array], op: str, root: int, rank: int) -> Array | None:
    """None where a rank gets nothing."""
    size = len(inputs)
    if kind in ("reduce", "gather") and rank != root:
        return None
    if kind in ("all_gather", "gather"):
        return np.concatenate(inputs)
    if kind == "broadcast":
        return inputs[root]
    if kind == "scatter":
        return inputs[root].reshape(size, -1)[rank]
    if kind == "all_to_all":
        return np.concatenate([x.reshape(size, -1)[rank] for x in inputs])
    total = reduced(inputs, op)
    return total[part_of(len(total), size, rank)] if kind == "reduce_scatter" else total


def input_length(kind: str, count: int, size: int) -> int:
    return count * size if kind in ("scatter", "all_to_all") else count


def output_length(kind: str, count: int, size: int, rank: int) -> int:
    if kind == "reduce_scatter":
        return len(range(count)[part_of(count, size, rank)])
    return count * size if kind in ("all_gather", "gather", "all_to_all") else count


# ---- on a rank ----


def place(array: Array, ours: bool) -> Array:
    if not ours:
        return array.copy()
    there = fd.allocate(array.shape, array.dtype)
    there[...] = array
    return there


def buffers(
    kind: str, mine: Array, count: int, root: int, memory: str, in_place: bool
) -> tuple[Array | None, Array | None]:
    """Input and output, in the kind of memory that this rank has by `memory`."""
    rank, size = fd.rank(), fd.size()
    ours = memory.startswith("ours") or (memory == "mixed" and rank % 2 == 0)
    reads = kind != "scatter" or rank == root
    gets = kind not in ("reduce", "gather") or rank == root
    if not (in_place and reads and gets):
        empty = np.zeros(output_length(kind, count, size, rank), mine.dtype)
        x = place(mine, ours) if reads else None
        return x, place(empty, ours and memory != "ours to caller") if gets else None
    if kind in ("all_gather", "gather"):
        out = place(np.zeros(count * size, mine.dtype), ours)
        own = out[rank * count : (rank + 1) * count]
        own[...] = mine
        return own, out
    x = place(mine, ours)
    if kind == "scatter":
        return x, x[rank * count : (rank + 1) * count]
    return x, x[part_of(count, size, rank)] if kind == "reduce_scatter" else x


def check(
    kind: str,
    dtype: str,
    count: int,
    op: str = "sum",
    root: int = 0,
    memory: str = "caller",
    in_place: bool = False,
    algorithm: str | None = None,
    level: str | None = None,
) -> str:
    """One operation and its comparison; the path that it took."""
    rank, size = fd.rank(), fd.size()
    case = (kind, dtype, count, op, root, memory, in_place, algorithm)
    seed = zlib.crc32(repr(case).encode())
    length = input_length(kind, count, size)
    inputs = [data(seed, r, length, dtype, op) for r in range(size)]
    x, out = buffers(kind, inputs[rank], count, root, memory, in_place)
    # Without other options the call takes the quick way (csrc/bindings/quick_call.cpp).
    options: dict[str, Any] = {"algorithm": algorithm, "timeout": 20} if algorithm else {}
    if kind in FOLDING:
        options |= {"op": op, "level": level}
    if kind in ROOTED:
        options["root"] = root
    answer = getattr(fd, kind)(x, out=out, **options)
    assert answer is out
    wanted = expected(kind, inputs, op, root, rank)
    if out is None or wanted is None:
        assert out is wanted
    else:
        assert out.dtype == wanted.dtype
        wrong = np.flatnonzero(out != wanted)
        assert not len(wrong), (
            f"{case}: {len(wrong)} of {len(out)} wrong, first at {wrong[0]}: "
            f"{out[wrong[0]]} instead of {wanted[wrong[0]]}"
        )
    if not in_place and x is not None:
        assert (x == inputs[rank]).all(), f"{case}: the input changed"
    return str(fd.world().last_path)


def sizes(size: int, itemsize: int) -> list[int]:
    """Counts where something changes: around none, the world's size, each path's limits."""
    piece, block = LIMITS["piece of one_shot"], LIMITS["block of cico"]
    edges = [LIMITS["ll"], piece, 2 * piece, LIMITS["one_shot"], block * size]
    around = [e // itemsize + d for e in edges for d in (-1, 0, 1)]
    return sorted({0, 1, size - 1, size, size + 1, 7, 1065, *around})


# ---- the tests ----


def check_sizes(dtype: str, memory: str, in_place: bool) -> set[str]:
    fd.init()
    return {
        check(kind, dtype, count, memory=memory, in_place=in_place)
        for kind in KINDS
        if not (in_place and kind == "all_to_all")
        for count in sizes(fd.size(), np.dtype(dtype).itemsize)
    }


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("memory", MEMORY)
def test_all_sizes_in_all_memory(standing: Callable[[int], World], size: int, memory: str) -> None:
    world = standing(size)
    paths = set()
    for in_place in (False, True):
        for seen in world.run(check_sizes, "float32", memory, in_place):
            paths |= seen
    assert {"ll", "one_shot"} <= paths
    assert size == 1 or len(paths & {"cico", "cma"}) == 1  # as the ranks have agreed
    all_ours = memory.startswith("ours") or (memory == "mixed" and size == 1)
    assert ("mapped" in paths) == all_ours


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("setting", "wanted"), [("0", {"cico"}), ("1", {"cma"})])
def test_all_sizes_with_and_without_foreign_memory(
    spawn: Callable[..., World], size: int, setting: str, wanted: set[str]
) -> None:
    world = spawn(size, env={"FARANDOLE_CMA": setting})
    for memory, in_place in (("caller", True), ("mixed", False), ("ours to caller", False)):
        for paths in world.run(check_sizes, "float32", memory, in_place):
            assert paths - {"ll", "one_shot"} == wanted


def check_types() -> None:
    fd.init()
    for dtype in DTYPES:
        for op in ops_of(dtype):
            for count in (fd.size() + 1, 3001, *([70001] if op in ("sum", "mean") else [])):
                for kind in FOLDING:
                    check(kind, dtype, count, op)
        for count in (fd.size() + 1, 70001):
            for kind in KINDS:
                if kind not in FOLDING:
                    check(kind, dtype, count)


@pytest.mark.parametrize("size", WORLDS)
def test_all_types_and_operations(standing: Callable[[int], World], size: int) -> None:
    standing(size).run(check_types)


def runs(kind: str, algorithm: str) -> bool:
    if algorithm == "schedule":
        return bool(PLANNERS[kind])
    return algorithm != "mapped" or kind in WINDOWS


def check_forced() -> set[tuple[str, str]]:
    """All kinds through all paths and planners, at sizes that each can take."""
    fd.init()
    ran = set()
    for kind in KINDS:
        for algorithm in [*FORCED, *PLANNERS[kind]]:
            if not runs(kind, algorithm):
                continue
            for count, in_place in itertools.product(
                (0, 1, fd.size() + 1, 509, 60001), (False, True)
            ):
                if input_length(kind, count, fd.size()) * 4 > LIMITS.get(algorithm, 1 << 30):
                    continue
                if in_place and kind == "all_to_all":
                    continue
                check(
                    kind, "int32", count, "sum", root=fd.size() - 1, in_place=in_place,
                    memory="ours" if algorithm == "mapped" else "caller",
                    algorithm=algorithm, level="fast",
                )  # fmt: skip
                ran.add((kind, algorithm))
    for algorithm in ("dissemination", "schedule"):
        fd.world().run("barrier", np.empty(0), np.empty(0), algorithm=algorithm)
    return ran


@pytest.mark.parametrize("size", WORLDS)
def test_every_path_and_planner(standing: Callable[[int], World], size: int) -> None:
    ran = standing(size).run(check_forced)[0]
    assert len(ran) == sum(runs(k, name) for k in KINDS for name in [*FORCED, *PLANNERS[k]])


def check_roots() -> None:
    fd.init()
    for root in range(fd.size()):
        for count in (1, 600, 9001, 100_003):
            for memory in ("caller", "mixed"):
                for kind in ROOTED:
                    check(kind, "int16", count, root=root, memory=memory, in_place=count == 600)


@pytest.mark.parametrize("size", WORLDS)
def test_every_root(standing: Callable[[int], World], size: int) -> None:
    standing(size).run(check_roots)


def check_large() -> None:
    fd.init()
    for memory in ("caller", "ours", "mixed"):
        for kind in KINDS:
            check(kind, "float32", 400_009, memory=memory)
    for memory in ("ours", "mixed"):  # to an output that all ranks map
        for in_place in (False, True):
            assert check("gather", "int32", 300_007, memory=memory, in_place=in_place) == "mapped"
    assert check("gather", "int32", 2_200_000, memory="ours") == "mapped"  # past the caches
    for planner in PLANNERS["all_reduce"]:
        check("all_reduce", "float32", 400_009, algorithm=planner, level="fast")


@pytest.mark.parametrize("size", [2, 3, 5])
def test_megabytes(standing: Callable[[int], World], size: int) -> None:
    standing(size).run(check_large)


def check_scales() -> None:
    fd.init()
    p, r = fd.size(), fd.rank()
    for count in (3, 5000, 200_003):
        x = np.full(count, r + 1.0, np.float32)
        total = p * (p + 1) / 2
        assert (fd.all_reduce(x, prescale=0.5, postscale=4.0) == total * 2).all()
        assert (fd.reduce_scatter(x, prescale=2.0) == total * 2).all()
        assert (fd.all_reduce(x, "max", postscale=-1.0) == -p).all()
        whole = np.full(count, 3 + r, np.int32)
        # Prescaled and truncated on each rank, then added.
        leaves = sum(int((3 + q) * 0.5) for q in range(p))
        assert (fd.all_reduce(whole, prescale=0.5) == leaves).all()
        # The mean divides in integers: 49 ranks' worth of anything gives exactly that.
        assert (fd.all_reduce(np.full(count, 7, np.int64), "mean") == 7).all()
        odd = fd.all_reduce(np.full(count, -7 if r == 0 else 0, np.int16), "mean")
        assert (odd == -(7 // p)).all(), "toward zero"


@pytest.mark.parametrize("size", WORLDS)
def test_scales_and_integer_means(standing: Callable[[int], World], size: int) -> None:
    standing(size).run(check_scales)


def check_shapes() -> None:
    fd.init()
    p, r = fd.size(), fd.rank()
    assert fd.all_reduce(np.ones((2, 3, 4))).shape == (2, 3, 4)
    zero_dimensional = fd.all_reduce(np.array(2.0))
    assert zero_dimensional.shape == ()
    assert zero_dimensional == 2 * p
    assert fd.all_reduce(np.float32(2)).dtype == np.float32
    assert fd.all_reduce(3) == 3 * p
    assert fd.all_reduce(0.5) == 0.5 * p
    assert fd.all_reduce(r == 0) == True  # noqa: E712
    assert fd.all_reduce(np.empty((0, 5))).shape == (0, 5)
    assert fd.all_gather(np.full((2, 3), r)).tolist() == [[q] * 3 for q in range(p) for _ in "ab"]
    assert fd.all_gather(np.array(r)).tolist() == list(range(p))
    assert fd.all_gather(r).tolist() == list(range(p))
    assert fd.all_gather(np.empty((0, 5))).shape == (0, 5)
    assert fd.broadcast(np.full((2, 2), r), root=p - 1).tolist() == [[p - 1] * 2] * 2
    scattered = fd.reduce_scatter(np.arange(p + 1.0).reshape(1, -1))
    assert scattered.tolist() == (np.arange(p + 1.0) * p)[part_of(p + 1, p, r)].tolist()


@pytest.mark.parametrize("size", [1, 3])
def test_shapes_and_scalars(standing: Callable[[int], World], size: int) -> None:
    standing(size).run(check_shapes)


def brain_float(values: Array) -> Array:
    """Whole numbers as the bits of bfloat16."""
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def check_brain_float() -> None:
    fd.init()
    for count in (3, 5000, 100_003):
        mine = brain_float(data(1, fd.rank(), count, "float32"))
        wanted = brain_float(sum(data(1, r, count, "float32") for r in range(fd.size())))
        out = np.zeros(count, np.uint16)
        fd.world().run(
            "all_reduce",
            _core.Buffer(mine.ctypes.data, count, "bfloat16", mine),
            _core.Buffer(out.ctypes.data, count, "bfloat16", out),
        )
        assert (out == wanted).all()


@pytest.mark.parametrize("size", [1, 3, 8])
def test_brain_floats_by_address(standing: Callable[[int], World], size: int) -> None:
    standing(size).run(check_brain_float)


def check_barriers() -> list[float]:
    import time

    fd.init()
    times = []
    for _ in range(50):
        fd.barrier()
    for late in range(fd.size()):
        fd.barrier()
        if fd.rank() == late:
            np.linalg.norm(np.ones((200, 200)))
            times.append(time.monotonic())
        fd.barrier(name=f"after {late}")
        times.append(time.monotonic())
    return times


@pytest.mark.parametrize("size", [1, 2, 5])
def test_nobody_passes_a_barrier_early(standing: Callable[[int], World], size: int) -> None:
    times = standing(size).run(check_barriers)
    for late in range(size):
        came = times[late][late]
        for r in range(size):
            passed = times[r][late + (r <= late)] if r != late else times[r][late + 1]
            assert passed >= came


def planner(random: np.random.Generator, kind: str) -> str | None:
    return str(random.choice(PLANNERS[kind])) if PLANNERS[kind] else None


def cases(random: np.random.Generator, how_many: int, size: int) -> Iterator[dict[str, Any]]:
    for _ in range(how_many):
        dtype = str(random.choice(DTYPES))
        kind = str(random.choice(KINDS))
        yield {
            "kind": kind,
            "dtype": dtype,
            "count": int(2 ** random.uniform(0, 17)),
            "op": str(random.choice(ops_of(dtype))),
            "root": int(random.integers(size)),
            "memory": str(random.choice(MEMORY)),
            "in_place": bool(random.integers(2)) and kind != "all_to_all",
            "algorithm": planner(random, kind) if random.random() < 0.3 else None,
            "level": "fast",
        }


def check_random(seed: int, how_many: int) -> None:
    fd.init()
    for case in cases(np.random.default_rng(seed), how_many, fd.size()):
        check(**case)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_random_programs(standing: Callable[[int], World], size: int) -> None:
    seed = int(np.random.SeedSequence().entropy) % 2**32  # type: ignore[arg-type]
    print(f"seed {seed}")
    standing(size).run(check_random, seed, 150)
