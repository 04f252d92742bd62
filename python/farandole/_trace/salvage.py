"""Recovers the parts of ranks that could not write them, from the files with their events."""

from __future__ import annotations

import re
import warnings
from contextlib import suppress
from pathlib import Path

from farandole._trace.parts import TraceError


def recover(folder: Path, *, apart_from: int = -1, living: bool = False) -> list[int]:
    """Writes the parts of ranks that have ended without them; of running ones, too, if `living`.

    A file that cannot be read or written is a warning.

    Returns:
        These ranks.
    """
    found, troubles = [], []
    for path in events_files(folder):
        rank = int(path.name.split("-")[1].split(".")[0])
        try:
            if rank != apart_from and _recover(path, living):
                found.append(rank)
        except TraceError as error:
            troubles.append(str(error))
    for trouble in troubles:
        warnings.warn(f"left out of the trace: {trouble}", RuntimeWarning, stacklevel=2)
    return sorted(found)


def events_files(folder: Path) -> list[Path]:
    """The files that ranks record into, or recorded into when they died."""
    with suppress(OSError):
        return [p for p in folder.iterdir() if re.fullmatch(r"\.rank-\d+\.events", p.name)]
    return []


def _recover(path: Path, living: bool) -> bool:
    from farandole import _core

    try:
        return _core.recover_trace_part(str(path), living)
    except _core.ResourceError as error:
        if not path.exists():  # another rank was faster
            return False
        raise TraceError(error.verdict) from error


def parts_of(timeline: Path) -> Path:
    """Where ranks leave their parts of a timeline."""
    return timeline.with_name(f".{timeline.name}.parts")
