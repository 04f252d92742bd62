"""Functions that XLA calls on a CUDA device, called as XLA would over the fake driver: JAX itself
is not needed. Results are the host's, in the stream that XLA names."""

from __future__ import annotations

import ctypes as c
import os
import resource
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from fake_device import Array, Rank, contents

import farandole as fd
from farandole import _core, _world
from harness import World

Start = Callable[..., World]

CODES = {"float32": 11, "float16": 10, "uint32": 8, "int32": 4}
VOID = c.c_void_p
BASE = [("struct_size", c.c_size_t), ("extensions", VOID)]


# ---- XLA's structs (csrc/jax/ffi.h) ----


class Buffer(c.Structure):
    _fields_ = [
        *BASE, ("dtype", c.c_int), ("data", VOID), ("rank", c.c_int64),
        ("dims", c.POINTER(c.c_int64)),
    ]  # fmt: skip


class Text(c.Structure):
    _fields_ = [("data", c.c_char_p), ("size", c.c_size_t)]


class Scalar(c.Structure):
    _fields_ = [("dtype", c.c_int), ("value", VOID)]


class Values(c.Structure):
    _fields_ = [
        *BASE, ("size", c.c_int64), ("types", c.POINTER(c.c_int)), ("values", c.POINTER(VOID)),
    ]  # fmt: skip


class Attributes(c.Structure):
    _fields_ = [
        *BASE, ("size", c.c_int64), ("types", c.POINTER(c.c_int)), ("names", c.POINTER(VOID)),
        ("values", c.POINTER(VOID)),
    ]  # fmt: skip


class ErrorCreate(c.Structure):
    _fields_ = [*BASE, ("message", c.c_char_p), ("code", c.c_int)]


class StreamGet(c.Structure):
    _fields_ = [*BASE, ("context", VOID), ("stream", VOID)]


class Api(c.Structure):
    _fields_ = [
        *BASE, ("version", c.c_byte * 24), ("internal", VOID), ("error_create", VOID),
        ("error_get_message", VOID), ("error_destroy", VOID), ("handler_register", VOID),
        ("stream_get", VOID), ("others", VOID * 11),
    ]  # fmt: skip


class Frame(c.Structure):
    _fields_ = [
        *BASE, ("api", c.POINTER(Api)), ("context", VOID), ("stage", c.c_int),
        ("arguments", Values), ("results", Values), ("attributes", Attributes), ("future", VOID),
    ]  # fmt: skip


class Runtime:
    """XLA as a handler sees it: one stream, and errors that are texts."""

    def __init__(self, stream: int | None) -> None:
        self.texts: list[str] = []
        self.kept: list[Any] = []

        def create(arguments: Any) -> int:
            self.texts.append(arguments.contents.message.decode())
            return len(self.texts)

        def stream_of(arguments: Any) -> int:
            arguments.contents.stream = stream
            return 0 if stream else 77

        def destroy(_: Any) -> None:
            self.texts.append("destroyed")

        self.api = Api(struct_size=c.sizeof(Api))
        for name, kind, function in (
            ("error_create", c.CFUNCTYPE(c.c_size_t, c.POINTER(ErrorCreate)), create),
            ("stream_get", c.CFUNCTYPE(c.c_size_t, c.POINTER(StreamGet)), stream_of),
            ("error_destroy", c.CFUNCTYPE(None, VOID), destroy),
        ):
            pointer = self.keep(kind(function))
            setattr(self.api, name, c.cast(pointer, VOID))

    def keep(self, thing: Any) -> Any:
        self.kept.append(thing)
        return thing

    def values(self, arrays: Sequence[Array]) -> Values:
        n = len(arrays)
        buffers = (Buffer * n)()
        for buffer, array in zip(buffers, arrays, strict=True):
            dims = self.keep((c.c_int64 * max(len(array.shape), 1))(*array.shape))
            buffer.struct_size, buffer.dtype = c.sizeof(Buffer), CODES[array.dtype]
            buffer.data, buffer.rank, buffer.dims = array.address, len(array.shape), dims
        places = self.keep((VOID * n)(*map(c.addressof, self.keep(buffers))))
        types = self.keep((c.c_int * n)(*[1] * n))
        return Values(c.sizeof(Values), None, n, types, places)

    def attributes(self, **given: Any) -> Attributes:
        n = len(given)
        kinds, values = (c.c_int * n)(), (VOID * n)()
        for i, value in enumerate(given.values()):
            kinds[i] = 4 if isinstance(value, str) else 3
            if isinstance(value, str):
                said = self.keep(Text(value.encode(), len(value)))
            else:
                whole = isinstance(value, int)
                number = self.keep(c.c_int64(value) if whole else c.c_double(value))
                said = self.keep(Scalar(5 if whole else 12, c.addressof(number)))
            values[i] = c.addressof(said)
        texts = [self.keep(Text(name.encode(), len(name))) for name in given]
        names = (VOID * n)(*map(c.addressof, texts))
        for each in (kinds, values, names):
            self.keep(each)
        return Attributes(c.sizeof(Attributes), None, n, kinds, names, values)

    def call(
        self, target: str, arguments: Sequence[Array], results: Sequence[Array], **given: Any
    ) -> str:
        """The error's text, or none."""
        frame = Frame(
            struct_size=c.sizeof(Frame), api=c.pointer(self.api), stage=3,
            arguments=self.values(arguments), results=self.values(results),
            attributes=self.attributes(**given),
        )  # fmt: skip
        get = c.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = VOID, [c.py_object, VOID]
        handler = get(_core.jax.targets()[target]["CUDA"], None)
        error = c.CFUNCTYPE(c.c_size_t, c.POINTER(Frame))(handler)(c.byref(frame))
        assert not frame.future
        return self.texts[error - 1] if error else ""


class Program:
    """A rank's program on a device: its runtime, its token, its calls."""

    def __init__(self, stream: bool = True) -> None:
        self.rank = Rank()
        self.runtime = Runtime(self.rank.machine.streams[0].value if stream else None)
        self.token = self.rank.array(1, "uint32").put(bytes(4))
        _core.jax.attach(_world.world(), {})

    def collective(
        self, kind: str, arguments: Sequence[Array], results: Sequence[Array], **given: Any
    ) -> str:
        attributes = {
            "kind": kind, "label": f"{kind} of a program", "op": "sum", "postscale": 1.0,
            "prescale": 1.0, "ranks": "", "root": 0, "size": fd.size(),
        } | given  # fmt: skip
        return self.runtime.call(
            "farandole_collective", [*arguments, self.token], [*results, self.token], **attributes
        )

    def filled(self, shape: tuple[int, ...], dtype: str, seed: int) -> tuple[Array, bytes]:
        array = self.rank.array(shape, dtype)
        raw = contents(dtype, array.count, 1000 * fd.rank() + seed)
        return array.put(raw), raw


def host(kind: str, raw: bytes, dtype: str, **options: Any) -> bytes:
    given = np.frombuffer(raw, dtype)
    results = {
        "all_reduce": lambda: fd.all_reduce(given, **options),
        "all_gather": lambda: fd.all_gather(given),
        "broadcast": lambda: fd.broadcast(given.copy(), **options),
    }
    return bytes(np.ascontiguousarray(results[kind]()).view(np.uint8))


# ---- calls ----


def collectives() -> None:
    program = Program()
    in_place = [program.filled(shape, "float32", i) for i, shape in enumerate([(3,), (0,), (5, 7)])]
    arrays = [array for array, _ in in_place]
    assert program.collective("all_reduce", arrays, arrays, op="mean", prescale=0.5) == ""
    for array, raw in in_place:
        assert array.get() == host("all_reduce", raw, "float32", op="mean", prescale=0.5)
    x, raw = program.filled((1001, 2), "float16", 9)
    y = program.rank.array((fd.size() * 1001, 2), "float16")
    assert program.collective("all_gather", [x], [y]) == ""
    assert y.get() == host("all_gather", raw, "float16")
    assert x.get() == raw
    z, raw = program.filled((300_001,), "int32", 10)
    assert program.collective("broadcast", [z], [z], root=fd.size() - 1) == ""
    assert z.get() == host("broadcast", raw, "int32", root=fd.size() - 1)
    assert program.collective("barrier", [], []) == ""
    assert np.frombuffer(program.token.get(), np.uint32) == 4, "calls so far"
    program.rank.end()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_results_are_the_hosts(start: Start, size: int) -> None:
    start(size, "jax", FAKE_CUDA_JITTER="3").run(collectives)


def checksums() -> None:
    program = Program()
    arrays = [program.filled((n,), "float32", n) for n in (1, 0, 77_777)]
    sums = program.rank.array((6,), "uint32")
    given = [array for array, _ in arrays]
    assert program.runtime.call("farandole_checksums", given, [sums]) == ""
    expected = _core.checksums([np.frombuffer(raw, np.uint8) for _, raw in arrays])
    assert np.frombuffer(sums.get(), np.uint64).tolist() == expected
    step = program.rank.array((1,), "uint32").put(np.uint32(1).tobytes())
    zero = program.rank.array((1,), "uint32").put(np.uint32(5).tobytes())
    both = [np.array([7, 8], np.uint64), np.array([7, 9], np.uint64)]
    for second, differs in ((both[0], False), (both[1], True)):
        raw = np.concatenate([both[0], second]).tobytes()
        table = program.rank.array((8,), "uint32").put(raw)
        said = program.runtime.call(
            "farandole_weights", [table, step], [zero],
            names="bias\nkernel", ranks="0\n1", line="broadcast them", period=100,
        )  # fmt: skip
        assert ("Mismatch" in said and "kernel" in said) == differs, said
        assert np.frombuffer(zero.get(), np.uint32) == 0
    program.rank.end()


def test_weights_are_compared(start: Start) -> None:
    start(2, "jax", FAKE_CUDA_JITTER="5").run(checksums)


def waits_for_its_arrays() -> int:
    """How often the thread that calls is woken while the device does something else for 0.4 s."""
    program = Program()
    x, raw = program.filled((10,), "float32", 1)
    later = threading.Timer(0.4, program.rank.machine.keep_busy(0))
    later.start()
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    assert program.collective("all_reduce", [x], [x]) == ""
    woken = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before
    later.join()
    assert x.get() == host("all_reduce", raw, "float32")
    program.rank.end()
    return woken


def test_a_call_sleeps_until_its_arrays_have_come(start: Start) -> None:
    assert max(start(2, "jax").run(waits_for_its_arrays)) < 1000


# ---- what goes wrong ----


def without_a_stream() -> str:
    program = Program(stream=os.environ["RANK"] != "1")
    x, _ = program.filled((10,), "float32", 1)
    return program.collective("all_reduce", [x], [x])


def with_a_failing_copy() -> str:
    program = Program()
    x, _ = program.filled((10,), "float32", 1)
    if fd.rank() == 1:
        program.rank.machine.fail("cuMemcpyAsync", 1, 700)
    return program.collective("all_reduce", [x], [x])


@pytest.mark.parametrize(
    ("case", "says"),
    [
        (without_a_stream, "rank 1: XLA names no stream"),
        (with_a_failing_copy, "rank 1: cannot copy"),
    ],
)
def test_what_fails_on_one_rank_is_named_by_all(
    start: Start, case: Callable[[], str], says: str
) -> None:
    for said in start(2, "jax").run(case):
        assert says in said


def shapes_that_differ() -> str:
    program = Program()
    x, _ = program.filled((10 + fd.rank(),), "float32", 1)
    return program.collective("all_reduce", [x], [x])


def test_ranks_that_give_others_are_refused(start: Start) -> None:
    for said in start(2, "jax").run(shapes_that_differ):
        assert said.startswith("Mismatch: ")
        assert "10" in said
        assert "11" in said
