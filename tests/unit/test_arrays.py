"""Bad input: refused on this rank, in words, before anything is sent; the next call works."""

from __future__ import annotations

import array
import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import farandole as fd
from farandole import _core

pytestmark = pytest.mark.usefixtures("world_of_one")


class OnDevice:
    """Has only what a device array has: DLPack, and no host memory."""

    shape = (3,)

    def __dlpack__(self, **_: object) -> object:
        raise BufferError("this array is on a CUDA device")

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)


def read_only() -> Any:
    array = np.ones(4)
    array.flags.writeable = False
    return array


def overlapping() -> tuple[Any, Any]:
    memory = np.ones(10)
    return memory[:6], memory[2:8]


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "transposed": (lambda: fd.all_reduce(np.ones((3, 4)).T), "not contiguous"),
    "strided": (lambda: fd.all_reduce(np.ones(10)[::2]), "not contiguous"),
    "reversed": (lambda: fd.all_reduce(np.ones(10)[::-1]), "not contiguous"),
    "strided output": (lambda: fd.all_reduce(np.ones(5), out=np.ones(10)[::2]), "not contiguous"),
    "read-only output": (lambda: fd.all_reduce(np.ones(4), out=read_only()), "read-only"),
    "read-only in place": (lambda: (lambda x: fd.all_reduce(x, out=x))(read_only()), "read-only"),
    "bytes output": (lambda: fd.all_reduce(b"abcd", out=b"abcd"), "read-only"),
    "complex": (lambda: fd.all_reduce(np.ones(3, complex)), "unsupported element type"),
    "long double": (lambda: fd.all_reduce(np.ones(3, np.longdouble)), "unsupported element type"),
    "structured": (lambda: fd.all_reduce(np.ones(3, "f4,f4")), "unsupported element type"),
    "big endian": (lambda: fd.all_reduce(np.ones(3, ">f4")), "unsupported element type"),
    "objects": (lambda: fd.all_reduce(np.array([None, 1])), "unsupported element type"),
    "text": (lambda: fd.all_reduce(np.array(["a"])), "unsupported element type"),
    "letters": (lambda: fd.all_reduce(array.array("u", "ab")), "unsupported element type"),
    "dates": (lambda: fd.all_reduce(np.array(["2020-01-01"], "M8[D]")), "cannot be borrowed"),
    "list": (lambda: fd.all_reduce([1, 2]), "input is a list"),
    "tuple": (lambda: fd.all_reduce((1, 2)), "input is a tuple"),
    "string": (lambda: fd.all_reduce("abc"), "input is a str"),
    "none": (lambda: fd.all_gather(None), "input is a NoneType"),
    "object": (lambda: fd.broadcast(object()), "neither the buffer protocol nor __dlpack__"),
    "output without protocol": (lambda: fd.all_reduce(np.ones(2), out=object()), "output is a"),
    "device": (lambda: fd.all_reduce(OnDevice(), out=np.ones(3)), "is on a CUDA device"),
    "op": (lambda: fd.all_reduce(np.ones(3), "average"), "op 'average' is unknown; there are sum,"),
    "level": (lambda: fd.all_reduce(np.ones(3), level="exact"), "level 'exact' is unknown"),
    "algorithm": (lambda: fd.all_reduce(np.ones(3), algorithm="magic"), "'magic' does not exist"),
    "too large for a path": (
        lambda: fd.all_reduce(np.ones(9999), algorithm="ll"),
        "'ll' can",
    ),
    "path of another kind": (lambda: fd.all_gather(np.ones(9), algorithm="mapped"), "'mapped' can"),
    "mean of booleans": (lambda: fd.all_reduce(np.ones(3, bool), "mean"), "no meaning on bool"),
    "scaled booleans": (lambda: fd.all_reduce(np.ones(3, bool), prescale=2), "cannot be scaled"),
    "root": (lambda: fd.broadcast(np.ones(3), root=1), "root 1 is not a rank"),
    "negative root": (lambda: fd.broadcast(np.ones(3), root=-1), "root -1 is not a rank"),
    "output size": (lambda: fd.all_reduce(np.ones(3), out=np.ones(4)), "output has 4 elements"),
    "output dtype": (lambda: fd.all_reduce(np.ones(3), out=np.ones(3, "f4")), "output is float32"),
    "gathered size": (lambda: fd.all_gather(np.ones(3), out=np.ones(2)), "output has 2 elements"),
    "overlap": (lambda: (lambda a, b: fd.all_reduce(a, out=b))(*overlapping()), "overlap"),
    "timeout": (lambda: fd.all_reduce(np.ones(3), timeout=float("nan")), "not a number"),
    "negative timeout": (lambda: fd.barrier(timeout=-3), "timeout=-3 is not a number of seconds"),
    "timeout of a wait": (
        lambda: fd.all_reduce(np.ones(3), async_op=True).wait(timeout="soon"),
        "timeout='soon' is not a number of seconds",
    ),
    "name": (lambda: fd.all_reduce(np.ones(3), name=3), "name=3 is not a string"),
    "fractional shape": (lambda: fd.allocate(2.5), "shape 2.5 is not"),
    "fractional dimension": (lambda: fd.allocate((2, 2.5)), "shape (2, 2.5) is not"),
    "negative shape": (lambda: fd.allocate(-1), "negative dimension"),
    "negative dimension": (lambda: fd.allocate((2, -1)), "negative dimension"),
    "dtype by name": (lambda: _core.Buffer(0, 1, "float128"), "float128 is not supported"),
    "collective": (lambda: fd.world().run("all_to_none", np.ones(1), np.ones(1)), "is unknown"),
    "color": (lambda: fd.split(-1), "color -1 is negative"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_and_the_next_call_works(name: str) -> None:
    call, reason = BAD[name]
    with pytest.raises(fd.InvalidArgument) as refusal:
        call()
    assert reason in refusal.value.verdict
    assert fd.all_reduce(np.ones(3)).tolist() == [1, 1, 1]


def test_more_memory_than_there_is() -> None:
    with pytest.raises(fd.ResourceError, match="cannot hold"):
        fd.allocate(1 << 55, np.uint8)
    with pytest.raises(fd.ResourceError, match="no machine has"):
        fd.allocate(1 << 70)
    assert fd.allocate(3).tolist() == [0, 0, 0]


def test_timeouts_of_any_size() -> None:
    for timeout in (0.5, 1e6, 1e10, 1e300, float("inf")):
        assert fd.all_reduce(np.ones(3), timeout=timeout).tolist() == [1, 1, 1]
        handle = fd.all_reduce(np.ones(3), async_op=True)
        assert handle.wait(timeout=timeout).tolist() == [1, 1, 1]


def test_shapes_are_what_numpy_takes() -> None:
    assert fd.allocate(np.int64(3)).shape == (3,)
    assert fd.allocate([np.int32(2), 3]).shape == (2, 3)
    assert fd.allocate(()).shape == ()


def test_allocated_memory_is_zero_again() -> None:
    for _ in range(20):
        array = fd.allocate((100, 100), "int32")
        assert not array.any()
        assert array.flags.c_contiguous
        assert array.flags.writeable
        array[:] = 7
        del array
    assert fd.allocate(0).shape == (0,)
    assert fd.allocate((3, 0, 2)).shape == (3, 0, 2)
    assert fd.allocate(()).shape == ()


def test_what_is_allocated_is_given_back() -> None:
    before = fd.world().counters()["arena_bytes"]
    arrays = [fd.allocate(10_000) for _ in range(30)]
    views = [array[5:] for array in arrays]
    del arrays
    assert fd.world().counters()["arena_bytes"] > before, "views keep it"
    del views
    assert fd.world().counters()["arena_bytes"] == before


def test_arrays_of_other_kinds() -> None:
    assert fd.all_reduce((ctypes.c_int * 3)(1, 2, 3)).tolist() == [1, 2, 3]
    assert fd.all_reduce(np.ones((0, 3))).shape == (0, 3)
    assert fd.all_reduce(np.asfortranarray(np.ones((3, 1)))).shape == (3, 1)
    assert fd.all_reduce(np.ma.masked_array([1.0, 2.0])).tolist() == [1, 2]


def test_the_output_is_what_was_given() -> None:
    out = np.empty(3)
    assert fd.all_reduce(np.ones(3), out=out) is out
    assert fd.all_reduce(np.ones(3), out=out, async_op=True).wait() is out


@pytest.mark.parametrize("dtype", _core.dtypes)
def test_every_dtype_by_address(dtype: str) -> None:
    bits = np.arange(64, dtype=np.uint8)
    count = 32 // {"64": 8, "32": 4, "16": 2}.get(dtype[-2:], 1)
    out = np.zeros(64, np.uint8)
    fd.world().run(
        "broadcast",
        _core.Buffer(bits.ctypes.data, count, dtype),
        _core.Buffer(out.ctypes.data, count, dtype),
    )
    assert (out[:32] == bits[:32]).all()
    assert not out[32:].any()
