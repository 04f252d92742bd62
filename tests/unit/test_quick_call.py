"""The quick way into a collective means what the Python function behind it means."""

from __future__ import annotations

import copy
import inspect
import pickle
import pydoc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import farandole as fd
from farandole import _core, _world

pytestmark = pytest.mark.usefixtures("world_of_one")

CALLS = [
    fd.all_reduce,
    fd.reduce_scatter,
    fd.all_gather,
    fd.broadcast,
    fd.reduce,
    fd.gather,
    fd.scatter,
    fd.all_to_all,
]


def slow(call: Callable[..., Any]) -> Callable[..., Any]:
    return call.__wrapped__  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("call", CALLS)
def test_it_looks_like_the_function_it_stands_before(call: Any) -> None:
    function = slow(call)
    assert inspect.isfunction(function)
    assert inspect.signature(call) == inspect.signature(function)
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(call, name) == getattr(function, name)
    assert "Examples:" in pydoc.render_doc(call)
    assert f"{call.__name__}(" in pydoc.plain(pydoc.render_doc(call))
    assert pickle.loads(pickle.dumps(call)) is call
    assert copy.deepcopy(call) is call
    assert call.__name__ in repr(call)


def test_it_binds_to_instances_as_a_function_does() -> None:
    class Model:
        reduce = fd.all_reduce

        def __array__(self, **_: object) -> Any:
            return np.ones(2)

    with pytest.raises(fd.InvalidArgument, match="Model"):
        Model().reduce()


def big_endian() -> Any:
    return np.ones(3, ">f4")


def read_only() -> Any:
    array = np.ones(4, np.float32)
    array.flags.writeable = False
    return array


class Subclass(np.ndarray[Any, Any]):
    pass


def bfloat16_of_ml_dtypes() -> Any:
    return np.arange(6).astype(pytest.importorskip("ml_dtypes").bfloat16)


def float8_of_ml_dtypes() -> Any:
    return np.arange(6).astype(pytest.importorskip("ml_dtypes").float8_e5m2)


#: Arrays known and unknown; those that are refused are so by both ways, in the same words.
ARRAYS: dict[str, Callable[[], Any]] = {
    "plain": lambda: np.arange(7, dtype=np.float32),
    "0-d": lambda: np.array(3.0),
    "empty": lambda: np.empty((0, 3), np.int16),
    "3-d": lambda: np.arange(24, dtype=np.int64).reshape(2, 3, 4),
    "one column of one": lambda: np.arange(6.0).reshape(6, 1)[:, :1],
    "fortran": lambda: np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "strided": lambda: np.arange(10.0)[::2],
    "big endian": big_endian,
    "read-only": read_only,
    "unaligned": lambda: np.frombuffer(bytearray(13), np.uint8)[1:].view(np.float32),
    "subclass": lambda: np.arange(3.0).view(Subclass),
    "bfloat16": bfloat16_of_ml_dtypes,
    "float8": float8_of_ml_dtypes,
    "complex": lambda: np.ones(3, complex),
    "dates": lambda: np.zeros(3, "M8[s]"),
    "bytes": lambda: bytearray(b"abcd"),
    "scalar": lambda: np.float32(3),
    "number": lambda: 3.5,
    "list": lambda: [1.0],
    "none": lambda: None,
}


def outcome(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    try:
        result = np.asarray(call(*arguments, **options))
    except (TypeError, ValueError, AttributeError, fd.Error) as error:
        return type(error), str(error)
    return result.dtype, result.shape, result.tobytes()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", ARRAYS)
def test_every_array_is_taken_or_refused_alike(call: Any, kind: str) -> None:
    make = ARRAYS[kind]
    assert outcome(call, make()) == outcome(slow(call), make())
    assert outcome(call, make(), out=make()) == outcome(slow(call), make(), out=make())
    one, other = make(), make()
    assert outcome(call, one, out=one) == outcome(slow(call), other, out=other)


OPTIONS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    (("mean",), {}),
    (("su" + "mm"[:1],), {}),
    ((), {"op": "max", "prescale": 2.0, "postscale": 0.5}),
    ((), {"prescale": 2, "postscale": np.float32(3)}),
    ((), {"op": "median"}),
    ((), {"op": None}),
    (("sum",), {"op": "sum"}),
    ((), {"out": None, "group": None, "name": None, "async_op": False, "timeout": None}),
    ((), {"name": "x"}),
    ((), {"name": 3}),
    ((), {"level": "fast"}),
    ((), {"algorithm": "cico"}),
    ((), {"timeout": -1}),
    ((), {"timeout": 5}),
    ((), {"root": 0}),
    ((), {"root": 1}),
    ((), {"root": 1 << 70}),
    ((), {"root": -1, "out": np.ones(4, np.float32)}),
    (("sum", 0), {}),
    (("sum", 0), {"root": 0}),
    (([4],), {}),
    ((), {"splits": [4]}),
    ((), {"counts": [4]}),
    ((), {"counts": None}),
    ((), {"uneven": True}),
    ((), {"out": np.ones((2, 2), np.float32)}),
    ((0,), {}),
    ((7,), {}),
    (("sum", "sum"), {}),
    ((), {"x": 3}),
    ((), {"unheard": None}),
    ((), {"group": "world"}),
    ((), {"out": np.ones(3)}),
    ((), {"out": np.ones(4, np.float64)}),
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("given", OPTIONS, ids=str)
def test_every_option_is_taken_or_refused_alike(call: Any, given: Any) -> None:
    places, options = given
    x = np.arange(4, dtype=np.float32)
    assert outcome(call, x.copy(), *places, **options) == outcome(
        slow(call), x.copy(), *places, **options
    )


def test_it_needs_something_to_work_on() -> None:
    for call in CALLS:
        if call is fd.scatter:  # ranks that are not the root have nothing
            with pytest.raises(fd.InvalidArgument):
                call()
            continue
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
            call()  # type: ignore[call-arg]


@pytest.mark.parametrize("dtype", [name for name in _core.dtypes if name != "bfloat16"])
def test_it_keeps_every_element_type(dtype: str) -> None:
    x = np.ones(5, dtype)
    result = fd.all_reduce(x)
    assert result.dtype == x.dtype
    assert result is not x
    assert (result == x).all()


def test_integers_of_one_width_are_one_type_whatever_c_calls_them() -> None:
    for code in "lq":
        assert (fd.all_reduce(np.arange(3, dtype=code)) == np.arange(3)).all()


def test_what_differs_from_the_call_before_is_checked_anew() -> None:
    flags, numbers, out = np.array([True, False]), np.ones(2, np.int8), np.zeros(2, np.int8)
    for _ in range(2):
        fd.all_reduce(flags, "max", out=flags)
    with pytest.raises(fd.InvalidArgument, match="mean has no meaning on bool"):
        fd.all_reduce(flags, "mean", out=flags)
    with pytest.raises(fd.InvalidArgument, match="booleans cannot be scaled"):
        fd.all_reduce(flags, "max", out=flags, prescale=2.0)
    with pytest.raises(fd.InvalidArgument, match="output has 2 elements"):
        fd.all_reduce(flags[:1], "max", out=flags)
    for factor in (2.0, 2.0, 3.0, 3.0):
        assert fd.all_reduce(numbers, out=out, postscale=factor).tolist() == [factor] * 2
    assert fd.broadcast(numbers, 0, out=out).tolist() == [1, 1]
    with pytest.raises(fd.InvalidArgument, match="root 1 is not a rank"):
        fd.broadcast(numbers, 1, out=out)


def test_it_holds_on_to_nothing() -> None:
    import sys

    x, out = np.ones(5), np.ones(5)
    before = sys.getrefcount(x), sys.getrefcount(out), sys.getrefcount(_world._state.group)
    for _ in range(100):
        fd.all_reduce(x, out=out)
        fd.all_reduce(x, "mean", out=x)
        fd.all_reduce(x)
        with pytest.raises(fd.InvalidArgument):
            fd.all_reduce(x, out=out[:2])
    after = sys.getrefcount(x), sys.getrefcount(out), sys.getrefcount(_world._state.group)
    assert after == before


def test_without_a_world_it_says_so() -> None:
    state = _world._state
    group, state.group = state.group, None
    try:
        with pytest.raises(fd.NotInitialized):
            fd.all_reduce(np.ones(3))
    finally:
        state.group = group


def test_a_buffer_says_where_it_lies() -> None:
    array = np.arange(3, dtype=np.float32)
    buffer = _core.Buffer(array.ctypes.data, array.size, "float32", array)
    assert fd.all_reduce(buffer, prescale=2.0, out=buffer) is buffer
    assert array.tolist() == [0, 2, 4]


def test_torch_tensors_are_read_where_they_lie() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    assert fd.all_reduce(tensor, prescale=2.0, out=tensor) is tensor
    assert tensor.tolist() == [[0, 2, 4], [6, 8, 10]]
    watched = torch.ones(3, requires_grad=True)
    for bad in (watched, tensor.T, torch.nn.Parameter(torch.ones(3))):
        assert outcome(slow(fd.all_reduce), bad, out=bad)[0] is fd.InvalidArgument
        with pytest.raises(fd.InvalidArgument):
            fd.all_reduce(bad, out=bad)
