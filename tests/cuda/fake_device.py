"""Arrays on the fake driver's devices (fake_libcuda), as a framework would have them: memory of the
driver's, a stream in which their owner works, and what tells others of both."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import farandole as fd
import harness
from farandole import _core

PROOF = "farandole_fold_uint32"
# DLPack's codes; bits follow from the size.
CODES = {"bool": 6, "bfloat16": 4, "i": 0, "u": 1, "f": 2}


def width_of(dtype: str) -> int:
    return {"bool": 1, "bfloat16": 2}.get(dtype) or int(dtype.lstrip("uintfloa")) // 8


class _Control(ctypes.Structure):
    """FakeControl of fake_libcuda/control.h."""

    _fields_ = [
        ("reset", ctypes.CFUNCTYPE(None)),
        ("configure", ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)),
        ("fail", ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_int, ctypes.c_int)),
        ("lose", ctypes.CFUNCTYPE(None, ctypes.c_int)),
        ("hold", ctypes.CFUNCTYPE(None, ctypes.c_bool)),
        ("calls", ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_char_p)),
        ("log", ctypes.CFUNCTYPE(ctypes.c_char_p)),
        ("clear_log", ctypes.CFUNCTYPE(None)),
        ("launches", ctypes.CFUNCTYPE(ctypes.c_char_p)),
        ("misuse", ctypes.CFUNCTYPE(ctypes.c_char_p)),
        ("alive", ctypes.CFUNCTYPE(ctypes.c_char_p)),
        ("forget", ctypes.CFUNCTYPE(None)),
    ]


class Machine:
    """The driver of this process, which farandole finds by its name once it is loaded."""

    def __init__(self) -> None:
        self.driver = ctypes.CDLL(os.environ["FAKE_LIBCUDA"])
        get = self.driver.fake_cuda_control
        get.restype = ctypes.POINTER(_Control)
        self.control = get().contents
        self.call("cuInit", 0)
        self.contexts: dict[int, ctypes.c_void_p] = {}
        self.arrays: list[Array] = []
        self.arrivals: ctypes.c_void_p | None = None  # the stream in which arrays reach the host
        self.streams: dict[int, ctypes.c_void_p] = {}
        self.gates: list[Any] = []  # at which streams wait
        self.enter(0)

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self.driver, name)(*arguments)
        assert code == 0, f"{name}: {code}"

    def enter(self, device: int) -> None:
        """Its primary context is the current one of this thread, as a framework leaves it."""
        new = device not in self.contexts
        if new:
            self.contexts[device] = ctypes.c_void_p()
            context = ctypes.byref(self.contexts[device])
            self.call("cuDevicePrimaryCtxRetain", context, device)
        self.call("cuCtxPushCurrent_v2", self.contexts[device])
        if new:
            self.streams[device] = self.made("cuStreamCreateWithPriority", 1, 0)

    @contextlib.contextmanager
    def on(self, device: int) -> Iterator[None]:
        self.enter(device)
        yield
        self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def made(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self.call(name, ctypes.byref(handle), *arguments)
        return handle

    def allocate(self, size: int) -> int:
        address = ctypes.c_ulonglong()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(size, 1)))
        return address.value

    def order(self, earlier: Any, later: Any) -> None:
        """Later work in one stream waits for the work that is in another."""
        event = self.made("cuEventCreate", 2)
        self.call("cuEventRecord", event, earlier)
        self.call("cuStreamWaitEvent", later, event, 0)
        self.call("cuEventDestroy_v2", event)

    def copy(self, to: int, source: int, size: int, stream: Any) -> None:
        to_, from_ = ctypes.c_ulonglong(to), ctypes.c_ulonglong(source)
        self.call("cuMemcpyAsync", to_, from_, ctypes.c_size_t(size), stream)

    @contextlib.contextmanager
    def captured(self, device: int = 0) -> Iterator[ctypes.c_void_p]:
        """Captures work that is put into the device's stream, and yields its graph."""
        graph, stream = ctypes.c_void_p(), self.streams[device]
        with self.on(device):
            self.call("cuStreamBeginCapture_v2", stream, 0)
        try:
            yield graph
        finally:
            with self.on(device):
                self.call("cuStreamEndCapture", stream, ctypes.byref(graph))

    def launch(self, graph: ctypes.c_void_p, device: int = 0) -> None:
        with self.on(device):
            self.call("cuGraphLaunch", graph, self.streams[device])

    def destroy(self, *graphs: ctypes.c_void_p) -> None:
        """None of the graphs may be running."""
        with self.on(0):
            for graph in graphs:
                self.call("cuGraphDestroy", graph)

    def keep_busy(self, device: int, stream: Any = None) -> Callable[[], None]:
        """Blocks a stream alone, by default that of the device's owner, until the returned function
        is called. The wait is not Python's: a thread that waits for the stream may hold the
        interpreter's lock."""
        libc = ctypes.CDLL(None)
        gate = ctypes.create_string_buffer(64)  # a sem_t
        self.gates.append(gate)
        assert libc.sem_init(gate, 0, 0) == 0
        wait = ctypes.cast(libc.sem_wait, ctypes.c_void_p)
        with self.on(device):
            self.call("cuLaunchHostFunc", stream or self.streams[device], wait, gate)

        def go_on() -> None:
            libc.sem_post(gate)

        return go_on

    def leave(self) -> tuple[str, str]:
        """After shutdown(), without our own arrays and streams: what is alive, and what was done
        wrong."""
        assert self.made("cuCtxGetCurrent").value == self.contexts[0].value, "as it was before"
        for device in sorted(self.contexts, reverse=True):
            self.enter(device)
            for array in self.arrays:
                if array.device == device:
                    array.free()
            self.call("cuStreamDestroy_v2", self.streams[device])
            self.call("cuDevicePrimaryCtxRelease_v2", device)
        return self.alive(), self.misuse()

    def alive(self) -> str:
        return self.control.alive().decode()

    def misuse(self) -> str:
        return self.control.misuse().decode()

    def log(self) -> list[str]:
        return self.control.log().decode().split()

    def calls(self, name: str) -> int:
        """Since the log was cleared."""
        return int(self.control.calls(name.encode()))

    def launches(self) -> dict[str, tuple[int, int]]:
        """By kernel, since the log was cleared: how often, and with how many blocks at last."""
        rows = [line.split() for line in self.control.launches().decode().splitlines()]
        return {name: (int(times), int(blocks)) for name, times, blocks in rows}

    def launched(self) -> int:
        """Kernels, but those that prove links between devices."""
        return sum(times for name, (times, _) in self.launches().items() if name != PROOF)

    def fail(self, name: str, nth: int, code: int) -> None:
        self.control.fail(name.encode(), nth, code)


class _Tensor(ctypes.Structure):
    """DLTensor of DLPack."""

    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)), ("offset", ctypes.c_uint64),
    ]  # fmt: skip


class _Managed(ctypes.Structure):
    """DLManagedTensor of version 0."""

    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class _Versioned(ctypes.Structure):
    """DLManagedTensorVersioned of version 1."""

    _fields_ = [
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", _Tensor),
    ]  # fmt: skip


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class Array:
    """Contiguous elements on a device. Contents go in and out by the owner's own stream, so that
    code that does not wait for it, or does not let it wait, sees or leaves other contents."""

    def __init__(
        self, machine: Machine, shape: tuple[int, ...], dtype: str, device: int = 0
    ) -> None:
        self.machine, self.shape, self.dtype, self.device = machine, shape, dtype, device
        self.count = math.prod(shape)
        self.nbytes = self.count * width_of(dtype)
        with machine.on(device):
            self.stream = machine.streams[device]
            self.address = machine.allocate(self.nbytes)
            self.aside = machine.allocate(self.nbytes)  # where contents wait for their turn
        machine.arrays.append(self)

    def new_empty(self, shape: tuple[int, ...]) -> Array:
        return type(self)(self.machine, shape, self.dtype, self.device)

    def put(self, contents: bytes) -> Array:
        with self.machine.on(self.device):
            self.machine.call("cuStreamSynchronize", self.stream)
            ctypes.memmove(self.aside, contents, self.nbytes)
            self.machine.copy(self.address, self.aside, self.nbytes, self.stream)
        return self

    def look(self) -> None:
        """In the owner's stream: what read() will give."""
        with self.machine.on(self.device):
            self.machine.copy(self.aside, self.address, self.nbytes, self.stream)

    def read(self) -> bytes:
        with self.machine.on(self.device):
            self.machine.call("cuStreamSynchronize", self.stream)
        return ctypes.string_at(self.aside, self.nbytes)

    def get(self) -> bytes:
        self.look()
        return self.read()

    def free(self) -> None:
        for address in (self.address, self.aside):
            self.machine.call("cuMemFree_v2", ctypes.c_ulonglong(address))


class WithDlpack(Array):
    """Says nothing of its owner's stream, but lets another one wait for it."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.device

    def __dlpack__(self, *, stream: int) -> Any:
        self.kept: Any = _Managed(tensor=self.tensor_for(stream))
        return _new_capsule(ctypes.addressof(self.kept), b"dltensor", None)

    def tensor_for(self, stream: int) -> _Tensor:
        assert stream > 2 or stream == -1, "a stream of one's own, or none"
        if stream > 2:
            self.machine.arrivals = ctypes.c_void_p(stream)
            with self.machine.on(self.device):
                self.machine.order(self.stream, self.machine.arrivals)
        code = CODES.get(self.dtype) if self.dtype in CODES else CODES[self.dtype[0]]
        self.lengths = lengths = (ctypes.c_int64 * max(len(self.shape), 1))(*self.shape)
        return _Tensor(
            data=self.address, device_type=2, device=self.device, ndim=len(self.shape),
            code=code, bits=8 * width_of(self.dtype), lanes=1, shape=lengths,
        )  # fmt: skip


class WithVersion(WithDlpack):
    """The same in DLPack's version 1, which may be read-only."""

    read_only = False

    def __dlpack__(self, *, stream: int, max_version: tuple[int, int]) -> Any:  # type: ignore[override]
        assert max_version >= (1, 0)
        tensor = self.tensor_for(stream)
        self.kept = _Versioned(major=1, minor=1, flags=int(self.read_only), tensor=tensor)
        return _new_capsule(ctypes.addressof(self.kept), b"dltensor_versioned", None)


def interface_of(array: Array) -> dict[str, Any]:
    kind = {"bool": "|b1"}.get(array.dtype) or f"<{array.dtype[0]}{width_of(array.dtype)}"
    return {
        "shape": array.shape,
        "typestr": kind,
        "data": (array.address, False),
        "version": 3,
        "stream": array.stream.value,
    }


class WithInterface(Array):
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return interface_of(self)


class WithBoth(WithDlpack):
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return interface_of(self)


_ASK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p)


_EXCHANGE = b"dlpack_exchange_api"  # a capsule refers to its name, and does not hold it


class _Exchange(ctypes.Structure):
    """DLPackExchangeAPI, of which only the last function is there."""

    _fields_ = [
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("older", ctypes.c_void_p),
        ("functions", ctypes.c_void_p * 4), ("current_stream", _ASK),
    ]  # fmt: skip


class WithFunctions(WithDlpack):
    """Says by DLPack's C functions which stream is current."""

    current: Any = None

    @_ASK
    def _ask(kind: int, device: int, into: int) -> int:
        assert kind == 2, device
        ctypes.c_void_p.from_address(into).value = WithFunctions.current.value
        return 0

    _exchange = _Exchange(major=1, minor=2, current_stream=_ask)
    __dlpack_c_exchange_api__ = _new_capsule(ctypes.addressof(_exchange), _EXCHANGE, None)

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        WithFunctions.current = self.stream


KINDS: dict[str, type[Array]] = {
    "dlpack": WithDlpack,
    "version 1": WithVersion,
    "interface": WithInterface,
    "both": WithBoth,
    "functions": WithFunctions,
}


def contents(dtype: str, count: int, seed: int) -> bytes:
    """Any bits; booleans are 0 or 1."""
    raw = np.random.default_rng(seed).integers(0, 256, count * width_of(dtype), np.uint8)
    return (raw & 1 if dtype == "bool" else raw).tobytes()


class OnHost:
    """The same contents in this process's memory, for the result that has to come."""

    def __init__(self, raw: bytes, dtype: str) -> None:
        self.memory = np.frombuffer(bytearray(raw), np.uint8)
        count = len(raw) // width_of(dtype)
        self.array = _core.Buffer(self.memory.ctypes.data, count, dtype, self.memory)

    def get(self) -> bytes:
        return self.memory.tobytes()


class Rank:
    """One rank's driver and arrays, and what has to come of them."""

    def __init__(self, kind: str = "both") -> None:
        self.machine = Machine()
        fd.init()
        self.kind = KINDS[kind]
        self.seed = self.device = 0

    def array(self, shape: tuple[int, ...] | int, dtype: str, device: int | None = None) -> Array:
        shape = (shape,) if isinstance(shape, int) else shape
        return self.kind(self.machine, shape, dtype, self.device if device is None else device)

    def pair(self, shape: tuple[int, ...] | int, dtype: str) -> tuple[Array, OnHost]:
        """An array on the device, and one on the host with the same contents."""
        self.seed += 1
        array = self.array(shape, dtype)
        raw = contents(dtype, array.count, 1000 * fd.rank() + self.seed)
        return array.put(raw), OnHost(raw, dtype)

    def host(self, count: int, dtype: str) -> OnHost:
        return OnHost(bytes(count * width_of(dtype)), dtype)

    def end(self) -> None:
        fd.shutdown()
        gc.collect()
        left = self.machine.leave()
        assert left == ("", ""), left


def all_come(handles: list[Any], arrays: list[Array], expected: list[OnHost]) -> None:
    """All operations in flight complete, also the third that nobody waits for. Empties the list."""
    for i in reversed(range(len(handles))):
        if i % 3 == 2:
            continue  # nobody waits for it, and it comes all the same
        assert handles[i].wait() is arrays[i]
        assert arrays[i].get() == expected[i].get()
    handles.clear()
    fd.barrier()

    def all_are_there() -> bool:
        return all(x.get() == e.get() for x, e in zip(arrays, expected, strict=True))

    harness.wait_until(all_are_there, "what nobody waited for")
