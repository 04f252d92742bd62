"""Shows this installation, what this machine allows, who started this process, and every setting
with its present value; with --why, which path or planner would run an operation, and why."""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from farandole._tune import kept
from farandole.cli import _why

EPILOG = """\
examples:
  farandole info
  farandole info --json > machine.json
  farandole info --why 4M
  farandole info --why 64K --collective broadcast --ranks 8 --memory ours
"""


_SETTING = ("name", "type", "default", "value", "doc", "horovod")  # what is told of one


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    _why.add_arguments(parser)


def handle(arguments: argparse.Namespace) -> int:
    if _why.is_asked(arguments):
        return _why.handle(arguments)
    facts = collect()
    if arguments.json:
        import json

        print(json.dumps(facts, indent=2))
        return 0
    from farandole.cli._facts import lines_of
    from farandole.cli._terminal import columns

    parts = ("installation", "machine", "kernel", "launcher", "tuning")
    shown = {part: {name: _text(v) for name, v in facts[part].items()} for part in parts}
    settings = [{name: _text(row[name]) for name in row} for row in facts["settings"]]
    print("\n".join(lines_of(shown, settings, columns())))
    for line in facts["unread"]:
        print(f"warning: {line}")
    return 0


def collect() -> dict[str, Any]:
    """All facts, as plain values."""
    core, trouble = _core()
    rows = core.settings() if core else []
    return {
        "installation": {
            "farandole": version(),
            "native core": "loaded" if core is not None else trouble,
            "instruction sets": core.instruction_sets() if core else [],
            "python": f"{platform.python_implementation()} {platform.python_version()}",
            "numpy": _numpy_version(),
        },
        "machine": {
            "processor": kept.line_of("/proc/cpuinfo", "model name") or platform.machine(),
            "usable cores": len(os.sched_getaffinity(0)),
            "online cores": os.cpu_count(),
            "memory": _memory(),
            "CUDA": _cuda() if core is not None else "unknown",
        },
        "kernel": {
            "release": f"{platform.system()} {platform.release()}",
            "memfd_create": _probe(_memfd),
            "pidfd_open": _probe(lambda: os.pidfd_open(os.getpid())),
            "process_vm_readv": _probe_process_vm(),
        },
        "launcher": _launcher(core),
        "tuning": _tuning(core),
        "settings": [{name: row[name] for name in _SETTING} for row in rows],
        "unread": core.unread_variables() if core else [],
    }


def version() -> str:
    """The installed version, or the native core's where the package runs from a build tree."""
    from importlib import metadata

    with suppress(metadata.PackageNotFoundError):
        return metadata.version("farandole")
    return str(getattr(_core()[0], "__version__", "unknown (not installed)"))


def _launcher(core: Any) -> dict[str, Any]:
    if core is None:
        return {}
    from farandole.cli import _started

    return _started.describe()


def _tuning(core: Any) -> dict[str, Any]:
    if core is None:
        return {}
    from farandole._tune import table

    return _why.describe(table.find())


def _core() -> tuple[Any, str]:
    import importlib

    try:
        return importlib.import_module("farandole._core"), ""
    except ImportError as error:
        return None, f"cannot be loaded: {error}"


def _numpy_version() -> str:
    try:
        import numpy
    except ImportError as error:
        return f"cannot be loaded: {error}"
    return numpy.__version__


def _memory() -> str:
    lines = (kept.line_of("/proc/meminfo", name) for name in ("MemTotal", "MemAvailable"))
    total, free = (int(line.split()[0]) if line else 0 for line in lines)  # KiB
    if not total:
        return "unknown"
    return f"{total / 2**20:.1f} GiB, {free / 2**20:.1f} GiB available"


def _cuda() -> str:
    """The GPUs, or what keeps us from using them."""
    from farandole import cuda

    if why := cuda.why_not():
        return f"no: {why}"
    names = ", ".join(device.name for device in cuda.devices())
    return f"{names}; driver of CUDA {'.'.join(map(str, cuda.driver_version()))}; {_nccl()}"


def _nccl() -> str:
    from farandole import _core, cuda

    try:
        found = cuda.nccl_library()
    except _core.Error as error:
        return f"no NCCL: {str(error).splitlines()[0]}"
    return f"NCCL {'.'.join(map(str, found.version))} ({found.file})"


def _memfd() -> int:
    return os.memfd_create("farandole-probe", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def _probe(opened: Callable[[], int]) -> str:
    try:
        os.close(opened())
    except OSError as error:
        return f"no: {error.strerror}"
    return "yes"


def _probe_process_vm() -> str:
    """Reads own memory: shows a system call that is missing or filtered. Whether ranks may read
    each other's is Yama's word in addition, and probed by every group for itself."""

    class Vector(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))

    source, target = ctypes.create_string_buffer(b"probe", 8), ctypes.create_string_buffer(8)
    here = Vector(ctypes.addressof(target), 8)
    there = Vector(ctypes.addressof(source), 8)
    read = ctypes.CDLL(None, use_errno=True).process_vm_readv
    read.argtypes = [ctypes.c_int, *(ctypes.c_void_p, ctypes.c_ulong) * 2, ctypes.c_ulong]
    read.restype = ctypes.c_ssize_t
    if read(os.getpid(), ctypes.byref(here), 1, ctypes.byref(there), 1, 0) != 8:
        return f"no: {os.strerror(ctypes.get_errno())}"
    scope = kept.first_line("/proc/sys/kernel/yama/ptrace_scope")
    return f"yes (Yama ptrace_scope {scope})" if scope else "yes"


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "-"
    if isinstance(value, dict):
        return ", ".join(f"{name} {part}" for name, part in value.items()) or "-"
    return "-" if value is None or value == "" else str(value)
