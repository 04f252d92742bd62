"""A trace that begins and ends while ranks run, in one file, as Horovod's timeline does.

Every rank that starts records, and writes its part when it stops: into ``.FILE.parts`` beside the
file. The file is there from the start, and has the events of a host as they happen (live.py). It is
put together from the parts when the last one has stopped, which removes them.
"""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from farandole import _elastic
from farandole._core import Error, Group, InvalidArgument, ResourceError
from farandole._limits import setting
from farandole._trace.live import Live
from farandole._trace.merging import announce, merge
from farandole._trace.parts import TraceError, newest
from farandole._trace.salvage import events_files, parts_of, recover


class _State:
    running: tuple[Group, Path, Live] | None = None
    number = 0  # of starts, counted alike on all ranks


_state = _State()


def start(group: Group, file: Path) -> None:
    if _state.running is not None:
        raise InvalidArgument(f"a timeline is being written to {_state.running[1]} already")
    parts = parts_of(file)
    try:
        with _alone_in(parts):
            group.start_timeline(str(parts), _state.number + 1)
            begin_anew = functools.partial(_begin_anew, parts, file, group.size)
            live = Live(parts, file, group.rank, group.size, begin_anew)
    except (OSError, TraceError) as error:
        raise ResourceError(f"no timeline can be written to {file}: {error}") from error
    _state.running = group, file, live
    _state.number += 1


def stop() -> None:
    if _state.running is None:
        raise InvalidArgument("no timeline was started; call start_timeline() first")
    (group, file, live), _state.running = _state.running, None
    parts = parts_of(file)
    live.end()
    try:
        with _alone_in(parts):
            group.stop_timeline()
            recover(parts, apart_from=group.rank)
            is_complete = len(newest(parts)[0]) == group.size
            if is_complete or not events_files(parts):
                merge(parts, file)
            if is_complete:
                shutil.rmtree(parts, ignore_errors=True)
    except (OSError, TraceError) as error:
        raise ResourceError(f"the timeline {file} cannot be written: {error}") from error


def _begin_anew(parts: Path, file: Path, ranks: int) -> None:
    with _alone_in(parts):
        if any(parts.glob("rank-*.jsonl")):
            merge(parts, file)
        else:
            announce(file, ranks)


def start_as_asked(group: Group) -> None:
    """At init(): what FARANDOLE_TIMELINE, or HOROVOD_TIMELINE, asks for."""
    file = setting("FARANDOLE_TIMELINE")
    if not file or file == "DYNAMIC" or setting("FARANDOLE_TRACE"):
        return
    try:
        start(group, Path(file).absolute())
    except Error as error:
        warnings.warn(f"no timeline is written: {error}", RuntimeWarning, stacklevel=3)


def finish() -> None:
    """At shutdown(): a timeline that nobody has stopped."""
    if _elastic.is_elastic():
        _state.number = 0  # ranks of the next world have not counted these
    if _state.running is None:
        return
    try:
        stop()
    except Error as error:
        warnings.warn(f"the timeline is lost: {error}", RuntimeWarning, stacklevel=3)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """One rank at a time, also when another one has removed the folder meanwhile."""
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:  # removed since
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if folder.exists() and folder.stat().st_ino == os.fstat(descriptor).st_ino:
                yield
                return
        finally:
            os.close(descriptor)
