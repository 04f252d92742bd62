"""The parts of a run as one file that Perfetto and Chrome open."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from farandole._trace.parts import Header, TraceError, newest
from farandole._trace.salvage import parts_of, recover

MERGED = "trace.json"


def merge(directory: str | Path, into: str | Path | None = None) -> Path:
    """Puts the parts of the newest run into one file that Perfetto and Chrome open.

    The rows of ranks that left no part (they were killed) say so.

    Returns:
        The file, by default ``trace.json`` in the directory, readable by this user alone.

    Raises:
        TraceError: the directory cannot be read or written, or holds no trace.
    """
    folder = Path(directory)
    mine, missing, _ = newest(folder)
    target = folder / MERGED if into is None else Path(into)
    about = {"run": mine[0].run, "ranks": mine[0].size, "missing_ranks": missing}
    _write(target, about, _lines(mine, missing))
    return target


def announce(target: Path, ranks: int) -> None:
    """The file while nothing has been put together yet: there, valid, and without an event.

    Raises:
        TraceError: it cannot be written.
    """
    running = "farandole trace shows what there is already"
    _write(target, {"ranks": ranks, "running": running}, ())


def _write(target: Path, about: dict[str, object], lines: Iterable[bytes]) -> None:
    """The file is there as a whole or not at all."""
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        beside.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(beside, flags, 0o600), "wb") as file:
            head = {"displayTimeUnit": "ms", "otherData": about}
            file.write(json.dumps(head).encode()[:-1] + b', "traceEvents": [\n')
            file.write(b",\n".join(lines))
            file.write(b"\n]}\n")
        beside.rename(target)
    except OSError as error:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise TraceError(f"{target} cannot be written: {error.strerror}") from error


def _lines(mine: Sequence[Header], missing: Iterable[int]) -> Iterator[bytes]:
    """Lines are events already; nothing needs to be parsed."""
    for header in mine:
        with header.path.open("rb") as file:
            for line in file:
                yield line.rstrip(b"\n")
    for rank in missing:
        name = {"name": f"rank {rank} (left no trace)"}
        event = {"ph": "M", "pid": rank, "name": "process_name", "args": name}
        yield json.dumps(event).encode()


def merge_if_complete(directory: str, size: int, rank: int) -> None:
    """Merges when all `size` ranks of the newest run have left their parts, or have died.

    Every rank calls this after it has written its own; for the last one it is true.
    """
    recover(Path(directory), apart_from=rank)
    mine, _, _ = newest(Path(directory))
    if len(mine) == size:
        merge(directory)


def salvage(environment: Mapping[str, str]) -> None:
    """By the launcher, when all ranks are gone: puts together what they could not.

    Raises:
        TraceError: it cannot be written.
    """
    if (directory := environment.get("FARANDOLE_TRACE")) and recover(Path(directory)):
        merge(directory)
    timeline = environment.get("FARANDOLE_TIMELINE") or environment.get("HOROVOD_TIMELINE")
    if timeline and recover(parts := parts_of(Path(timeline).absolute())):
        merge(parts, timeline)
        shutil.rmtree(parts, ignore_errors=True)
