"""Plain values as bytes: read as they were, and nothing else is."""

from __future__ import annotations

import contextlib
import math
import struct
import sys
from collections import OrderedDict
from enum import Enum
from typing import Any

import numpy as np
import pytest

from farandole.common._typed import Untyped, read, written
from farandole.data import Share


class Kind(np.float64, Enum):
    ONE = 1.0


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


def test_contents_of_a_dict_are_those_of_its_keys_and_values() -> None:
    value = {np.int64(3): np.int64(4), b"ab": b"cd", np.int32(1): "x" * 100, "x" * 100: b"xy"}
    assert same(value, read(written(value)))


def test_each_nan_is_itself() -> None:
    bits = struct.pack("<Q", 0x7FF8000000000123)
    numbers = [math.nan, -math.nan, struct.unpack("<d", bits)[0]]
    assert struct.pack("<3d", *read(written(numbers))) == struct.pack("<3d", *numbers)
    assert len(read(written(dict.fromkeys(numbers, 1)))) == 3


def test_surrogates_stay_apart() -> None:
    value = {"\ud800\udc00": 1, "\U00010000": 2}
    assert read(written(value)) == value


def test_what_is_there_often_is_written_once() -> None:
    value: Any = b"x" * 1000
    for _ in range(30):
        value = (value, value)
    data = written([value, "y" * 1000, ["y" * 1000] * 100])
    assert len(data) < 5000
    made = read(data)
    for _ in range(30):
        made = [made[0][0]]
    assert made == [b"x" * 1000]


def test_attributes_of_an_ordered_dict_are_kept() -> None:
    value: Any = OrderedDict(a=1)
    value._metadata = {"": {"version": 2}}
    assert vars(read(written(value))) == {"_metadata": {"": {"version": 2}}}


@pytest.mark.parametrize(
    "value",
    [
        {1},
        object(),
        print,
        np.array([None]),
        np.zeros(1, "i4,f4"),
        1 << 5000,
        ValueError("x"),
        Kind.ONE,
        np.zeros(1, np.dtype("i4", metadata={"a": 1})),
    ],
    ids=type,
)
def test_other_values_are_not_written(value: Any) -> None:
    with pytest.raises(Untyped):
        written([value])


def test_deep_values_are_not_written() -> None:
    deep: Any = None
    for _ in range(2 * sys.getrecursionlimit()):
        deep = [deep]
    with pytest.raises(Untyped, match="levels deep"):
        written(deep)


TENSORS = """
    torch.arange(6).reshape(2, 3), torch.ones((), dtype=torch.bfloat16), torch.empty(0, 2),
    torch.tensor([True]), torch.tensor([1 + 2j]), torch.ones(2).to(torch.float8_e4m3fn),
    torch.arange(6).reshape(2, 3).t(), torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    torch.arange(6)[2:4], torch.rand(1, 3, 1).permute(2, 0, 1), torch.float32, torch.Size([2, 0])
"""


def test_tensors_are_read_as_they_were() -> None:
    torch = pytest.importorskip("torch")
    for value in eval(f"[{TENSORS}]", {"torch": torch}):
        got = read(written(value))
        assert type(got) is type(value)
        assert repr(got) == repr(value)
        if isinstance(value, torch.Tensor):
            assert (got.dtype, got.stride()) == (value.dtype, value.stride())
    layer = torch.nn.BatchNorm1d(2)
    state = layer.state_dict()
    got = read(written(state))
    assert (list(got), got._metadata) == (list(state), state._metadata)
    one, other = read(written([state["weight"], state["weight"].detach()]))
    assert one.data_ptr() != other.data_ptr()  # as from a pickle
    for other in (torch.ones(4)[::2], torch.ones(1, requires_grad=True), layer.weight):
        with pytest.raises(Untyped, match=r"a (Tensor|Parameter)"):
            written(other)


def test_damaged_bytes_are_a_value_or_a_value_error() -> None:
    """And never anything that runs."""
    rng, before = np.random.default_rng(7), set(sys.modules)
    whole = written(VALUES)
    for _ in range(3000):
        data = bytearray(whole)
        for place in rng.integers(len(data), size=rng.integers(1, 4)):
            data[place] = rng.integers(256)
        with contextlib.suppress(ValueError):
            read(bytes(data[: rng.integers(len(data) + 1)] if rng.random() < 0.2 else data))

    assert set(sys.modules) == before


@pytest.mark.parametrize(
    "tree",
    ['{"a":1}', '["x","os","system"]', '["x","farandole._world","World"]', '["y"]', '["__init__"]',
     '["n","<f8",[-1],"C",0]', '["n","|O",[1],"C",8]', '["n","<f8",[1000000000],"C",8]', '["r",0]',
     '["b",9]', '["b",-1]', '["d",1]', '["d",["l"],1]',
     '["n","<f8",[9223372036854775807,9223372036854775807],"C",8]',
     '["x","farandole.__main__","main"]', '["e","os","x",[],0]', '[["l"]]', "1e999"],
)  # fmt: skip
def test_words_that_nobody_writes_are_refused(tree: str) -> None:
    data = len(tree).to_bytes(8, "little") + tree.encode()
    with pytest.raises(ValueError, match=r"malformed|bytes"):
        read(data)


def test_contents_that_nobody_asked_for_are_refused() -> None:
    with pytest.raises(ValueError, match="1 bytes are too many"):
        read(written(1) + b"\0")
