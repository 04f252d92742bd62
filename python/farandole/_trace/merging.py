"""The parts of a run as one file that Perfetto and Chrome open."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from farandole._trace.clocks import SUFFIX, lined_up
from farandole._trace.parts import (
    Header,
    TraceError,
    clocks_unknown,
    clocks_within,
    headers,
    newest,
)
from farandole._trace.salvage import parts_of, recover

MERGED = "trace.json"
WORLDS = "world-*"  # those of an elastic job, each of which has traces of its own


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
    about: dict[str, object] = {"run": mine[0].run, "ranks": mine[0].size, "missing_ranks": missing}
    if within := clocks_within(mine):
        about["clocks_within_us"] = within
    if unknown := clocks_unknown(mine):
        about["clocks_unknown"] = unknown
    _write(target, about, _lines(mine, missing))
    return target


def gather(directory: Path, others: Iterable[Path]) -> None:
    """Puts parts of the newest run in a directory there that lie in other ones.

    Raises:
        TraceError: one of them cannot be read, or holds none of this run.
    """
    for other in others:
        run = newest(directory)[0][0].run
        recover(other, living=True)
        theirs = [header.path for header in headers(other) if header.run == run]
        if not theirs:
            raise TraceError(f"{other} holds no part of the run in {directory}")
        if other.samefile(directory):
            continue
        for part in theirs:
            for path in (part.with_suffix(SUFFIX), part):
                if path.exists():
                    shutil.copy2(path, directory / path.name)


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
    """Lines are events already; nothing needs to be parsed where times are by rank 0's clock."""
    for header in mine:
        clock = header.clock
        with header.path.open("rb") as file:
            for line in file:
                told = line.rstrip(b"\n")
                yield told if clock is None else lined_up(told, clock)
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


def salvage(environment: Mapping[str, str], *, keep_parts: bool = False) -> None:
    """By the launcher, when all ranks are gone: puts together what they could not. By an agent, for
    the ranks of its host, whose parts are to be sent: `keep_parts`.

    Raises:
        TraceError: it cannot be written.
    """
    if directory := environment.get("FARANDOLE_TRACE"):
        for folder in (Path(directory), *Path(directory).glob(WORLDS)):
            if recover(folder):
                merge(folder)
    if timeline := environment.get("FARANDOLE_TIMELINE") or environment.get("HOROVOD_TIMELINE"):
        file = Path(timeline).absolute()
        every = file.parent.glob(f".{file.stem}.{WORLDS}{file.suffix}.parts")
        for parts in (parts_of(file), *every):
            if recover(parts):
                merge(parts, file.with_name(parts.name[1 : -len(".parts")]))
                if not keep_parts:
                    shutil.rmtree(parts, ignore_errors=True)
