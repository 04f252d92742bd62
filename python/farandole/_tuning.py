"""The tuning table of this kind of host: where ``farandole tune`` keeps it, and what is believed.

A file is JSON: what kind of host it is for, when and with how many ranks it was measured, how well
the model fits, and the numbers themselves, in seconds. Only rank 0 reads it, and hands the numbers
to all ranks when they meet; a file that is not to be believed is one warning and the defaults.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from farandole import _core

_FORMAT = 1
_MOST_BYTES = 64 << 10  # of a file


class NotBelieved(Exception):
    """Why a file is not used."""


@dataclass(frozen=True)
class Table:
    """A tuning table, and where it came from."""

    text: str = ""  # as the native core takes it; empty: the defaults
    path: Path | None = None  # the file that was read
    fit: dict[str, Any] = field(default_factory=dict)
    why_not: str = ""  # why the file was not used

    @property
    def origin(self) -> str:
        """In words: 'defaults', or when it was measured and how."""
        return _core.tuning.origin(self.text)

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits; equal where all choices are."""
        return _core.tuning.fingerprint(self.text)


# ---- the kind of host ----


def kind() -> dict[str, Any]:
    """What the times depend on: a table is used on hosts of which all of this is the same."""
    return {
        "farandole": _core.__version__,
        "processor": _line("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "numa nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))),
        "huge pages": _first_line("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "ptrace scope": _first_line("/proc/sys/kernel/yama/ptrace_scope"),
    }


def _first_line(path: str) -> str:
    with suppress(OSError), Path(path).open() as file:
        return file.readline().strip()
    return ""


def _line(path: str, name: str) -> str:
    with suppress(OSError), Path(path).open() as file:
        for line in file:
            if line.startswith(name):
                return line.partition(":")[2].strip()
    return ""


def cache_path() -> Path:
    """The file of this kind of host. ``NotBelieved`` where there is no place for it."""
    import hashlib

    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        base = base if base.is_absolute() else Path.home() / ".cache"
    except RuntimeError as error:
        raise NotBelieved(f"there is no cache directory: {error}") from None
    name = hashlib.sha256(json.dumps(kind(), sort_keys=True).encode()).hexdigest()[:16]
    return base / "farandole" / f"tuning-{name}.json"


# ---- reading ----


def find(setting: str | None = None) -> Table:
    """The table that ``FARANDOLE_TUNING`` asks for; the defaults where it cannot be had.

    Never raises for what a file holds: `why_not` then says why it is not used.
    """
    setting = _setting() if setting is None else setting
    if setting == "off":
        return Table()
    named = setting not in ("", "auto")
    try:
        path = Path(setting) if named else cache_path()
        try:
            return read(path, any_kind=named)
        except FileNotFoundError:
            return Table(why_not=f"{path} does not exist" if named else "")
        except OSError as error:
            return Table(why_not=f"{path}: {error.strerror}")
        except NotBelieved as error:
            return Table(why_not=f"{path}: {error}")
    except NotBelieved:
        return Table()


def for_world() -> str:
    """The table that rank 0 hands out; warns once when a file is there and not believed."""
    table = find()
    if table.why_not:
        warnings.warn(
            f"farandole uses its default tuning table: {table.why_not}; "
            "run `farandole tune` again, or set FARANDOLE_TUNING=off",
            RuntimeWarning,
            stacklevel=3,
        )
    return table.text


def _setting() -> str:
    return next(str(s["value"]) for s in _core.settings() if s["name"] == "FARANDOLE_TUNING")


def read(path: Path, *, any_kind: bool = False) -> Table:
    """Reads a file. ``NotBelieved`` says what is wrong with it; ``OSError`` that it is not there.

    With `any_kind`, one that was measured on another kind of host is believed too, if this version
    of farandole wrote it.
    """
    with path.open("rb") as file:
        raw = file.read(_MOST_BYTES + 1)
    if len(raw) > _MOST_BYTES:
        raise NotBelieved("it is no tuning table: too long")
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError):
        raise NotBelieved("it is no JSON") from None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise NotBelieved(f"it is no tuning table of format {_FORMAT}")
    _require_kind(content.get("kind"), any_kind)
    return Table(_text(content), path, content["fit"] if _is_fit(content) else {})


def _require_kind(theirs: Any, any_kind: bool) -> None:
    ours = kind()
    if not isinstance(theirs, dict):
        raise NotBelieved("it does not say for which kind of host it is")
    for name in ("farandole",) if any_kind else ours:
        if theirs.get(name) != ours[name]:
            other = repr(theirs.get(name))[:80]
            raise NotBelieved(f"it is for {name} {other}, this is {ours[name]!r}")


def _text(content: dict[str, Any]) -> str:
    seconds, ranks, measured = (content.get(key) for key in ("seconds", "ranks", "measured"))
    if (
        not isinstance(seconds, dict)
        or not all(type(s) in (int, float) for s in seconds.values())
        or type(ranks) is not int
        or not isinstance(measured, str)
    ):
        raise NotBelieved("numbers are missing")
    try:
        return _core.tuning.text(seconds, f"measured {measured} with {ranks} ranks")
    except (_core.InvalidArgument, TypeError) as error:
        raise NotBelieved(str(error).splitlines()[0]) from None


def _is_fit(content: dict[str, Any]) -> bool:
    fit = content.get("fit")
    return isinstance(fit, dict) and all(isinstance(v, float) for v in fit.values())


# ---- writing ----


def write(
    path: Path, seconds: dict[str, float], *, measured: str, ranks: int, fit: dict[str, float]
) -> None:
    """Writes a file that only its owner reads, all of it or nothing.

    Raises:
        OSError: it cannot be written.
    """
    content = {
        "format": _FORMAT,
        "kind": kind(),
        "measured": measured,
        "ranks": ranks,
        "fit": fit,
        "seconds": seconds,
    }
    _text(content)  # what would not be believed is not written
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd, beside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(fd, "w") as file:
            json.dump(content, file, indent=2)
            file.write("\n")
        Path(beside).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(beside).unlink()
        raise
