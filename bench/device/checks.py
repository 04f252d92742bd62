"""A rank that compares what comes of collectives on its device with the host's bits."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

import farandole as fd
from farandole import _core, cuda
from farandole._bench import data
from farandole._bench.devices import DeviceArray, driver

WAYS = ("staged", "step", "lanes", "spin")
COUNTS = (1, 7, 1001, 65_537)
# Zeros, infinities, a NaN, one, the least subnormal and the largest number of each.
SPECIALS = {
    "float16": (0, 0x8000, 0x7C00, 0xFC00, 0x7E00, 0x3C00, 0x0001, 0x7BFF),
    "bfloat16": (0, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x3F80, 0x0001, 0x7F7F),
}
LANES_SHARES = 1 << 20  # elements of which lanes take shares: they do not cut them
LANES_BY_TURNS = 65_537  # elements that lanes move where ranks take turns on a device
HALVES = 65536 * 8  # every value with each of these
FORMS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")


def contents(dtype: str, count: int, seed: int) -> Any:
    """Any bits, in pinned memory; booleans are 0 or 1."""
    kind = data.storage(dtype)
    raw = np.random.default_rng(seed).integers(0, 256, count * kind.itemsize, np.uint8)
    array = driver().pinned(count, kind)
    array[:] = (raw & 1 if dtype == "bool" else raw).view(kind)
    return array


def halves(dtype: str, count: int) -> Any:
    """Rank 0 has every value, as far as they are asked for, and the others have special ones."""
    kind = data.storage(dtype)
    array = driver().pinned(count, kind)
    numbers = np.arange(count, dtype=np.int64) * (HALVES // count)
    every, special = numbers % 65536, np.array(SPECIALS[dtype])[(numbers // 65536 + fd.rank()) % 8]
    array[:] = (every if fd.rank() == 0 else special).astype(np.uint16).view(kind)
    return array


def of_host(array: Any, dtype: str) -> Any:
    return _core.Buffer(array.ctypes.data, array.size, dtype, array)


def lengths(kind: str, count: int) -> tuple[int, int]:
    """The lengths of input and output."""
    ranks, rank = fd.size(), fd.rank()
    if kind == "reduce_scatter":
        return count, count // ranks + (rank < count % ranks)
    if kind == "all_to_all":
        return count // ranks * ranks, count // ranks * ranks
    return count, count * ranks if kind == "all_gather" else count


def is_right(
    kind: str, way: str, dtype: str, count: int, *, every: bool = False, **options: Any
) -> tuple[bool, str]:
    """Whether the bits are the host's on this rank, and how it went. `every`: value of a half."""
    given, got = lengths(kind, count)
    x = halves(dtype, count) if every else contents(dtype, given, 1000 * fd.rank() + count)
    wanted = contents(dtype, got, 1)
    fd.world().run(kind, of_host(x, dtype), of_host(wanted, dtype), **options)
    input_, output = DeviceArray(x, dtype), DeviceArray(contents(dtype, got, 2), dtype)
    input_.put()
    output.put()
    getattr(fd, kind)(input_, out=output, algorithm=way, **options)
    path = fd.world().last_path
    output.get()
    right = output.host.tobytes() == wanted.tobytes()
    for array in (input_, output):
        array.free()
    return right, path


def shares_a_device() -> bool:
    """Each hand-over of lanes takes slices of its time then."""
    return len(cuda.devices()) < fd.size()


def cases(most: int) -> Iterator[tuple[str, str, str, int, dict[str, Any]]]:
    counts = (*(count for count in COUNTS if count < most), most)
    for dtype in _core.dtypes:
        for op in _core.reduce_ops if dtype != "bool" else ("max",):
            for way in WAYS:
                for count in counts:
                    if way == "lanes" and shares_a_device() and count > LANES_BY_TURNS:
                        continue
                    size = count * data.storage(dtype).itemsize
                    if way != "spin" or (size <= 64 << 10 and fd.size() > 1):
                        yield "all_reduce", way, dtype, count, {"op": op}
    for dtype in SPECIALS:
        for op in _core.reduce_ops:
            for way in WAYS[:3]:
                if way != "lanes" or not shares_a_device():
                    yield "all_reduce", way, dtype, min(HALVES, most), {"op": op, "every": True}
    for kind in FORMS[1:]:
        for way in WAYS[:3]:
            for count in counts:
                if way == "lanes" and count * fd.size() > LANES_SHARES:
                    continue
                if kind != "all_to_all" or count >= fd.size():
                    yield kind, way, "bfloat16", count, {}


def main() -> int:
    fd.init()
    wrong, done = 0, 0
    for kind, way, dtype, count, options in cases(int(sys.argv[1])):
        right, path = is_right(kind, way, dtype, count, **options)
        went = way == "staged" or path == way
        everywhere = fd.all_reduce(np.array([right and went]), "min")[0]
        done += 1
        if not everywhere:
            wrong += 1
            if fd.rank() == 0:
                print(f"WRONG: {kind} of {count} {dtype} {options}, by {way}, went by {path}")
    if fd.rank() == 0:
        print(f"{done - wrong} of {done} collectives have the host's bits")
    fd.shutdown()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
