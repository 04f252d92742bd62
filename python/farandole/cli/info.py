"""Shows this installation, what this machine allows, who started this process, and every setting
with its present value; with --why, which path or planner would run an operation, and why."""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
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


_NOBODY = "nobody: a program started like this is a world of one"
_FRAMEWORKS = ("torch", "tensorflow", "tensorflow-cpu", "keras", "jax", "mpi4py")
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
            "frameworks": list(_frameworks()),
            "kernels for GPUs": _kernels(core) if core is not None else "unknown",
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
    """The launcher that started this process, and the variables by which that is known; `trouble`
    alone where the environment contradicts itself."""
    if core is None:
        return {}
    from farandole import _mpi, _place
    from farandole._launchers import PlaceError

    if _mpi.is_forced():
        try:
            return _mpi.describe()
        except core.Error as error:
            return {"trouble": error.verdict}
    try:
        found = _place.find(os.environ)
        if found.launcher is None:
            return {"started by": _NOBODY}
        if found.rank is None or found.size is None:
            return {"trouble": _place.half_said(found)}
    except PlaceError as error:
        return {"trouble": str(error)}
    known_by = _place.used(found.launcher, os.environ)
    others = [row.name for row in _place.seen(os.environ) if row != found.launcher]
    return {
        "started by": found.launcher.name,
        "rank": found.rank,
        "size": found.size,
        "local rank": found.local_rank,
        "local size": found.local_size,
        "hosts": _split(),
        "job": _place.job_id(found.launcher, os.environ),
        "known by": [f"{name}={text}" for name, text in known_by.items()],
        "also seen": others,
    }


def _split() -> str:
    parts = os.environ.get("FARANDOLE_SPLIT_HOSTS")
    return f"as FARANDOLE_SPLIT_HOSTS={parts} divides the ranks" if parts else "as ranks find them"


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


def _kernels(core: Any) -> str:
    made_by: int = core.kernel_compiler()  # 12090 is 12.9
    if not made_by:
        return "none: there was no compiler for them when it was built"
    return f"compiled by CUDA {made_by // 1000}.{made_by % 1000 // 10}"


def _frameworks() -> Iterator[str]:
    """Those that are installed; they are not imported, which takes seconds."""
    from importlib import metadata

    for name in _FRAMEWORKS:
        with suppress(metadata.PackageNotFoundError):
            yield f"{name} {metadata.version(name)}"


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


# ---- facts as lines ----


def lines_of(
    parts: Mapping[str, Mapping[str, str]], settings: Sequence[Mapping[str, Any]], width: int
) -> Iterator[str]:
    """`width`: of the terminal; 0: there is none."""
    if not width:
        for part, facts in parts.items():
            yield from (f"{part} {name}: {value}" for name, value in facts.items())
        for row in settings:
            kind = f"({row['type']}, default {row['default']})"
            yield f"{row['name']}: {row['value']} {kind}: {row['doc']}"
        return
    for part, facts in parts.items():
        yield part
        longest = max(map(len, facts), default=0)
        for name, value in facts.items():
            yield from _wrapped(f"  {name.ljust(longest)}  ", value, width)
        yield ""
    if settings:
        yield "settings (environment variables)"
    for row in settings:
        default = "" if row["value"] == row["default"] else f"  (default {row['default']})"
        yield from _wrapped(f"  {row['name']} = ", f"{row['value']}{default}", width)
        yield from _wrapped("      ", str(row["doc"]), width)


def _wrapped(begin: str, text: str, width: int) -> list[str]:
    """All lines begin where the text does, where there is room for that."""
    indent = " " * min(len(begin), width // 2)
    return textwrap.wrap(
        begin + text, width, subsequent_indent=indent, drop_whitespace=True,
        break_on_hyphens=False,
    )  # fmt: skip
