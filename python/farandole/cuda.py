"""GPUs, as farandole sees them: which there are, and whether it can use them.

Nothing here is done before it is asked for. The first question initializes CUDA's driver in this
process, which then must not fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farandole import _core
from farandole._limits import setting

__all__ = [
    "Device",
    "NcclLibrary",
    "devices",
    "driver_version",
    "is_available",
    "nccl_library",
    "why_not",
]

_VERSION = 18  # of the table: csrc/base/cuda_table.h


class _Failure(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_int32),
        ("verdict", ctypes.c_char * 512),
        ("evidence", ctypes.c_char * 1024),
        ("advice", ctypes.c_char * 512),
    ]


class _Device(ctypes.Structure):
    _fields_ = [
        ("capability", ctypes.c_int32),
        ("multiprocessors", ctypes.c_int32),
        ("memory_bytes", ctypes.c_uint64),
        ("instance", ctypes.c_int32),
        ("descriptors", ctypes.c_int32),
        ("multicast", ctypes.c_int32),
        ("name", ctypes.c_char * 256),
        ("uuid", ctypes.c_char * 64),
        ("bus_id", ctypes.c_char * 32),
        ("unfit", ctypes.c_char * 512),
    ]


class _NcclLibrary(ctypes.Structure):
    _fields_ = [("version", ctypes.c_int32), ("file", ctypes.c_char * 512)]


class _Table(ctypes.Structure):  # its head: what follows is the native core's
    _fields_ = [
        ("version", ctypes.c_uint32),
        ("bytes", ctypes.c_uint32),
        ("nvcc", ctypes.c_int32),
        ("driver_version", ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.POINTER(_Failure))),
        ("device_count", ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.POINTER(_Failure))),
        (
            "device",
            ctypes.CFUNCTYPE(
                ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(_Device), ctypes.POINTER(_Failure)
            ),
        ),
        ("look_for_nccl_in", ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)),
        (
            "find_nccl",
            ctypes.CFUNCTYPE(
                ctypes.c_int32, ctypes.POINTER(_NcclLibrary), ctypes.POINTER(_Failure)
            ),
        ),
    ]


@dataclass(frozen=True)
class Device:
    """One GPU that this process sees, or one instance of a GPU in MIG mode.

    Attributes:
        ordinal: its number among those that this process sees.
        name: the driver's.
        uuid: the same in every process, as ``nvidia-smi -L`` shows it.
        bus_id: where it is on the PCI bus.
        capability: compute capability, major and minor.
        memory_bytes: of the device, in all.
        multiprocessors: how many there are.
        is_instance: whether it is an instance of a GPU in MIG mode.
        exports_memory: whether other processes can map its memory by file descriptors.
        folds_by_switch: whether a switch (NVLink SHARP) folds what it and others hold.
        unfit: why farandole's kernels do not run on it; empty where they do.
    """

    ordinal: int
    name: str
    uuid: str
    bus_id: str
    capability: tuple[int, int]
    memory_bytes: int
    multiprocessors: int
    is_instance: bool
    exports_memory: bool
    folds_by_switch: bool
    unfit: str


@dataclass(frozen=True)
class NcclLibrary:
    """NCCL's library, as this process has found it.

    Attributes:
        version: ``(2, 20, 5)``.
        file: where it lies.
    """

    version: tuple[int, int, int]
    file: str


def is_available() -> bool:
    """Whether collectives run on a GPU of this process; ``why_not()`` says why not."""
    return not why_not()


def why_not() -> str:
    """One sentence about what keeps farandole from using a GPU; empty where nothing does. Where it
    is that the driver is too old for the kernels, arrays on a GPU are reduced by the host.
    """
    try:
        found = devices()
    except (_core.Error, ImportError) as error:
        return str(getattr(error, "verdict", error))
    return "" if any(not device.unfit for device in found) else found[0].unfit


def devices() -> list[Device]:
    """All GPUs that this process sees.

    Raises:
        DeviceError: there is no driver, one that is too old, or no device.
        ForkedEngine: this process was forked from one that uses CUDA.
        ImportError: this farandole was built without its library for CUDA.
    """
    return [_device(ordinal) for ordinal in range(_ask(_table().device_count))]


def driver_version() -> tuple[int, int]:
    """The version of CUDA that the driver is of: ``(12, 8)``.

    Raises:
        DeviceError, ForkedEngine, ImportError: as ``devices()``.
    """
    version = _ask(_table().driver_version)
    return version // 1000, version % 1000 // 10


def nccl_library() -> NcclLibrary:
    """The NCCL that collectives on devices go by at level ``fast``, or by ``algorithm="nccl"``: the
    one that this process has loaded, that of the wheel ``nvidia-nccl``, or the loader's, unless
    ``FARANDOLE_NCCL`` says where it is. It stays loaded.

    Raises:
        DeviceError: there is none, it is too old, or ``FARANDOLE_NCCL=off``.
        ImportError: as ``devices()``.
    """
    _say_where_nccl_is(_table())
    told = _NcclLibrary()
    _ask(_table().find_nccl, ctypes.byref(told))
    major, rest = divmod(told.version, 10000)
    minor, patch = divmod(rest, 100)
    return NcclLibrary((major, minor, patch), told.file.decode(errors="replace"))


def _address() -> int:
    """The address of the library's table, for the native core; raises as ``devices()``."""
    return ctypes.addressof(_table())


@functools.cache
def _table() -> Any:
    library = Path(_core.__file__).parent / "_cuda.so"
    if not library.exists():
        raise ImportError(f"{library} is missing: this farandole was built without it")
    get = ctypes.CDLL(str(library)).farandole_cuda_table
    get.restype, get.argtypes = ctypes.POINTER(_Table), [ctypes.c_uint32]
    table = get(_VERSION)
    if not table:
        raise ImportError(f"{library} is of another version of farandole")
    _say_where_nccl_is(table.contents)
    return table.contents


def _say_where_nccl_is(table: Any) -> None:
    table.look_for_nccl_in(os.fsencode(setting("FARANDOLE_NCCL")), _nccl_of_wheel())


def _nccl_of_wheel() -> bytes:
    """The path in nvidia-nccl-cu12 or its like; empty if they are not installed."""
    with contextlib.suppress(ImportError, ValueError):
        found = importlib.util.find_spec("nvidia.nccl")
        for folder in found.submodule_search_locations or () if found else ():
            library = Path(folder) / "lib" / "libnccl.so.2"
            if library.exists():
                return os.fsencode(library)
    return b""


def _ask(function: Any, *arguments: Any) -> int:
    failure = _Failure()
    answer = int(function(*arguments, ctypes.byref(failure)))
    if answer == 0:
        raise _error(failure)
    return answer


def _device(ordinal: int) -> Device:
    told = _Device()
    _ask(_table().device, ordinal, ctypes.byref(told))
    return Device(
        ordinal=ordinal,
        name=told.name.decode(errors="replace"),
        uuid=told.uuid.decode(),
        bus_id=told.bus_id.decode(),
        capability=divmod(told.capability, 10),
        memory_bytes=told.memory_bytes,
        multiprocessors=told.multiprocessors,
        is_instance=bool(told.instance),
        exports_memory=bool(told.descriptors),
        folds_by_switch=bool(told.multicast),
        unfit=told.unfit.decode(errors="replace"),
    )


def _error(failure: _Failure) -> _core.Error:
    verdict, evidence, advice = (
        text.decode(errors="replace")
        for text in (failure.verdict, failure.evidence, failure.advice)
    )
    kind = getattr(_core, _core.error_names[failure.kind - 1])
    told = f"\n  evidence: {evidence}" if evidence else ""
    error: _core.Error = kind(f"{verdict}{told}\n  advice: {advice}")
    error.evidence, error.advice = evidence, advice
    return error
