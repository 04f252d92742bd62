"""Device 0 by CUDA's driver, for what is measured here: memory, times, and the kernels that the
installed farandole has. Needs no compiler."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref, c_double, c_float, c_int64, c_size_t, c_uint8, c_uint32, c_uint64
from pathlib import Path
from typing import Any

import numpy as np

from farandole import _core

THREADS = 256  # of a block: csrc/cuda/kernels/parameters.h
_BATCHES = 5
_MULTIPROCESSORS = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT


class Failed(Exception):
    """One sentence."""


# ---- csrc/cuda/kernels/parameters.h ----


class Scaling(ctypes.Structure):
    _fields_ = [
        ("float64", c_double), ("float32", c_float), ("applies", c_uint32), ("divide", c_int64),
    ]  # fmt: skip


class Fold(ctypes.Structure):
    _fields_ = [
        ("count", c_uint64), ("source_count", c_uint32), ("destination_count", c_uint32),
        ("formula", c_uint8), ("leaf", Scaling), ("finish", Scaling),
        ("sources", c_uint64 * 64), ("destinations", c_uint64 * 64),
    ]  # fmt: skip


class Piece(ctypes.Structure):
    _fields_ = [(name, c_uint64) for name in ("source", "to", "count", "first_chunk")]


class Pieces(ctypes.Structure):
    _fields_ = [
        ("pieces", c_uint64), ("piece_count", c_uint32), ("chunks", c_uint64), ("scaling", Scaling),
    ]  # fmt: skip


def _image() -> bytes:
    """The kernels, as nvcc or NVRTC has made them."""
    kernels = next(Path(_core.__file__).parent.glob("kernels-*.fatbin"), None)
    if kernels is None:
        raise Failed("this build of farandole has no kernels: it had no compiler for them")
    return kernels.read_bytes()


class Device:
    """Until the process ends, so nothing is freed."""

    def __init__(self) -> None:
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise Failed(f"there is no CUDA driver: {error}") from None
        device, count = ctypes.c_int(), ctypes.c_int()
        self("cuInit", 0)
        self("cuDeviceGet", byref(device), 0)
        self("cuDeviceGetAttribute", byref(count), _MULTIPROCESSORS, device)
        self.multiprocessors = count.value
        self("cuCtxPushCurrent_v2", self._made("cuDevicePrimaryCtxRetain", device))
        self._stream = self._made("cuStreamCreateWithPriority", 1, 0)
        self._module = self._made("cuModuleLoadDataEx", _image(), 0, None, None)
        self._begin, self._end = self._made("cuEventCreate", 0), self._made("cuEventCreate", 0)

    def __call__(self, name: str, *values: Any) -> None:
        if code := getattr(self._driver, name)(*values):
            text = ctypes.c_char_p()
            self._driver.cuGetErrorName(code, byref(text))
            raise Failed(f"{name} came to {(text.value or b'').decode() or code}")

    def _made(self, name: str, *values: Any) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self(name, byref(made), *values)
        return made

    def array(self, size: int, word: int) -> int:
        """The address of so many bytes, full of one word once the stream comes by."""
        address = c_uint64()
        self("cuMemAlloc_v2", byref(address), c_size_t(size))
        self("cuMemsetD32Async", address, c_uint32(word), c_size_t(size // 4), self._stream)
        return address.value

    def copy(self, to: int, source: int, size: int) -> None:
        self("cuMemcpyAsync", c_uint64(to), c_uint64(source), c_size_t(size), self._stream)

    def put(self, values: ctypes.Array[Any]) -> int:
        """The address of a copy of them."""
        size = ctypes.sizeof(values)
        address, here = self.array(size, 0), self._pinned(size)
        ctypes.memmove(here, values, size)
        self.copy(address, here, size)
        return address

    def is_full_of(self, address: int, size: int, word: int) -> bool:
        here = self._pinned(size)
        self.copy(here, address, size)
        self("cuStreamSynchronize", self._stream)
        return bool((np.frombuffer(ctypes.string_at(here, size), np.uint32) == word).all())

    def _pinned(self, size: int) -> int:
        return self._made("cuMemHostAlloc", c_size_t(size), 1).value or 0

    def kernel(self, name: str, chunks: int, parameters: ctypes.Structure) -> Callable[[], None]:
        """Puts it into the stream: a block for each chunk, as far as they are worth it
        (csrc/cuda/plans.cpp)."""
        function = self._made("cuModuleGetFunction", self._module, name.encode())
        self._compare_sizes(name, function, ctypes.sizeof(parameters))
        blocks = max(1, min(chunks, 32 * self.multiprocessors))
        job = parameters, (ctypes.c_void_p * 1)(ctypes.addressof(parameters))  # which keeps nothing
        grid = (blocks, 1, 1, THREADS, 1, 1, 0, self._stream)
        return lambda: self("cuLaunchKernel", function, *grid, job[1], None)

    def _compare_sizes(self, name: str, function: ctypes.c_void_p, size: int) -> None:
        offset, bytes_ = c_size_t(), c_size_t(size)
        if hasattr(self._driver, "cuFuncGetParamInfo"):  # from CUDA 12.4 on
            self("cuFuncGetParamInfo", function, c_size_t(0), byref(offset), byref(bytes_))
        if bytes_.value != size:
            raise Failed(f"{name} takes {bytes_.value} bytes, and not the {size} of driver.py")

    def best_round(self, rounds: int, launch: Callable[[], None]) -> float:
        """Seconds by the device's clock, in the best of a few batches of so many that follow each
        other: others may use the device, too."""
        return min(self._seconds(count, launch) for count in (1, *[rounds] * _BATCHES))

    def _seconds(self, count: int, launch: Callable[[], None]) -> float:
        self("cuEventRecord", self._begin, self._stream)
        for _ in range(count):
            launch()
        self("cuEventRecord", self._end, self._stream)
        self("cuEventSynchronize", self._end)
        milliseconds = c_float()
        self("cuEventElapsedTime", byref(milliseconds), self._begin, self._end)
        return milliseconds.value / 1e3 / count
