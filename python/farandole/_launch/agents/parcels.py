"""Sends the trace files of a host's ranks from the host's agent to the launcher.

A parcel is one file of one rank: its part, or the readings of its clock. Both ends know from the
job's environment where such files lie; the launcher's own are not written again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from filecmp import cmp
from pathlib import Path

from farandole._launch.agents import frames
from farandole._launch.agents.frames import Message

_PIECE = 256 * 1024
_GRACE = 1.0  # seconds: files tell the time less exactly than clocks


def folders(environment: Mapping[str, str]) -> dict[str, Path]:
    """The folders where ranks leave their parts, by kind: "trace" or "timeline"."""
    found = {}
    if trace := environment.get("FARANDOLE_TRACE"):
        found["trace"] = Path(trace).absolute()
    elif timeline := _timeline(environment):
        from farandole._trace.salvage import parts_of

        found["timeline"] = parts_of(timeline)
    return found


def _timeline(environment: Mapping[str, str]) -> Path | None:
    name = environment.get("FARANDOLE_TIMELINE") or environment.get("HOROVOD_TIMELINE")
    return Path(name).absolute() if name and name != "DYNAMIC" else None


def packed(environment: Mapping[str, str], ranks: range, since: float) -> Iterator[bytes]:
    """Frames with the files of these ranks that were written `since` (time.time) and are there.

    The readings of a rank's clock come before its part.
    """
    for what, folder in folders(environment).items():
        for rank in ranks:
            for name in (f"rank-{rank}.clock", f"rank-{rank}.jsonl"):
                with suppress(OSError):
                    path = folder / name
                    if path.stat().st_mtime >= since - _GRACE:
                        yield from _pieces(what, path)


def _pieces(what: str, path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            yield frames.message("parcel", piece, what=what, name=path.name, last=False)
    yield frames.message("parcel", what=what, name=path.name, last=True)


class Delivery:
    """Receives the trace files of all hosts of a job, at the launcher."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._folders = folders(environment)
        self._timeline = _timeline(environment)
        self._begun: set[Path] = set()  # the last piece has not come
        self._came: set[str] = set()  # of which a file came
        self._changed: set[str] = set()  # of which one was not here

    def announce(self, ranks: int) -> None:
        """Makes the file, valid and empty, before the job: rank 0 may be on another host."""
        from farandole import _trace

        for what, folder in self._folders.items():
            with suppress(OSError, _trace.TraceError):  # ranks will say that it cannot be written
                if what == "trace":
                    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                    _trace.announce(folder / _trace.MERGED, ranks)
                elif self._timeline is not None:
                    _trace.announce(self._timeline, ranks)

    def take(self, parcel: Message, ranks: range) -> None:
        """Stores a piece of a file. Raises FrameError if the file is none of `ranks`."""
        known = {f"rank-{rank}{end}" for rank in ranks for end in (".clock", ".jsonl")}
        what, name = parcel.content["what"], parcel.content["name"]
        if what not in self._folders or name not in known:
            raise frames.FrameError(f"a parcel {name!r:.40} of a {what!r:.40}")
        folder = self._folders[what]
        beside = folder / f".{name}.parcel"
        if beside not in self._begun:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            beside.unlink(missing_ok=True)  # of a launcher that was killed
            self._begun.add(beside)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(beside, flags, 0o600), "ab") as file:
            file.write(parcel.data)
        if not parcel.content["last"]:
            return
        self._begun.remove(beside)
        path = folder / name
        if path.exists() and cmp(beside, path, shallow=False):  # hosts that share the folder
            beside.unlink()
        else:
            beside.replace(path)
            self._changed.add(what)
        self._came.add(what)

    def put_together(self) -> None:
        """Merges the parts that came with those that are here.

        Raises:
            TraceError: the trace cannot be read or written.
        """
        from farandole import _trace

        for what, folder in self._folders.items():
            for torn in self._begun:  # its agent was lost
                torn.unlink(missing_ok=True)
            if what == "trace" and what in self._changed:
                _trace.merge(folder)
            elif what == "timeline" and what in self._came:
                _trace.merge(folder, self._timeline)
                shutil.rmtree(folder, ignore_errors=True)
