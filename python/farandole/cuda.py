"""GPUs, as farandole sees them: which there are, and whether it can use them.

Nothing here is done before it is asked for. The first question initializes CUDA's driver in this
process, which then must not fork.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

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
    except _core.Error as error:
        return error.verdict
    return "" if any(not device.unfit for device in found) else found[0].unfit


def devices() -> list[Device]:
    """All GPUs that this process sees.

    Raises:
        DeviceError: there is no driver, one that is too old, or no device.
        ForkedEngine: this process was forked from one that uses CUDA.
    """
    return [Device(**properties) for properties in _core.cuda_devices()]


def driver_version() -> tuple[int, int]:
    """The version of CUDA that the driver is of: ``(12, 8)``.

    Raises:
        DeviceError, ForkedEngine: as ``devices()``.
    """
    version = _core.cuda_driver_version()
    return version // 1000, version % 1000 // 10


def nccl_library() -> NcclLibrary:
    """The NCCL that collectives on devices go by at level ``fast``, or by ``algorithm="nccl"``: the
    one that this process has loaded, that of the wheel ``nvidia-nccl``, or the loader's, unless
    ``FARANDOLE_NCCL`` says where it is. It stays loaded.

    Raises:
        DeviceError: there is none, it is too old, or ``FARANDOLE_NCCL=off``.
    """
    version, file = _core.nccl_library(*_places_of_nccl())
    major, rest = divmod(version, 10000)
    minor, patch = divmod(rest, 100)
    return NcclLibrary((major, minor, patch), os.fsdecode(file))


def _places_of_nccl() -> tuple[bytes, bytes]:
    return os.fsencode(setting("FARANDOLE_NCCL")), os.fsencode(_nccl_of_wheel())


def _nccl_of_wheel() -> str:
    """The path in nvidia-nccl-cu12 or its like; empty if they are not installed."""
    with contextlib.suppress(ImportError, ValueError):
        found = importlib.util.find_spec("nvidia.nccl")
        for folder in found.submodule_search_locations or () if found else ():
            library = Path(folder) / "lib" / "libnccl.so.2"
            if library.exists():
                return str(library)
    return ""
