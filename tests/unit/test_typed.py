"""Plain values as bytes: read as they were, and nothing else is."""

from __future__ import annotations

import contextlib
import math
import sys
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest

from farandole.common._typed import Untyped, read, written
from farandole.data import Share

VALUES = [
    None, True, 0, -(2**70), 1.5, -0.0, math.inf, 1 + 2j, complex(math.nan, -math.inf),
    "ü\0\ud800", b"\0\xff", [], (), {}, [1, [2, (3, None)]], {"a": 1, 2: (b"x",), (1, "b"): [True]},
    OrderedDict(b=1, a=2), Share(3, 7), np.float32(1.5), np.bool_(True), np.int8(-1),
    np.datetime64("2026-01-02"),
    np.arange(6, dtype=">i2").reshape(2, 3), np.asfortranarray(np.eye(3)),
    np.float16(2) * np.ones(()),
    np.empty((0, 3)), np.array(["ab", "c"]), np.array([b"ab", b"c"]), np.array([True, False]),
    np.arange(12)[::2], [np.arange(2), np.arange(2)],
]  # fmt: skip


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        layout = one.dtype == other.dtype and one.shape == other.shape
        return layout and one.tobytes() == other.tobytes() and other.flags.writeable
    if isinstance(one, dict):
        return list(map(same, one.items(), other.items())) == [True] * len(one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other)


@pytest.mark.parametrize("value", VALUES, ids=type)
def test_a_value_is_read_as_it_was(value: Any) -> None:
    assert same(value, read(written(value)))
    assert same([value, {"x": value}], read(written([value, {"x": value}])))


def test_order_of_memory_is_kept() -> None:
    assert read(written(np.asfortranarray(np.ones((2, 3))))).flags.f_contiguous


def test_what_is_there_twice_is_one_object_again() -> None:
    array, circle = np.arange(3), list[Any]()
    circle.append(circle)
    a, b, c = read(written([array, array, circle]))
    assert a is b
    assert c[0] is c


@pytest.mark.parametrize(
    "value",
    [{1}, object(), print, np.array([None]), np.zeros(1, "i4,f4"), 1 << 5000, ValueError("x")],
    ids=type,
)
def test_other_values_are_not_written(value: Any) -> None:
    with pytest.raises(Untyped):
        written([value])


def test_deep_values_are_not_written() -> None:
    deep: Any = None
    for _ in range(2 * sys.getrecursionlimit()):
        deep = [deep]
    with pytest.raises(Untyped, match="nested too deeply"):
        written(deep)


def test_tensors_are_read_as_they_were() -> None:
    torch = pytest.importorskip("torch")
    for tensor in (
        torch.arange(6).reshape(2, 3), torch.ones((), dtype=torch.bfloat16), torch.empty(0, 2),
        torch.tensor([True]), torch.tensor([1 + 2j]), torch.ones(2).to(torch.float8_e4m3fn),
    ):  # fmt: skip
        got = read(written(tensor))
        assert got.dtype == tensor.dtype
        assert got.shape == tensor.shape
        assert repr(got) == repr(tensor)
    kinds = [torch.float32, torch.Size([2, 0])]
    assert read(written(kinds)) == kinds
    assert type(read(written(kinds))[1]) is torch.Size
    tied = torch.nn.Linear(2, 2).state_dict()
    weight = tied["weight"]
    got = read(written({**tied, "again": weight.detach()}))
    assert got["again"].data_ptr() == got["weight"].data_ptr()
    for other in (weight.t(), torch.ones(1, requires_grad=True), torch.nn.Parameter(weight)):
        with pytest.raises(Untyped):
            written(other)
    with pytest.raises(Untyped, match="share memory in part"):
        written([weight, weight[1:]])


def test_damaged_bytes_are_a_value_or_a_value_error() -> None:
    """And never anything that runs."""
    rng = np.random.default_rng(7)
    whole = written(VALUES)
    for _ in range(3000):
        data = bytearray(whole)
        for place in rng.integers(len(data), size=rng.integers(1, 4)):
            data[place] = rng.integers(256)
        with contextlib.suppress(ValueError):
            read(bytes(data[: rng.integers(len(data) + 1)] if rng.random() < 0.2 else data))


@pytest.mark.parametrize(
    "tree",
    ['{"a":1}', '["x","os","system"]', '["x","farandole._world","World"]', '["y"]', '["__init__"]',
     '["n","<f8",[-1],"C",0]', '["n","|O",[1],"C",8]', '["n","<f8",[1000000000],"C",8]', '["r",0]',
     '["b",9]', '["b",-1]', '["d",1]', '["d",["l"],1]', '["e","os","x",[],0]', '[["l"]]', "1e999"],
)  # fmt: skip
def test_words_that_nobody_writes_are_refused(tree: str) -> None:
    data = len(tree).to_bytes(8, "little") + tree.encode()
    with pytest.raises(ValueError, match=r"malformed|bytes"):
        read(data)


def test_contents_that_nobody_asked_for_are_refused() -> None:
    with pytest.raises(ValueError, match="1 bytes are too many"):
        read(written(1) + b"\0")
