"""A trace that begins and ends while ranks run, in one file, as Horovod's timeline does.

Every rank that starts records, and writes its part when it stops: into ``.FILE.parts`` beside the
file. Whoever stops puts together what parts there are, so the file is there when the first rank has
stopped, and complete when the last one has, which removes the parts. It is there from the start,
without events.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from farandole import _core, _trace
from farandole._arguments import explained
from farandole._core import Error, InvalidArgument, ResourceError
from farandole._trace.parts import newest
from farandole._trace.salvage import parts_of
from farandole._world import world

__all__ = ["start_timeline", "stop_timeline"]


class _State:
    file: Path | None = None
    number = 0  # of starts, counted alike on all ranks


_state = _State()


@explained
def start_timeline(file_path: os.PathLike[str] | str, mark_cycles: bool = False) -> None:  # noqa: ARG001
    """Records from now on where this rank's time goes, until ``stop_timeline()`` or the end.

    Usually every rank calls it. On rank 0 alone, the file shows rank 0 alone.

    Args:
        file_path: a Chrome trace in JSON, for https://ui.perfetto.dev; replaced if it is there.
        mark_cycles: of Horovod's signature. There are no cycles to mark.

    Raises:
        InvalidArgument: a timeline is being written, or ``FARANDOLE_TRACE`` traces the whole run.
        NotInitialized: before ``init()``.
        ResourceError: the directory cannot be written.

    Example:
        >>> import farandole as fd
        >>> fd.init()
        >>> fd.start_timeline("/tmp/timeline.json")
        >>> fd.barrier()
        >>> fd.stop_timeline()
    """
    group = world()
    if _state.file is not None:
        raise InvalidArgument(f"a timeline is being written to {_state.file} already")
    file = Path(file_path).absolute()
    parts = parts_of(file)
    try:
        with _alone_in(parts):
            group.start_timeline(str(parts), _state.number + 1)
            if not any(parts.glob("rank-*")):
                _trace.announce(file, group.size)
    except (OSError, _trace.TraceError) as error:
        raise ResourceError(f"no timeline can be written to {file}: {error}") from error
    _state.file = file
    _state.number += 1


def stop_timeline() -> None:
    """Ends what ``start_timeline()`` began, and writes the file.

    Raises:
        InvalidArgument: no timeline was started.
        ResourceError: the file cannot be written.
    """
    if _state.file is None:
        raise InvalidArgument("no timeline was started; call start_timeline() first")
    group, file, _state.file = world(), _state.file, None
    parts = parts_of(file)
    try:
        with _alone_in(parts):
            group.stop_timeline()
            _trace.recover(parts, apart_from=group.rank)
            _trace.merge(parts, file)
            if len(newest(parts)[0]) == group.size:
                shutil.rmtree(parts, ignore_errors=True)
    except (OSError, _trace.TraceError) as error:
        raise ResourceError(f"the timeline {file} cannot be written: {error}") from error


def start_as_asked() -> None:
    """At init(): what FARANDOLE_TIMELINE, or HOROVOD_TIMELINE, asks for."""
    settings = {row["name"]: row["value"] for row in _core.settings()}
    file = settings["FARANDOLE_TIMELINE"]
    if not file or file == "DYNAMIC" or settings["FARANDOLE_TRACE"]:
        return
    try:
        start_timeline(file)
    except Error as error:
        warnings.warn(f"no timeline is written: {error}", RuntimeWarning, stacklevel=3)


def finish() -> None:
    """At shutdown(): a timeline that nobody has stopped."""
    if _state.file is None:
        return
    try:
        stop_timeline()
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
