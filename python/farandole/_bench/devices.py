"""Collectives on memory of CUDA devices, as they are measured.

By the driver alone: a machine with a device needs no framework for it.
"""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

import farandole as fd
from farandole._bench.layouts import Buffers, Collective

_DLPACK = {"b": 6, "i": 0, "u": 1, "f": 2}  # its code of a numpy kind; bfloat16 is 4
_CUDA = 2  # DLPack's number for these devices
_NON_BLOCKING, _UNTIMED = 1, 2


class Driver:
    """CUDA's driver on this rank's device, whose primary context is the thread's from now on."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self._library = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        device, self._context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), ordinal)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self.call("cuCtxPushCurrent_v2", self._context)
        self.stream = self.made("cuStreamCreateWithPriority", _NON_BLOCKING, 0)

    def call(self, name: str, *arguments: Any) -> None:
        """Raises RuntimeError with the driver's number for what went wrong."""
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            raise RuntimeError(f"{name}: CUDA error {code}")

    def made(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self.call(name, ctypes.byref(handle), *arguments)
        return handle

    def allocate(self, size: int) -> int:
        address = ctypes.c_ulonglong()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(size, 1)))
        return address.value

    def pinned(self, count: int, dtype: Any) -> NDArray[Any]:
        """Pinned memory of the host, for copies; it lives until the process ends."""
        size = max(count * np.dtype(dtype).itemsize, 1)
        memory = self.made("cuMemHostAlloc", ctypes.c_size_t(size), 0)
        raw = (ctypes.c_char * size).from_address(memory.value or 0)
        return np.frombuffer(memoryview(raw), dtype, count)

    def copy(self, to: int, source: int, size: int) -> None:
        """Queues a copy in the stream."""
        if size:
            self.call(
                "cuMemcpyAsync", ctypes.c_ulonglong(to), ctypes.c_ulonglong(source),
                ctypes.c_size_t(size), self.stream,
            )  # fmt: skip

    def wait(self) -> None:
        """Until all in the stream is done."""
        self.call("cuStreamSynchronize", self.stream)

    def order_before(self, stream: int) -> None:
        """Makes later work in that stream wait for the work in ours."""
        event = self.made("cuEventCreate", _UNTIMED)
        self.call("cuEventRecord", event, self.stream)
        self.call("cuStreamWaitEvent", ctypes.c_void_p(stream), event, 0)
        self.call("cuEventDestroy_v2", event)

    def copy_seconds(self, size: int, rounds: int = 5) -> float:
        """A copy of so many bytes from one place of the device to another: the best of a few."""
        one, other = self.allocate(size), self.allocate(size)
        begin, end = self.made("cuEventCreate", 0), self.made("cuEventCreate", 0)
        best = math.inf
        for _ in range(rounds + 1):
            self.call("cuEventRecord", begin, self.stream)
            self.copy(one, other, size)
            self.call("cuEventRecord", end, self.stream)
            self.wait()
            took = ctypes.c_float()
            self.call("cuEventElapsedTime", ctypes.byref(took), begin, end)
            best = min(best, took.value / 1e3)
        for event in (begin, end):
            self.call("cuEventDestroy_v2", event)
        for address in (one, other):
            self.call("cuMemFree_v2", ctypes.c_ulonglong(address))
        return best


@functools.cache
def driver() -> Driver:
    """This rank's driver: ranks of a host take devices in turn."""
    from farandole import cuda

    return Driver(fd.local_rank() % len(cuda.devices()))


class _Tensor(ctypes.Structure):  # DLTensor
    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.c_void_p), ("offset", ctypes.c_uint64),
    ]  # fmt: skip


class _Managed(ctypes.Structure):  # DLManagedTensor
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_NAME = b"dltensor"  # a capsule refers to it


class DeviceArray:
    """A copy on the device of an array in pinned memory, which tells by DLPack what it is."""

    def __init__(self, host: NDArray[Any], dtype: str) -> None:
        self.host, self.shape, self._driver = host, host.shape, driver()
        self.address = self._driver.allocate(host.nbytes)
        code = 4 if dtype == "bfloat16" else 6 if dtype == "bool" else _DLPACK[host.dtype.kind]
        self._lengths = (ctypes.c_int64 * max(host.ndim, 1))(*host.shape)
        self._managed = _Managed(
            tensor=_Tensor(
                data=self.address, device_type=_CUDA, device=self._driver.ordinal, ndim=host.ndim,
                code=code, bits=8 * host.itemsize, lanes=1, shape=self._lengths,
            )
        )  # fmt: skip
        # Only the stream is read from this: the rest comes by DLPack.
        self.__cuda_array_interface__ = {
            "shape": host.shape,
            "typestr": "|V1",
            "data": (self.address, False),
            "version": 3,
            "stream": self._driver.stream.value,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, self._driver.ordinal

    def __dlpack__(self, *, stream: int) -> Any:
        self._driver.order_before(stream)
        return _new_capsule(ctypes.addressof(self._managed), _NAME, None)

    def put(self) -> None:
        """Copies the host's contents, which are there when this returns."""
        self._driver.copy(self.address, self.host.ctypes.data, self.host.nbytes)
        self._driver.wait()

    def get(self) -> None:
        self._driver.copy(self.host.ctypes.data, self.address, self.host.nbytes)
        self._driver.wait()

    def free(self) -> None:
        self._driver.call("cuMemFree_v2", ctypes.c_ulonglong(self.address))


class DeviceCase(Buffers):
    """One collective on arrays of this rank's device. A call ends when its result is there."""

    def __init__(
        self, collective: Collective, size: int, dtype: str, options: dict[str, Any]
    ) -> None:
        op = options.get("op", "sum")
        super().__init__(collective, size, dtype, fd.rank(), fd.size(), op, driver().pinned)
        self._x = None if self.input is None else DeviceArray(self.input, dtype)
        self._out = self._x
        if not collective.in_place:
            self._out = None if self.output is None else DeviceArray(self.output, dtype)
        run = functools.partial(getattr(fd, collective.name), self._x, out=self._out, **options)

        def call() -> None:
            run()
            driver().wait()

        self.call = call

    def prepare(self, turn: int) -> None:
        super().prepare(turn)
        if self._x is not None:
            self._x.put()

    def count_wrong(self, turn: int) -> int:
        if self._out is not None:
            self._out.get()
        return super().count_wrong(turn)

    def end(self) -> None:
        for array in {id(a): a for a in (self._x, self._out) if a is not None}.values():
            array.free()
